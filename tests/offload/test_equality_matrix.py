"""Offload never changes an answer: tiny models of many architectures, every way of offloading, the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from emulated_runs import DECODED, DISABLE_UVA, PROMPT, emulated, forward, gib, passes, placed, prefetch
from overspill.errors import ConfigError
from overspill.machine.arena import packed_bytes
from overspill.model.hf import cache_argument, cache_of
from overspill.plan import Access, Tier
from tiny_models import ARCHITECTURES, TINY, MakeTiny

SPARSE = ("qwen3_moe", "deepseek_v2", "gpt_oss", "qwen3_next", "kimi_linear", "nemotron_h", "mixtral", "mixtral_fused")


@dataclass(frozen=True)
class Way:
    """A way of offloading: its document, given the model's bytes and a selector that fits the architecture."""

    document: Callable[[int, str], dict[str, Any]]
    environ: dict[str, str] = field(default_factory=dict)


WAYS = {
    "uva, traffic": Way(lambda nbytes, _: {"uva": {"cpu_offload_gb": gib(nbytes / 2)}}),
    "uva, declaration": Way(
        lambda nbytes, _: {
            "uva": {"cpu_offload_gb": gib(nbytes / 2)},
            "overspill": {"order": "declaration"},
        }
    ),
    "uva, selected": Way(lambda _, selector: {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": [selector]}}),
    "uva, everything": Way(lambda *_: {"uva": {"cpu_offload_gb": 1}}),
    "uva without zero-copy": Way(lambda nbytes, _: {"uva": {"cpu_offload_gb": gib(nbytes / 2)}}, environ=DISABLE_UVA),
    "prefetch 2, 1, 1": Way(lambda *_: prefetch(2, 1, 1)),
    "prefetch 3, 2, 2": Way(lambda *_: prefetch(3, 2, 2)),
    "prefetch 1, 1, 2": Way(lambda *_: prefetch(1, 1, 2)),
    "prefetch, selected": Way(lambda _, selector: prefetch(1, 1, 1, [selector])),
}


@dataclass(frozen=True)
class Reference:
    """An architecture's logits with nothing offloaded, pass by pass."""

    name: str
    logits: list[torch.Tensor]
    model_bytes: int

    @property
    def selector(self) -> str:
        return "experts" if self.name in SPARSE else "mlp"


@pytest.fixture(scope="module", params=ARCHITECTURES)
def reference(request: pytest.FixtureRequest, tiny: MakeTiny) -> Reference:
    resident = placed(tiny(request.param))
    logits, moved = passes(resident)
    assert moved == [0] * len(logits)
    assert all(result.isfinite().all() and result.std() > 0.1 for result in logits)
    return Reference(request.param, logits, resident.plan.model.nbytes)


@pytest.mark.parametrize("way", WAYS)
def test_offloaded_logits_are_the_same_bits(reference: Reference, way: str, tiny: MakeTiny) -> None:
    document = WAYS[way].document(reference.model_bytes, reference.selector)
    model = placed(tiny(reference.name), document, WAYS[way].environ)
    plan, ledger = model.plan, model.ledger
    on_host = plan.on(Tier.HOST)
    assert on_host
    assert ledger.bytes_on(Tier.HOST) == plan.offloaded_bytes > 0
    host_block = next(block for block in ledger.blocks if block.purpose == "host")
    assert host_block.requested_bytes == packed_bytes(p.weight.nbytes for p in on_host)
    assert host_block.allocated_bytes == plan.memory.host_bytes
    assert not [n for n, t in model.model.state_dict(keep_vars=True).items() if t.device.type == "meta"]

    addresses = [a for entry in ledger.entries for a in (entry.address, entry.host_address) if a is not None]
    assert not [a for a in addresses if a % 64], "on some CPUs the bits of a product depend on its weight's address"

    logits, moved = passes(model)
    assert_same(logits, reference.logits)
    assert all(count > 0 for count in moved)
    if plan.ring is not None:
        assert moved == [plan.ring.pass_bytes] * len(moved)
        assert model.prefetcher is not None
        assert model.prefetcher.out_of_turn == 0
    else:
        assert {p.access for p in on_host} == {Access.ZERO_COPY}
        # Chosen experts, looked-up rows and whole weights: what one token reads is known to the byte.
        assert moved[1:] == [round(plan.step.link_bytes)] * len(DECODED)
        assert plan.step.link_bytes == pytest.approx(moved[1], abs=1e-3)

    again, _ = passes(model, DECODED[:1])
    assert_same(again, reference.logits[: len(again)])


def test_nothing_offloaded_is_transformers_itself(reference: Reference, tiny: MakeTiny) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        tiny(reference.name), dtype=TINY[reference.name].dtype, experts_implementation="eager"
    ).eval()
    # A mapped safetensors file has its tensors at any address, and the bits of a float32 product depend on it.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    with torch.no_grad():
        output = model(torch.tensor([PROMPT]), use_cache=True)
        logits = [output.logits]
        for token in DECODED:
            cache = {cache_argument(model): cache_of(output)}
            output = model(torch.tensor([[token]]), use_cache=True, **cache)
            logits.append(output.logits)
    assert_same(logits, reference.logits)


def test_a_layer_pattern_that_leaves_too_few_layers_is_refused_with_figures(tiny: MakeTiny) -> None:
    """Of nemotron_h's eight layers two have experts: three buffers would save nothing."""
    with pytest.raises(ConfigError, match=r"offload_prefetch_step \(3\).* 2 offloaded layers") as refused:
        placed(tiny("nemotron_h"), prefetch(1, 1, 3, ["experts"]))
    assert "at most 1" in (refused.value.hint or "")


def test_shards_and_one_file_are_the_same_model(tiny: MakeTiny) -> None:
    assert len(list(tiny("llama_sharded").glob("*.safetensors"))) > 4
    whole, _, _ = forward(placed(tiny("llama")), PROMPT)
    sharded, _, _ = forward(placed(tiny("llama_sharded"), prefetch(2, 1, 1)), PROMPT)
    assert torch.equal(whole, sharded)


def test_one_device_takes_one_model_after_the_other(tiny: MakeTiny) -> None:
    device = emulated(memory_bytes=1 << 20)
    first, _, _ = forward(placed(tiny("llama"), prefetch(2, 1, 1), device=device), PROMPT)
    second, _, _ = forward(placed(tiny("llama"), prefetch(2, 1, 1), device=device), PROMPT)
    assert torch.equal(first, second)


def assert_same(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(results) == len(expected)
    for number, (one, other) in enumerate(zip(results, expected, strict=True)):
        difference = (one.float() - other.float()).abs().max().item()
        assert torch.equal(one, other), f"pass {number} differs by {difference}"
