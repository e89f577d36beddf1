"""Real text: the demo model answers through overspill as the same weights do in transformers, token by token.

The model is full of near ties (the first token of an answer can win by 0.1 of a logit), so its answers show the
smallest deviation. The reference shares no code with overspill: the gguf package reads and dequantises the file,
transformers undoes llama.cpp's order of the rotary heads, computes and generates.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

import overspill
from overspill.engine import Engine, SamplingParams
from overspill.plan import Tier

pytestmark = pytest.mark.real_model

CAPITAL = "What is the capital of France?"
PROMPTS = (
    CAPITAL,
    "Name three colours.",
    "Write a short poem about rain.",
    "What is 7 times 8?",
    "Translate 'good morning' to Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "def fibonacci(n):",
    "Wer schrieb Faust? 🙂",
    "Count from one to ten.",
)
NEW = 12
WAYS = {
    "uva": {"uva": {"cpu_offload_gb": 0.3}},
    "prefetch": {"prefetch": {"offload_group_size": 2}},
}
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def demo_model() -> Path:
    source = Path(__file__).parents[2] / "examples" / "demo_model.py"
    spec = importlib.util.spec_from_file_location("demo_model", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.demo_model_path()


Answer = Callable[[tuple[int, ...]], list[int]]


@pytest.fixture(scope="module")
def reference(demo_model: Path) -> Answer:
    """What transformers answers to token ids; each prompt is computed once."""
    model = reference_model(demo_model)

    @cache
    def answer(prompt_ids: tuple[int, ...]) -> list[int]:
        ids = torch.tensor([prompt_ids])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=2,
        )
        return output[0, len(prompt_ids) :].tolist()

    return answer


def reference_model(demo_model: Path) -> LlamaForCausalLM:
    """transformers' own model in float32, on the CPU, with the file's weights."""
    reader = gguf.GGUFReader(demo_model)

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    config = LlamaConfig(
        vocab_size=field("vocab_size"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
    )
    rearrange = LlamaTensorProcessor(config=config.to_dict())
    weights = {}
    for tensor in reader.tensors:
        dense = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weights[_parameter(tensor.name)] = torch.tensor(rearrange.process(dense, tensor.name).weights)
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


def _parameter(name: str) -> str:
    """llama.cpp's name of a tensor in transformers' words."""
    if not name.startswith("blk."):
        return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
    _, layer, module, kind = name.split(".")
    return f"model.layers.{layer}.{_MODULES[module]}.{kind}"


@pytest.fixture(scope="module", params=WAYS)
def engine(request: pytest.FixtureRequest, demo_model: Path) -> Engine:
    return overspill.load(
        demo_model,
        WAYS[request.param],
        device="emulated",
        dtype="float32",
        device_memory_bytes="450MiB",
        link_bandwidth="1000GB/s",
        max_model_len=64,
    )


def test_ten_answers_are_those_of_transformers(engine: Engine, reference: Answer) -> None:
    assert len(PROMPTS) == 10
    assert engine.ledger.bytes_on(Tier.HOST) == engine.plan.offloaded_bytes > 200_000_000
    answers = {prompt: engine.generate(prompt, SamplingParams(max_tokens=NEW)) for prompt in PROMPTS}
    expected = {prompt: reference(tuple(answer.prompt_ids)) for prompt, answer in answers.items()}
    assert {prompt: answer.token_ids for prompt, answer in answers.items()} == expected
    assert all(step.traffic.bytes > 0 for answer in answers.values() for step in answer.steps[1:])


def test_the_capital_of_france_is_known(engine: Engine) -> None:
    completion = engine.generate(CAPITAL, SamplingParams(max_tokens=NEW))
    assert len(completion.prompt_ids) == 37
    assert completion.token_ids == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert (completion.text, completion.finish_reason) == ("The capital of France is Paris.", "stop")
