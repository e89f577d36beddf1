from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import embedding, linear, scaled_dot_product_attention
from transformers import GPT2Config, GPTNeoConfig, PretrainedConfig, T5Config, WhisperConfig

from emulated_runs import emulated, mapped, settings_for
from overspill.model import hf
from overspill.model.stacks import find_stacks
from overspill.model.trace import Trace, trace
from overspill.offload.placed import place
from overspill.plan import make_plan
from tiny_models import ARCHITECTURES, TINY, MakeTiny

SPARSE = {"qwen3_moe", "deepseek_v2", "gpt_oss", "qwen3_next", "kimi_linear", "nemotron_h", "mixtral", "mixtral_fused"}


@pytest.mark.parametrize(("tokens", "sequences"), [(20, 2), (5, 1)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_memory_is_forecast_as_a_real_pass_takes_it(name: str, tokens: int, sequences: int, tiny: MakeTiny) -> None:
    """The cache to the byte; working memory too, but for experts, whose share depends on what is chosen."""
    model = mapped(tiny(name), tokens=tokens, sequences=sequences)
    assert model.trace.failure is None
    device = emulated()
    plan = make_plan(model, settings_for(None, max_num_seqs=sequences), device, context_tokens=tokens)
    placed = place(plan, device)
    ids = device.to_device(torch.randint(3, 128, (sequences, tokens)))
    device.reset_peak()
    with placed.running():
        output = placed.model(ids, use_cache=True, logits_to_keep=1)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in hf.tensors_in(hf.cache_of(output))}
    cache_bytes = sum(storage.nbytes() for storage in storages.values())
    assert model.trace.kv_cache_bytes == cache_bytes > 0
    working_bytes = device.account.peak["working"] - cache_bytes
    if name in SPARSE:
        assert 0.5 * working_bytes <= model.trace.working_bytes <= 1.05 * working_bytes
    else:
        assert model.trace.working_bytes == pytest.approx(working_bytes, rel=0.02)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_run_once_each_in_turn_and_keep_their_weights_to_themselves(name: str) -> None:
    skeleton = hf.build_skeleton(TINY[name].config(), torch.float32)
    (stack,) = find_stacks(skeleton)
    traced = trace(skeleton, (stack,), tokens=3)
    assert traced.layer_order == tuple((stack.path, number) for number in range(stack.layers))
    assert traced.outside_reads == frozenset()
    experts = {path for path, module in skeleton.named_modules() if path.endswith(".experts")}
    assert traced.experts_top_k == dict.fromkeys(experts, 2)
    assert bool(experts) == (name in SPARSE)


def test_a_trace_leaves_the_model_as_it_was() -> None:
    skeleton = hf.build_skeleton(TINY["gemma3"].config(), torch.float32)
    hf.rebuild_buffers(skeleton)
    before = {n: (t, t.device) for n, t in (*skeleton.named_parameters(), *skeleton.named_buffers())}
    values = {n: t.clone() for n, t in skeleton.named_buffers()}
    trace(skeleton, find_stacks(skeleton), tokens=3)
    after = dict((*skeleton.named_parameters(), *skeleton.named_buffers()))
    assert all(after[name] is tensor and after[name].device == device for name, (tensor, device) in before.items())
    assert all(torch.equal(after[name], value) for name, value in values.items())
    for module in skeleton.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_the_cache_grows_with_tokens_and_sequences_and_working_memory_with_tokens() -> None:
    skeleton = hf.build_skeleton(TINY["llama"].config(), torch.float32)
    stacks = find_stacks(skeleton)
    short, long, two = (trace(skeleton, stacks, tokens=t, sequences=s) for t, s in ((100, 1), (200, 1), (100, 2)))
    assert long.kv_cache_bytes == two.kv_cache_bytes == 2 * short.kv_cache_bytes
    assert short.kv_cache_bytes == 6 * 2 * 100 * 8 * 4  # layers, keys and values, tokens, head, float32
    assert long.working_bytes == pytest.approx(2 * short.working_bytes, rel=0.02)


class Parent(nn.Module):
    """A model that does what its maker tells it with its two layers."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.config = PretrainedConfig()
        self.layers = nn.ModuleList(nn.Linear(4, 4, device="meta") for _ in range(2))
        self.requires_grad_(False)
        self._forward = forward

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        hidden = torch.ones(*input_ids.shape, 4)
        return SimpleNamespace(logits=self._forward(hidden, *self.layers))


def traced(forward: Any) -> Trace:
    model = Parent(forward)
    return trace(model, find_stacks(model), tokens=3)


def test_what_the_parent_reads_of_a_layer_is_seen() -> None:
    reads = {
        "a weight": (lambda x, a, b: b(a(x)) @ a.weight, {"layers.0.weight"}),
        "through a view": (lambda x, a, b: b(a(x)) @ a.weight.t()[:4], {"layers.0.weight"}),
        "its call's work": (lambda x, a, b: linear(a(x), b.weight, b.bias), {"layers.1.weight", "layers.1.bias"}),
        "nothing": (lambda x, a, b: b(a(x)), set()),
        "its shape": (lambda x, a, b: b(a(x)) * a.weight.shape[0], set()),
    }  # fmt: skip
    for what, (forward, expected) in reads.items():
        result = traced(forward)
        assert result.failure is None
        assert result.outside_reads == expected, what


def test_a_padding_token_is_no_reason_to_fail() -> None:
    """gpt2 and its kin look for it among the ids, only to warn."""
    config = GPT2Config(vocab_size=8, n_positions=8, n_embd=4, n_layer=2, n_head=1, pad_token_id=3)
    skeleton = hf.build_skeleton(config, torch.float32)
    result = trace(skeleton, find_stacks(skeleton), tokens=3)
    assert result.failure is None
    assert len(result.layer_order) == 2
    assert skeleton.config.pad_token_id == 3


def test_the_order_and_number_of_runs_are_seen() -> None:
    assert traced(lambda x, a, b: a(b(a(x)))).layer_order == (("layers", 0), ("layers", 1), ("layers", 0))
    assert traced(lambda x, a, b: b(x)).layer_order == (("layers", 1),)


def test_a_value_that_an_architecture_asks_for_is_zero_and_counted() -> None:
    result = traced(lambda x, a, b: b(x) if x.sum().item() > 0 else a(x))
    assert result.failure is None
    assert result.guesses == 1
    assert result.layer_order == (("layers", 0),)
    assert traced(lambda x, a, b: b(a(x))).guesses == 0


def test_what_a_mask_chooses_is_everything() -> None:
    """Experts in loops of their own, rows that a language chooses."""

    def masked(x: torch.Tensor, a: nn.Module, b: nn.Module) -> torch.Tensor:
        mask = x[..., 0] > 0
        rows, columns = torch.where(mask)
        out = torch.zeros_like(x)
        out[mask] = b(a(x[mask]))
        return out + x[rows, columns].sum()

    result = traced(masked)
    assert result.failure is None
    assert result.guesses == 1
    assert result.layer_order == (("layers", 0), ("layers", 1))


def test_an_architecture_that_needs_values_fails_to_trace_and_says_why() -> None:
    result = traced(lambda x, a, b: b(a(x)) * len(x.flatten().tolist()))
    assert result.failure is not None
    assert "meta" in result.failure.lower()
    assert (result.tokens, result.sequences) == (3, 1)
    assert (result.kv_cache_bytes, result.working_bytes, result.layer_order) == (0, 0, ())


def test_what_a_step_reads_is_counted_as_a_link_carries_it() -> None:
    """Four by four float32: read twice, by a view of half, by rows, not at all."""
    reads = {
        "twice": (lambda x, a, b: b(a(a(x))), {"layers.0.weight": (128, 0, 2), "layers.1.weight": (64, 0, 1)}),
        "half of it": (lambda x, a, b: x @ a.weight.t()[:, :2], {"layers.0.weight": (32, 0, 1)}),
        "by rows": (
            lambda x, a, b: a(x) + embedding(torch.zeros(1, 3, dtype=torch.long), b.weight),
            {"layers.0.weight": (64, 0, 1), "layers.1.weight": (0, 16, 1)},
        ),
        "its size": (lambda x, a, b: a(x) * b.weight.shape[0], {"layers.0.weight": (64, 0, 1)}),
    }  # fmt: skip
    for what, (forward, expected) in reads.items():
        found = traced(forward).reads
        assert found is not None
        weights = {n: (r.whole_bytes, r.token_bytes, r.times) for n, r in found.items() if n.endswith("weight")}
        assert weights == expected, what


def test_what_an_architecture_writes_is_seen() -> None:
    def rescaling(x: torch.Tensor, a: Any, b: nn.Module) -> torch.Tensor:
        a.weight.div_(2)
        return b(a(x))

    assert traced(rescaling).written == {"layers.0.weight"}
    assert traced(lambda x, a, b: b(a(x))).written == set()


def test_a_list_of_weights_that_is_written_at_once_is_seen() -> None:
    def rescaling(x: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        torch._foreach_mul_([a.weight, b.weight], 0.5)
        return b(a(x))

    assert traced(rescaling).written == {"layers.0.weight", "layers.1.weight"}


def test_what_attention_is_given_of_a_layer_is_seen() -> None:
    def attending(x: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        hidden = b(a(x))[:, None]
        return scaled_dot_product_attention(hidden, a.weight[None, None], hidden.new_ones(1, 1, 4, 4))

    assert traced(attending).outside_reads == {"layers.0.weight"}


def test_layers_that_run_until_a_value_is_reached_end_the_trace() -> None:
    def until(x: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
        while not (x > 0).all():
            x = b(a(x))
        return x

    result = traced(until)
    assert result.failure is not None
    assert "how often hangs on values" in result.failure


def test_a_row_of_ids_that_chooses_in_the_second_place_reads_the_first_alone() -> None:
    """index_select(table, 0, ids): the ids are no parameter; a parameter as ids' neighbour is read whole."""
    result = traced(lambda x, a, b: a(x) + torch.gather(x, 2, torch.zeros(1, 3, 4, dtype=torch.long)) @ b.weight)
    assert result.reads is not None
    assert (result.reads["layers.1.weight"].whole_bytes, result.reads["layers.1.weight"].token_bytes) == (64, 0)


def test_the_cache_of_an_encoder_decoder_is_counted() -> None:
    config = T5Config(
        vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_decoder_layers=2, num_heads=2,
        architectures=["T5ForConditionalGeneration"], decoder_start_token_id=0,
    )  # fmt: skip
    skeleton = hf.build_skeleton(config, torch.float32)
    result = trace(skeleton, find_stacks(skeleton), tokens=5)
    assert (result.failure, result.decode_failure) == (None, None)
    assert result.kv_cache_bytes == 2 * 2 * 2 * (5 * 8 * 4)  # layers, keys and values, own and of the encoder


def test_a_decode_step_past_the_last_position_is_traced_after_a_shorter_prompt() -> None:
    config = GPTNeoConfig(
        vocab_size=16, hidden_size=8, num_layers=2, num_heads=2, max_position_embeddings=16,
        attention_types=[[["global"], 2]],
    )  # fmt: skip
    skeleton = hf.build_skeleton(config, torch.float32)
    result = trace(skeleton, find_stacks(skeleton), tokens=16)
    assert (result.failure, result.decode_failure) == (None, None)
    assert result.outside_reads == frozenset()
    assert result.reads is not None
    assert result.reads["transformer.wte.weight"].token_bytes == 8 * 4


def test_what_a_decode_step_does_not_read_is_an_encoder() -> None:
    config = WhisperConfig(
        vocab_size=16, num_mel_bins=4, encoder_layers=2, decoder_layers=2, encoder_attention_heads=1,
        decoder_attention_heads=1, d_model=8, encoder_ffn_dim=8, decoder_ffn_dim=8, max_source_positions=6,
        max_target_positions=8, pad_token_id=0, architectures=["WhisperForConditionalGeneration"],
    )  # fmt: skip
    skeleton = hf.build_skeleton(config, torch.float32)
    result = trace(skeleton, find_stacks(skeleton), tokens=3)
    assert (result.failure, result.decode_failure) == (None, None)
    assert result.reads is not None
    assert not [name for name in result.reads if name.startswith("model.encoder.")]
    assert "model.decoder.layers.1.fc1.weight" in result.reads


def test_a_traced_model_is_not_kept_alive() -> None:
    skeleton = hf.build_skeleton(TINY["mixtral"].config(), torch.float32)
    trace(skeleton, find_stacks(skeleton), tokens=3)
    alive = weakref.ref(skeleton)
    del skeleton
    gc.collect()
    assert alive() is None
