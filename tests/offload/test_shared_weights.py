"""Weights and buffers that several places share, read, or fight over: the answer stands, or the start is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import overspill
from overspill.errors import ConfigError, UnsupportedModelError
from overspill.model.hf import cache_argument, cache_of

PREFETCH = {"prefetch": {"offload_group_size": 1}}
WAYS = {
    "prefetch": (PREFETCH, {}),
    "uva": ({"uva": {"cpu_offload_gb": 1}}, {}),
    "without zero-copy": ({"uva": {"cpu_offload_gb": 1}}, {"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1"}),
}
IDS = torch.arange(9)[None]
NEXT = torch.zeros(1, 1, dtype=torch.long)


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 64,
    }
    config = LlamaConfig(**{**sizes, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def logits(model: Any, placed: Any) -> list[torch.Tensor]:
    """A prompt pass and a decode step."""
    with placed.running():
        first = model(placed.device.to_device(IDS), use_cache=True)
        second = model(placed.device.to_device(NEXT), **{cache_argument(model): cache_of(first)}, use_cache=True)
    return [first.logits, second.logits]


def plain(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        first = model(IDS, use_cache=True)
        return [first.logits, model(NEXT, **{cache_argument(model): cache_of(first)}, use_cache=True).logits]


def tie_two_layers(model: Any) -> None:
    model.model.layers[3].mlp.down_proj.weight = model.model.layers[1].mlp.down_proj.weight


def share_a_module(model: Any) -> None:
    model.model.layers[4].mlp = model.model.layers[2].mlp


def share_a_buffer(model: Any) -> None:
    shared = torch.ones(3)
    for number in (0, 1):
        model.model.layers[number].register_buffer("shared", shared, persistent=False)


def read_when_decoding(model: Any) -> None:
    """The parent reads a layer's weight itself, but only for a single token."""
    forward = model.model.forward

    def reading(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(input_ids, *args, **kwargs)
        if input_ids.shape[1] == 1:
            output.last_hidden_state = output.last_hidden_state + model.model.layers[1].mlp.down_proj.weight.sum()
        return output

    model.model.forward = reading


def read_by_the_parent(model: Any) -> None:
    """In each pass, before any layer runs."""
    embed = model.model.embed_tokens
    embed.register_forward_hook(lambda m, args, output: output + model.model.layers[2].self_attn.o_proj.weight.sum())


def tie_the_embeddings_to_the_head(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def write_a_buffer(model: Any) -> None:
    """One that a checkpoint holds, and that each pass changes."""
    layer = model.model.layers[1]
    layer.register_buffer("calls", torch.zeros(1))

    def counting(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        module.calls += 1
        return output * (1 + module.calls)

    layer.register_forward_hook(counting)


def call_a_layer_twice(model: Any) -> None:
    """Layer 3 runs layer 1 again before itself."""
    first, third = model.model.layers[1], model.model.layers[3]
    forward = third.forward
    third.forward = lambda hidden, *args, **kwargs: forward(first(hidden, *args, **kwargs), *args, **kwargs)


def run_a_layer_within_another(model: Any) -> None:
    """Layer 3 runs layer 2, which runs nowhere else."""
    second, third, forward = model.model.layers[2], model.model.layers[3], model.model.layers[3].forward
    third.forward = lambda hidden, *args, **kwargs: forward(second(hidden, *args, **kwargs), *args, **kwargs)
    inner = model.model.forward

    def without_second(*args: Any, **kwargs: Any) -> Any:
        whole = model.model.layers
        model.model.layers = nn.ModuleList(layer for layer in whole if layer is not second)
        try:
            return inner(*args, **kwargs)
        finally:
            model.model.layers = whole

    model.model.forward = without_second


def run_all_layers_twice(model: Any) -> None:
    """As looped transformers do; the second round without a cache."""
    inner = model.model
    forward = inner.forward

    def twice(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(input_ids, *args, **kwargs)
        again = forward(inputs_embeds=output.last_hidden_state, use_cache=False)
        output.last_hidden_state = output.last_hidden_state + again.last_hidden_state
        return output

    inner.forward = twice


def skip_a_layer_when_decoding(model: Any) -> None:
    forward = model.model.forward

    def skipping(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = model.model.config.num_hidden_layers
        model.model.config.num_hidden_layers = whole - 1 if input_ids.shape[1] == 1 else whole
        try:
            return forward(input_ids, *args, **kwargs)
        finally:
            model.model.config.num_hidden_layers = whole

    model.model.forward = skipping


def replace_a_parameter_in_the_first_pass(model: Any) -> None:
    """Another tensor in another shape, as models that fuse their weights when they first run."""
    mlp = model.model.layers[2].mlp
    mlp.fused = False

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if not mlp.fused:
            both = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
            mlp.gate_proj.weight = nn.Parameter(both, requires_grad=False)
            mlp.fused = True
        gate, up = torch.nn.functional.linear(hidden, mlp.gate_proj.weight).chunk(2, -1)
        return mlp.down_proj(mlp.act_fn(gate) * up)

    mlp.forward = forward


def write_a_weight_in_the_first_pass(model: Any) -> None:
    """As RWKV does, which rescales its layers."""
    mlp = model.model.layers[4].mlp
    forward, done = mlp.forward, []

    def rescaling(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.device.type != "meta" and not done:
            done.append(True)
            mlp.down_proj.weight.div_(4)
        elif hidden.device.type == "meta":
            mlp.down_proj.weight.div_(4)
        return forward(hidden)

    mlp.forward = rescaling


def keep_a_view_of_a_weight(model: Any) -> None:
    """Made in the first pass, used in all others."""
    mlp = model.model.layers[5].mlp
    kept: list[torch.Tensor] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.device.type == "meta":
            return hidden @ mlp.gate_proj.weight.t() @ mlp.up_proj.weight
        if not kept:
            kept.append(mlp.gate_proj.weight.t())
        return hidden @ kept[0] @ mlp.up_proj.weight

    mlp.forward = forward


AWKWARD = (
    tie_two_layers,
    tie_the_embeddings_to_the_head,
    share_a_module,
    share_a_buffer,
    write_a_buffer,
    read_by_the_parent,
    read_when_decoding,
    call_a_layer_twice,
    run_a_layer_within_another,
    run_all_layers_twice,
    skip_a_layer_when_decoding,
    replace_a_parameter_in_the_first_pass,
    write_a_weight_in_the_first_pass,
    keep_a_view_of_a_weight,
)


@pytest.mark.filterwarnings("ignore::overspill.errors.OverspillWarning")  # budgets above all there is, on purpose
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("awkward", AWKWARD)
def test_what_layers_share_skip_or_change_stays_right(awkward: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    document, environ = WAYS[way]
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    reference, model = llama(), llama()
    awkward(reference)
    awkward(model)
    placed = overspill.offload(model, document, device="emulated", debug=True)
    assert placed.plan.offloaded_bytes > 0
    for _ in range(2):
        for ours, theirs in zip(logits(model, placed), plain(reference), strict=True):
            assert torch.equal(ours, theirs)


def test_threads_wait_their_turn() -> None:
    expected = plain(llama())
    model = llama()
    placed = overspill.offload(model, PREFETCH, device="emulated", debug=True)
    wrong: list[int] = []

    def run(number: int) -> None:
        runs = [logits(model, placed) for _ in range(5)]
        wrong.extend(number for got in runs if not all(map(torch.equal, got, expected)))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_model_is_offloaded_once() -> None:
    model = llama()
    placed = overspill.offload(model, PREFETCH, device="emulated")
    with pytest.raises(ConfigError, match="offloaded already"):
        overspill.offload(model, PREFETCH, device="emulated")
    assert all(torch.equal(a, b) for a, b in zip(logits(model, placed), plain(llama()), strict=True))


def test_a_refusal_leaves_the_caller_s_model_as_it_was() -> None:
    model = llama().train().requires_grad_(True)
    with pytest.raises(ConfigError, match="offload_group_size 99"):
        overspill.offload(model, {"prefetch": {"offload_group_size": 99}}, device="emulated")
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("option", [{"dtype": "bfloat16"}, {"max_model_len": 9}, {"seed": 1}, {"revision": "x"}])
def test_an_option_without_effect_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        overspill.offload(llama(), PREFETCH, device="emulated", **option)


@pytest.mark.parametrize("same", [True, False])
def test_tied_names_with_different_values_are_refused(same: bool, tmp_path: Path) -> None:
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    if not same:
        head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, file, metadata={"format": "pt"})
    if same:
        assert (
            overspill.load(tmp_path, device="emulated")
            .generate([1, 2, 3], overspill.SamplingParams(max_tokens=2))
            .token_ids
        )
    else:
        with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight are tied"):
            overspill.load(tmp_path, device="emulated")
