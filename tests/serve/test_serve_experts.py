"""Streamed and placed experts as a real server tells of them: in /metrics, on /live, in a browser; and off a disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, SIZES, chromium, looking, tells
from serving import Server, eventually, started

import overspill
from overspill.engine import SamplingParams
from tiny_models import TINY, MakeTiny

SLOTS = 8
STREAM: dict[str, Any] = {"slots": SLOTS}
CROWD, TOKENS, LONG = 4, 12, 4096
PROMPTS = ([5, 17, 99], [3, 64, 21, 120, 7, 40], [11], [77, 50, 6, 31, 9, 101, 88, 2, 14])

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")


def streaming(**more: Any) -> tuple[str, str]:
    return "--offload-config", json.dumps({"overspill": {"expert_stream": {**STREAM, **more}}})


@pytest.fixture(scope="module")
def streams(tiny: MakeTiny) -> Iterator[Server]:
    with started(tiny("qwen3_moe"), *streaming(), "--max-num-seqs", CROWD, "--max-model-len", 64) as running:
        yield running


@pytest.fixture(scope="module")
def places(tiny: MakeTiny) -> Iterator[Server]:
    with started(tiny("qwen3_moe"), "--cpu-moe", "--max-num-seqs", CROWD, "--max-model-len", 64) as running:
        yield running


@pytest.fixture(scope="module")
def mixes(tiny: MakeTiny) -> Iterator[Server]:
    """Layer 0 is dense, the CPU computes 1 and 2, and what it does not find in a slot of 3 to 5."""
    options = ("--n-cpu-moe", 3, *streaming(policy="cpu"))
    with started(tiny("deepseek_v2"), *options, "--max-num-seqs", CROWD, "--max-model-len", 64) as running:
        yield running


def answer(server: Server, prompt: list[int], tokens: int = TOKENS) -> list[str]:
    """The tokens of a greedy answer."""
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    with server.http() as http:
        got = http.post("/v1/completions", json=asked).raise_for_status().json()["choices"][0]["logprobs"]["tokens"]
    assert len(got) == tokens
    return list(got)


def live(server: Server) -> dict[str, Any]:
    with server.http() as http:
        return dict(http.get("/live/stats").json())


def settled(server: Server) -> dict[str, Any]:
    """The statistics when nothing runs and the last step is told."""
    assert eventually(lambda: live(server)["running"] == 0)
    return live(server)


def metrics_of(server: Server) -> dict[str, float]:
    """What /metrics tells of experts, in the names of /live/stats."""
    told = {
        "hits": ("overspill_expert_lookups_total", {"result": "hit"}),
        **{kind: ("overspill_expert_lookups_total", {"result": kind}) for kind in ("fetched", "streamed", "computed")},
        "lookups": ("overspill_expert_lookups_total", {}),
        "prefetch_used": ("overspill_expert_prefetches_total", {"result": "used"}),
        "prefetch_wasted": ("overspill_expert_prefetches_total", {"result": "wasted"}),
        "prefetched": ("overspill_expert_prefetches_issued_total", {}),
        "promoted": ("overspill_expert_promotions_total", {}),
        "loaded": ("overspill_expert_loads_total", {}),
        "evictions": ("overspill_expert_evictions_total", {}),
        "bytes": ("overspill_expert_bytes_total", {}),
        "stall_s": ("overspill_expert_stall_seconds_total", {}),
        "slots_held": ("overspill_expert_slots", {"state": "held"}),
        "slots_free": ("overspill_expert_slots", {"state": "free"}),
        "slots": ("overspill_expert_slots", {}),
    }
    return {name: server.metric(metric, **labels) for name, (metric, labels) in told.items()}


def adds_up(stream: dict[str, Any]) -> None:
    assert stream["lookups"] == stream["hits"] + stream["fetched"] + stream["streamed"] + stream["computed"]
    assert fills(stream) - stream["evictions"] == stream["slots_held"]
    assert stream["slots_held"] + stream["slots_free"] == stream["slots"] == SLOTS
    unused = stream["prefetched"] - stream["prefetch_used"] - stream["prefetch_wasted"]
    assert 0 <= unused <= stream["slots_held"]


def fills(stream: dict[str, Any]) -> int:
    return int(stream["fetched"] + stream["prefetched"] + stream["promoted"] + stream["loaded"])


def expert_bytes(server: Server) -> int:
    """Of one expert of the last layer."""
    with server.http() as http:
        weights = http.get("/v1/offload").json()["plan"]["weights"]
    return sum(w["bytes"] // w["shape"][0] for w in weights if w["role"] == "routed_expert" and w["layer"] == 5)


def together(server: Server) -> list[list[str]]:
    with ThreadPoolExecutor(CROWD) as pool:
        return list(pool.map(lambda prompt: answer(server, prompt), PROMPTS))


@pytest.mark.parametrize("name", ["streams", "mixes"])
def test_what_slots_did_adds_up_and_rises_with_requests(name: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(name)
    before = settled(server)["experts"]["stream"]
    alone = [answer(server, prompt) for prompt in PROMPTS]
    between = settled(server)["experts"]["stream"]
    crowd = together(server)
    assert crowd == alone
    after = settled(server)["experts"]["stream"]
    one = expert_bytes(server)
    for stream in (before, between, after):
        adds_up(stream)
        assert stream["bytes"] == (fills(stream) + stream["streamed"]) * one
    told = {key: value for key, value in after.items() if key not in ("policy", "tier", "slot_bytes")}
    assert metrics_of(server) == told
    layers, chosen = (3, 2) if name == "mixes" else (6, 2)
    steps = len(PROMPTS) * TOKENS
    assert between["lookups"] - before["lookups"] >= steps * layers * chosen
    assert before["hits"] < between["hits"] < after["hits"]
    assert before["bytes"] < between["bytes"] < after["bytes"]
    assert before["prefetched"] < between["prefetched"]
    assert after["prefetch_used"] > 0
    assert after["stall_s"] > 0
    kinds = ("computed", "promoted") if name == "mixes" else ("fetched", "streamed", "evictions")
    assert all(after[kind] > before[kind] for kind in kinds)
    assert name != "mixes" or after["fetched"] == after["streamed"] == 0


@pytest.mark.parametrize(("name", "layers"), [("places", range(6)), ("mixes", (1, 2))])
def test_each_layer_on_the_cpu_tells_its_passes(name: str, layers: Any, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(name)
    before = settled(server)
    alone = [answer(server, prompt) for prompt in PROMPTS]
    middle = settled(server)
    assert together(server) == alone
    after = settled(server)
    was, now, then = (stats["experts"]["placed"] for stats in (before, middle, after))
    assert [layer["layer"] for layer in now["layers"]] == list(layers)
    steps = middle["steps"] - before["steps"]
    assert steps == len(PROMPTS) * TOKENS
    tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * (TOKENS - 1)
    one = expert_bytes(server)
    for earlier, later in zip(was["layers"], now["layers"], strict=True):
        assert later["calls"] - earlier["calls"] == steps
        assert later["tokens"] - earlier["tokens"] == tokens
        assert 2 * steps * one <= later["bytes"] - earlier["bytes"] <= 2 * tokens * one
    for kind in ("calls", "tokens", "bytes"):
        assert now[kind] == sum(layer[kind] for layer in now["layers"]) < then[kind]
        assert server.metric(f"overspill_placed_expert_{kind}_total") == then[kind]
        for layer in then["layers"]:
            told = server.metric(f"overspill_placed_expert_{kind}_total", layer=str(layer["layer"]))
            assert told == layer[kind]


def test_memory_tells_slots_and_staging_beside_the_plan(streams: Server, mixes: Server) -> None:
    for server, staged in ((streams, False), (mixes, True)):
        with server.http() as http:
            offload = http.get("/v1/offload").json()
        blocks = {block["purpose"]: block["allocated_bytes"] for block in offload["ledger"]["blocks"]}
        device, host = live(server)["memory"]
        pool = next(purpose for purpose in device["purposes"] if purpose["purpose"] == "expert_slots")
        assert pool["held_bytes"] == pool["planned_bytes"] == blocks["expert_slots"] > 0
        assert server.metric("overspill_memory_bytes", purpose="expert_slots") == blocks["expert_slots"]
        held = {purpose["purpose"]: purpose["held_bytes"] for purpose in host["purposes"]}
        assert held == {"weights": blocks["host"], **({"staging": blocks["staging"]} if staged else {})}
        assert host["peak_bytes"] == sum(held.values())


def test_without_such_experts_nothing_is_said_of_them(server: Server, places: Server) -> None:
    assert live(server)["experts"] is None
    assert live(places)["experts"]["stream"] is None
    with server.http() as http, places.http() as placed:
        assert "expert" not in http.get("/metrics").text
        assert "overspill_expert_" not in placed.get("/metrics").text


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """None where there is no browser."""
    if CHROMIUM is None:
        yield None
        return
    with chromium() as launched:
        yield launched


@needs_chromium
@pytest.mark.parametrize("size", SIZES)
def test_the_page_tells_what_became_of_experts(browser: Any, mixes: Server, server: Server, size: str) -> None:
    answer(mixes, [5])
    experts = settled(mixes)["experts"]
    stream, placed = experts["stream"], experts["placed"]
    with looking(browser, mixes.address, size) as look:
        page = look.page
        assert page.is_visible("#experts")
        figures = page.inner_text("#experts-figures")
        assert f"of {stream['lookups']:,} since the start" in figures
        assert f"missed\n{stream['computed']:,}\n{stream['computed']:,} computed" in figures
        assert f"{stream['prefetch_used']:,} used, {stream['prefetch_wasted']:,} wasted" in figures
        assert f"{stream['slots_held']} of {SLOTS}" in figures
        assert f"{stream['evictions']:,} evicted, {stream['promoted']:,} promoted" in figures
        assert "layers 1–2" in figures
        assert f"{placed['calls']:,} calls over {placed['tokens']:,} tokens" in figures
        answer(mixes, [6])
        tells(page, "#experts-figures", r"found in a slot, last seconds\s*[1-9][0-9.]* %")
        held = page.eval_on_selector_all("#legend li", "items => items.map(i => [i.dataset.tier, i.dataset.kind])")
        assert held == [["device", "resident"], ["host", "in_place"], ["host", "stream"]]
        colours = page.eval_on_selector_all(
            "#legend .key", "keys => keys.map(k => getComputedStyle(k).backgroundColor)"
        )
        assert len(set(colours)) == 3
        assert "expert slots" in page.inner_text("#memory")
        assert "staging" in page.inner_text("#memory")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        boxes = [page.locator(part).bounding_box() for part in (".map", "#experts", ".chat")]
        assert size == "phone" or max(box["y"] + box["height"] for box in boxes) <= SIZES["desk"]["height"]
        assert look.wrong == []
    with looking(browser, server.address, size) as look:
        assert look.page.is_hidden("#experts")


def test_experts_on_disk_answer_as_in_memory_and_a_file_that_is_cut_is_told(tmp_path: Path, browser: Any) -> None:
    model = tmp_path / "moe"
    tiny = TINY["qwen3_moe"]
    replace(tiny, options={**tiny.options, "max_position_embeddings": LONG}).save(model)
    unharmed = overspill.load(model, device="cpu")
    expected = [
        [
            f"token_id:{token}"
            for token in unharmed.generate(prompt, SamplingParams(max_tokens=TOKENS), ignore_eos=True).token_ids
        ]
        for prompt in PROMPTS
    ]
    options = ("--device", "cpu", *streaming(tier="disk"), "--max-num-seqs", CROWD, "--max-model-len", LONG)
    with started(model, *options) as server:
        assert [answer(server, prompt) for prompt in PROMPTS] == expected
        assert together(server) == expected
        stats = settled(server)
        adds_up(stats["experts"]["stream"])
        [disk] = [tier for tier in stats["memory"] if tier["tier"] == "disk"]
        [weights] = disk["purposes"]
        assert weights["held_bytes"] == weights["planned_bytes"] == 6 * 6 * expert_bytes(server)
        assert disk["limit_bytes"] is None
        if browser is not None:
            with looking(browser, server.address) as look:
                assert look.page.locator('.block[data-tier="disk"]').count() == 6 * 2
                hatched = "getComputedStyle(document.querySelector('#legend .key[data-tier=disk]')).backgroundImage"
                assert "repeating-linear-gradient" in look.page.evaluate(hatched)
                assert "disk" in look.page.inner_text("#memory")
                assert look.wrong == []

        asked = {"prompt": [5], "max_tokens": LONG - 10, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        with server.http() as http, http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            os.truncate(model / "model.safetensors", 0)
            ending = list(lines)
        assert any(line.startswith('data: {"error"') for line in ending)
        assert ending[-2:] == ["data: [DONE]", ""]
        assert str(tmp_path) not in "".join(ending)
        assert "model.safetensors" in "".join(server.lines)
        with server.http() as http:
            assert http.get("/health").status_code == 200, "one step failed, which may be the request's own trouble"
            statuses = [http.post("/v1/completions", json=asked).status_code for _ in range(5)]
            assert statuses[0] == 500
            assert statuses[-1] == 503
            health = http.get("/health")
            assert health.status_code == 503
            assert "CheckpointError" in health.json()["error"]["message"]
            assert str(tmp_path) not in health.text
        stopped = live(server)
        assert (stopped["running"], stopped["waiting"]) == (0, 0)
        adds_up(stopped["experts"]["stream"])
        assert server.stop() == 0
