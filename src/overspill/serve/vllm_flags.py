"""Flags of vLLM's `serve` that mean nothing here: each is refused by name, or means what happens anyway.

Those that both have (`--max-model-len`, `--cpu-offload-gb`, …) are the command's own options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from overspill.errors import ConfigError


@dataclass(frozen=True)
class Flag:
    """`why` it is not honoured and the `way_out`. `same` are the values that ask for what happens anyway.

    A switch takes no value: its values are "true", and "false" for `--no-…`.
    """

    why: str
    way_out: str
    same: tuple[str, ...] = ()
    switch: bool = False


_ONE_DEVICE = Flag("one device computes", "weights that do not fit it overspill: --cpu-offload-gb", ("1",))
_TOOLS = Flag("this server calls no tools", "leave it out, and let the client read the answer's text", ("false",), True)
_TOOL_FILE = Flag("this server calls no tools", "leave it out, and let the client read the answer's text")
_LORA = Flag("adapters are not loaded", "merge the adapter into the weights, and serve those")
_LORA_SWITCH = Flag(_LORA.why, _LORA.way_out, ("false",), True)
_TLS = Flag("this server speaks plain HTTP", "a proxy in front of it for TLS, with --api-key")
_PROXY = Flag("paths begin at /", "a proxy in front of it that takes the prefix off")
_KERNELS = Flag("how layers are computed is transformers' choice", "leave it out")
_KERNEL_SWITCH = Flag(_KERNELS.why, _KERNELS.way_out, ("false",), True)
_TEMPLATE = Flag("the chat template is the model's own", "put it into the model's tokenizer_config.json")
_SPECULATION = Flag("tokens are not guessed ahead", "leave it out")
_MEDIA = Flag("only text goes in", "leave it out")
_CORS = Flag("CORS allows GET and POST with any header, and no cookies", "--allowed-origins says whom")
_LOGS = Flag("requests are not logged one by one", "GET /metrics counts them", ("true",), True)

UNHONOURED: Mapping[str, Flag] = {
    # several devices
    "--tensor-parallel-size": _ONE_DEVICE,
    "-tp": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "-pp": _ONE_DEVICE,
    "--data-parallel-size": _ONE_DEVICE,
    "-dp": _ONE_DEVICE,
    "--decode-context-parallel-size": _ONE_DEVICE,
    "--prefill-context-parallel-size": _ONE_DEVICE,
    "--api-server-count": Flag("one process answers", "leave it out", ("1",)),
    "--enable-expert-parallel": Flag(_ONE_DEVICE.why, "leave it out", ("false",), True),
    "--distributed-executor-backend": Flag(_ONE_DEVICE.why, "leave it out", ("uni",)),
    "--nnodes": _ONE_DEVICE,
    # what is loaded, and how
    "--quantization": Flag("weights are used as the checkpoint has them", "a checkpoint that is quantized: GGUF"),
    "-q": Flag("weights are used as the checkpoint has them", "a checkpoint that is quantized: GGUF"),
    "--load-format": Flag("the format is seen from the files", "leave it out", ("auto", "safetensors")),
    "--tokenizer": Flag("the tokenizer is the model's own", "put its files beside the weights"),
    "--tokenizer-mode": Flag("the tokenizer is the model's own", "leave it out", ("auto", "hf")),
    "--tokenizer-revision": Flag("the tokenizer is the model's own", "--revision says which of both"),
    "--skip-tokenizer-init": Flag("a tokenizer is used where there is one", "leave it out", ("false",), True),
    "--hf-config-path": Flag("the configuration is the model's own", "put its config.json beside the weights"),
    "--hf-overrides": Flag("the configuration is the model's own", "edit its config.json"),
    "--hf-token": Flag("the hub's own settings hold", "HF_TOKEN in the environment"),
    "--download-dir": Flag("the hub's cache is used", "HF_HOME in the environment says where it is"),
    "--model-impl": Flag("models are transformers'", "leave it out", ("auto", "transformers")),
    "--generation-config": Flag(
        "sampling is as a request says, and OpenAI's where it is silent", "leave it out", ("vllm",)
    ),
    "--override-generation-config": Flag("sampling is as a request says", "say it in the request"),
    "--runner": Flag("text is generated", "leave it out", ("auto", "generate")),
    "--task": Flag("text is generated", "leave it out", ("auto", "generate")),
    "--convert": Flag("text is generated", "leave it out", ("auto", "none")),
    "--enable-lora": _LORA_SWITCH,
    "--lora-modules": _LORA,
    "--max-loras": _LORA,
    "--max-lora-rank": _LORA,
    # memory and computation
    "--enable-prefix-caching": Flag("prompts are computed whole", "leave it out", ("false",), True),
    "--enable-chunked-prefill": Flag("prompts are computed in chunks", "--max-num-batched-tokens", ("true",), True),
    "--swap-space": Flag("KV caches stay on the device", "leave it out", ("0",)),
    "--kv-cache-dtype": Flag("the KV cache has the dtype of the computation", "--dtype", ("auto",)),
    "--block-size": Flag("the size of a page is the engine's choice", "leave it out"),
    "--num-gpu-blocks-override": Flag("pages follow from the memory", "--kv-cache-memory-bytes"),
    "--kv-offloading-size": Flag("KV caches stay on the device", "leave it out", ("0",)),
    "--kv-transfer-config": Flag("KV caches stay on the device", "leave it out"),
    "--scheduling-policy": Flag("requests are served in the order they arrive in", "leave it out", ("fcfs",)),
    "--enforce-eager": Flag("there are no CUDA graphs", "leave it out", ("true",), True),
    "--compilation-config": _KERNELS,
    "--attention-backend": _KERNELS,
    "--enable-dbo": _KERNEL_SWITCH,
    "--async-scheduling": _KERNEL_SWITCH,
    "--speculative-config": _SPECULATION,
    "--max-logprobs": Flag("a request may ask for 20", "leave it out", ("20",)),
    "--logits-processors": Flag("the engine's are fixed", "logit_bias in a request"),
    "--structured-outputs-config": Flag(
        "a schema is followed by llguidance, and nothing of it can be set", "leave it out"
    ),
    "--guided-decoding-backend": Flag("a schema is followed by llguidance", "leave it out", ("auto", "guidance")),
    "--limit-mm-per-prompt": _MEDIA,
    "--mm-processor-kwargs": _MEDIA,
    "--allowed-local-media-path": _MEDIA,
    # the API
    "--chat-template": _TEMPLATE,
    "--chat-template-content-format": Flag(_TEMPLATE.why, "leave it out", ("auto", "string")),
    "--tool-call-parser": _TOOL_FILE,
    "--tool-parser-plugin": _TOOL_FILE,
    "--enable-auto-tool-choice": _TOOLS,
    "--reasoning-parser": Flag("reasoning is part of the answer's text", "let the client tell them apart"),
    "--response-role": Flag("answers are the assistant's", "leave it out", ("assistant",)),
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
    "--ssl-ca-certs": _TLS,
    "--root-path": _PROXY,
    "--uds": Flag("this server listens at an address", "--host and --port"),
    "--middleware": Flag("no code is loaded into the server", "a proxy in front of it"),
    "--allow-credentials": _CORS,
    "--allowed-methods": _CORS,
    "--allowed-headers": _CORS,
    "--headless": Flag("the API is what this command serves", "leave it out", ("false",), True),
    "--config": Flag("settings are flags", "@FILE after --offload-config reads that document"),
    "--uvicorn-log-level": Flag("the log has what went wrong", "--debug says more"),
    "--disable-log-requests": _LOGS,
    "--disable-log-stats": _LOGS,
    "--disable-uvicorn-access-log": _LOGS,
    "--enable-log-requests": Flag(_LOGS.why, _LOGS.way_out, ("false",), True),
    "--disable-fastapi-docs": Flag("there are no pages of documentation", "leave it out", ("true",), True),
}


def without_vllm_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """`arguments` without vLLM's flags that mean what happens anyway, and a note for each.

    ConfigError, naming the flag, for one that would mean something else.
    """
    notes: list[str] = []
    return list(_kept(iter(arguments), notes)), notes


def _kept(arguments: Iterator[str], notes: list[str]) -> Iterator[str]:
    for argument in arguments:
        if argument == "--":
            yield argument
            yield from arguments
            return
        spelled, has_value, value = argument.partition("=")
        name, flag, negated = _find(spelled)
        if flag is None:
            yield argument
            continue
        if flag.switch and not has_value:
            value = "false" if negated else "true"
        elif not has_value:
            value = next(arguments, "")
        if value.lower() not in flag.same:
            raise ConfigError(f"{spelled} is vLLM's, and cannot be honoured: {flag.why}", hint=flag.way_out)
        notes.append(f"{name} changes nothing: {flag.why}")


def _find(spelled: str) -> tuple[str, Flag | None, bool]:
    """The flag's name as vLLM writes it, and whether it was spelled `--no-…`. A part of a document is its whole."""
    name = spelled if not spelled.startswith("--") else spelled.partition(".")[0].replace("_", "-")
    if name in UNHONOURED:
        return name, UNHONOURED[name], False
    positive = f"--{name.removeprefix('--no-')}"
    if name.startswith("--no-") and positive in UNHONOURED and UNHONOURED[positive].switch:
        return name, UNHONOURED[positive], True
    return name, None, False
