from __future__ import annotations

from typing import Any

from openai import OpenAI
from serving import Server, eventually

ASKED: dict[str, Any] = {"model": "talking", "prompt": "four", "max_tokens": 5, "extra_body": {"ignore_eos": True}}
HISTOGRAMS = {  # how many observations an answer of five tokens adds
    "vllm:time_to_first_token_seconds": 1,
    "vllm:inter_token_latency_seconds": 4,
    "vllm:e2e_request_latency_seconds": 1,
    "vllm:request_queue_time_seconds": 1,
}


def test_an_answer_is_counted(server: Server, client: OpenAI) -> None:
    def counters() -> dict[str, float]:
        return {
            **{name: server.metric(f"{name}_count", model_name="talking") for name in HISTOGRAMS},
            "length": server.metric("vllm:request_success_total", finished_reason="length"),
            "prompt": server.metric("vllm:prompt_tokens_total"),
            "generation": server.metric("vllm:generation_tokens_total"),
        }

    added = {**HISTOGRAMS, "length": 1, "prompt": 4, "generation": 5}
    before = counters()
    client.completions.create(**ASKED)
    assert eventually(lambda: counters() == {name: before[name] + more for name, more in added.items()})


def test_steps_and_the_link_are_counted_beside_the_plan(server: Server, client: OpenAI) -> None:
    def read(*names: str) -> list[float]:
        return [server.metric(name) for name in names]

    with server.http() as http:
        told = http.get("/v1/offload").json()
    link, steps, tokens = "overspill_link_bytes_total", "overspill_steps_total", "vllm:iteration_tokens_total_sum"
    before = read(link, steps, tokens, "overspill_step_seconds_count")
    client.completions.create(**ASKED)
    assert eventually(lambda: read(steps)[0] == before[1] + 5)
    assert eventually(lambda: read("overspill_step_seconds_count")[0] == before[3] + 5)
    assert read(link)[0] > before[0]
    assert read(tokens)[0] == before[2] + 4 + 4
    assert server.metric("overspill_step_link_floor_seconds") == told["plan"]["step"]["link_floor_s"] > 0
    assert server.metric("overspill_link_stall_seconds_total") > 0


def test_bytes_are_those_of_the_ledger(server: Server) -> None:
    with server.http() as http:
        told = http.get("/v1/offload").json()
    for tier, access in (("host", "zero_copy"), ("device", "resident")):
        entries = [e["bytes"] for e in told["ledger"]["entries"] if (e["tier"], e["access"]) == (tier, access)]
        assert server.metric("overspill_tier_bytes", tier=tier, access=access) == sum(entries) > 0
    [weights] = [b["allocated_bytes"] for b in told["ledger"]["blocks"] if b["purpose"] == "weights"]
    assert server.metric("overspill_memory_bytes", purpose="weights") == weights
    assert server.metric("overspill_memory_bytes", purpose="kv_cache") > 0
    assert server.metric("process_resident_memory_bytes") > 0
