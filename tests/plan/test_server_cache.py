"""The KV cache of a server in the plan: what requests can need, what the device has left, and never less than one."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from emulated_runs import emulated, mapped, settings_for
from overspill.config.settings import EngineSettings
from overspill.engine.packed import size_pools
from overspill.errors import CapacityError, ConfigError
from overspill.model.hf_packed import LayerShape
from overspill.plan import Plan, make_plan
from overspill.plan.report import plan_as_json, render_plan
from overspill.plan.server_cache import server_memory
from tiny_models import MakeTiny

CONTEXT = 40


def planned(folder: Any, memory_bytes: int = 64 << 20, **engine: Any) -> Plan:
    settings = settings_for(
        {"overspill": {"placement": {"fit": False}}}, **{"max_num_seqs": 4, "max_num_batched_tokens": 24, **engine}
    )
    return make_plan(mapped(folder, tokens=CONTEXT), settings, emulated(memory_bytes), context_tokens=CONTEXT)


def cache_bytes(plan: Plan) -> int:
    assert plan.memory.kv_cache_bytes is not None
    return plan.memory.kv_cache_bytes


def test_with_room_it_is_for_all_requests_at_their_longest(tiny: MakeTiny) -> None:
    plan, run = planned(tiny("llama")), planned(tiny("llama"), max_num_batched_tokens=None)
    assert run.kv_cache_tokens is None
    assert plan.kv_cache_tokens is not None
    assert cache_bytes(plan) >= 4 * cache_bytes(run)
    assert plan.kv_cache_tokens == 4 * CONTEXT
    assert f"KV cache, {4 * CONTEXT} tokens of up to 4 requests" in shown(plan)
    assert plan_as_json(plan)["memory"]["device"]["kv_cache_bytes"] == cache_bytes(plan)


def shown(plan: Plan) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(render_plan(plan))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_with_little_room_it_is_what_is_left_and_at_least_one_request(name: str, tiny: MakeTiny) -> None:
    """One byte less than a single request needs is refused; from there on the cache grows with the device."""
    roomy = planned(tiny(name))
    one = cache_bytes(planned(tiny(name), max_num_seqs=1))
    rest = roomy.memory.device_bytes - cache_bytes(roomy)
    least = roomy.memory.weights_bytes + one
    with pytest.raises(CapacityError, match="KV cache"):
        planned(tiny(name), least - 1)
    assert cache_bytes(planned(tiny(name), least)) == one
    assert cache_bytes(planned(tiny(name), rest + one + 5000)) == one + 5000
    assert cache_bytes(planned(tiny(name), rest + 100 * one)) == 4 * one


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_is_planned_for_one_request_holds_it_in_pages(name: str, tiny: MakeTiny) -> None:
    plan = planned(tiny(name), max_num_seqs=1)
    config = plan.model.config
    windows = [
        config.sliding_window if kind == "sliding_attention" else None
        for kind in getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    ]
    assert (name == "gemma3") == any(windows)
    dtype = plan.model.weights[0].dtype
    shapes = [LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim, dtype, w) for w in windows]
    sizes = size_pools(shapes, cache_bytes(plan), max_num_seqs=1, max_batch_tokens=24, context_tokens=CONTEXT)
    assert sizes.nbytes <= cache_bytes(plan)


def test_a_stated_size_is_taken_or_refused_with_the_least(tiny: MakeTiny) -> None:
    one = cache_bytes(planned(tiny("llama"), max_num_seqs=1))
    assert cache_bytes(planned(tiny("llama"), kv_cache_memory_bytes=one)) == one
    with pytest.raises(ConfigError, match=rf"kv_cache_memory_bytes is {one - 1}.* one request of {CONTEXT}") as refused:
        planned(tiny("llama"), kv_cache_memory_bytes=one - 1)
    assert f"at least {one}" in (refused.value.hint or "")


def test_only_a_server_has_a_stated_size() -> None:
    with pytest.raises(ConfigError, match="only a server"):
        settings_for(kv_cache_memory_bytes=1000)


def test_working_memory_is_that_of_a_pass(tiny: MakeTiny) -> None:
    plan = planned(tiny("llama"))
    trace = plan.model.trace
    assert plan.memory.working_bytes == trace.working_bytes * 24 // CONTEXT
    long = EngineSettings(max_num_batched_tokens=1000)
    assert server_memory(plan.memory, trace, long).working_bytes == trace.working_bytes
    assert server_memory(plan.memory, trace, EngineSettings()) is plan.memory


def test_what_cannot_be_traced_is_not_forecast(tiny: MakeTiny) -> None:
    model = mapped(tiny("llama"), tokens=CONTEXT)
    untraced = replace(model, trace=replace(model.trace, failure="it looks at values"))
    settings = settings_for(max_num_seqs=4, max_num_batched_tokens=24)
    plan = make_plan(untraced, settings, emulated(), context_tokens=CONTEXT)
    assert (plan.memory.kv_cache_bytes, plan.kv_cache_tokens) == (None, None)
