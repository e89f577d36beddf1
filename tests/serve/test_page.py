"""The live page in a real browser, on a real `overspill serve` and on a real model of 64 layers and 128 experts."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from browsing import CHROMIUM, COUNT_PIECES, SIZES, STOP_SOON, ask, chromium, listening, looking, tells
from fastapi import FastAPI
from serving import Server, eventually

from overspill.api import prepare, settings_of, start
from overspill.config.selectors import WeightName
from overspill.engine.engine import Engine
from overspill.engine.service import EngineService
from overspill.offload.ledger import Entry, Ledger
from overspill.plan import Access, Tier
from overspill.serve.app import create_app
from overspill.serve.live import map_rows
from talking_model import byte_tokenizer
from tiny_models import Tiny

PAGE = Path(__file__).parents[2] / "src" / "overspill" / "serve" / "page"

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")


# -- what is looked at -------------------------------------------------------------------------------------------------


@pytest.fixture
def address(server: Server) -> str:
    return server.address


@dataclass
class Many:
    """64 layers with 128 experts each, and a tokenizer without a chat template."""

    engine: Engine
    service: EngineService

    def app(self, name: str) -> FastAPI:
        return create_app(self.service, self.engine, model_names=[name])


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Many]:
    folder = tmp_path_factory.mktemp("many")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 4, "num_attention_heads": 1}
    experts = {"num_hidden_layers": 64, "num_experts": 128, "num_experts_per_tok": 1, "vocab_size": 259}
    Tiny("Qwen3MoeConfig", {**sizes, **experts}, fused=True).save(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    options = {"device": "emulated", "max_model_len": 64, "max_num_seqs": 2}
    engine = start(prepare(folder, settings_of({"uva": {"cpu_offload_gb": 2 / 1024}}, options)))
    service = EngineService(engine, max_num_seqs=2, max_waiting=8, max_batch_tokens=8)
    service.start()
    yield Many(engine, service)
    service.drain(5)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


def bytes_by_access(ledger: dict[str, Any]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for entry in ledger["entries"]:
        found[entry["tier"], entry["access"]] += entry["bytes"]
    return found


# -- the page ----------------------------------------------------------------------------------------------------------


@needs_chromium
@pytest.mark.parametrize("size", SIZES)
def test_the_page_tells_what_the_server_does(browser: Any, address: str, size: str) -> None:
    with looking(browser, address, size) as look:
        page = look.page
        assert page.title() == "talking · overspill"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        held = page.eval_on_selector_all("#legend li", "items => items.map(i => ({...i.dataset}))")
        offload = httpx.get(f"{address}/v1/offload").json()
        told = {(item["tier"], item["kind"]): int(item["bytes"]) for item in held}
        assert told == bytes_by_access(offload["ledger"])
        assert len(told) == 2
        assert page.locator(".block").count() == len(offload["plan"]["weights"])
        assert page.locator(".row").count() == 6 + 3  # layers; embedding, norm, head
        assert "of 4.00 GB/s stated" in page.inner_text("#link-limit")
        tells(page, "#link-now", "B/s")
        assert page.get_attribute("#line .stroke", "d")
        memory = page.inner_text("#memory")
        assert [memory.count(tier) for tier in ("device", "host")] == [1, 1]
        assert page.is_visible("#emulated")
        page.click("text=equal rows")
        widths = page.eval_on_selector_all(".bar", "bars => bars.map(bar => Math.round(bar.offsetWidth))")
        assert len(set(widths)) == 1
        assert look.wrong == []


@needs_chromium
def test_a_weight_is_reached_and_told_by_keyboard_and_by_touch(browser: Any, address: str) -> None:
    with looking(browser, address) as look:
        page = look.page
        focused = "document.activeElement.getAttribute('aria-label') ?? ''"
        for _ in range(5):
            page.keyboard.press("Tab")
            if "embed_tokens" in page.evaluate(focused):
                break
        assert page.evaluate(focused).startswith("model.embed_tokens.weight, embedding, 259 × 35 float32")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        weights = httpx.get(f"{address}/v1/offload").json()["plan"]["weights"]
        second = [weight for weight in weights if weight["layer"] == 0][1]
        for told in (page.evaluate(focused), page.inner_text("#detail")):
            assert second["name"] in told
            assert second["reason"] in told
            assert f"{second['tier']}, {second['access'].replace('_', '-')}" in told
        page.keyboard.press("Control+End")
        assert "lm_head.weight" in page.inner_text("#detail")
        page.keyboard.press("Tab")
        assert not page.evaluate(focused).startswith("model.")  # one weight is in the order of tabbing, not all
    with looking(browser, address, "phone") as look:
        look.page.locator(".block").nth(3).tap()
        assert weights[3]["name"] in look.page.inner_text("#detail")
        assert look.page.locator("#detail").bounding_box()["y"] < SIZES["phone"]["height"]


@needs_chromium
def test_an_answer_streams_in_is_stopped_and_is_refused_in_words(browser: Any, address: str) -> None:
    messages = [{"role": "user", "content": "Grüße"}]
    body = {"model": "talking", "messages": messages, "max_tokens": 24, "temperature": 0}
    expected = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()
    with looking(browser, address) as look:
        page = look.page
        page.evaluate(COUNT_PIECES)
        ask(page, "Grüße", 24)
        tells(page, "#chat-state", "tokens? in ")
        text = page.evaluate("document.querySelector('.answer').textContent")
        assert text == expected["choices"][0]["message"]["content"] != ""
        assert page.evaluate("window.pieces") > 5
        assert f"{expected['usage']['completion_tokens']} tokens in" in page.inner_text("#chat-state")
        tells(page, "#tokens", r"^(?!0\.0)\d")

        page.click("#clear")
        page.evaluate(STOP_SOON)
        ask(page, "Grüße", 50)
        tells(page, "#chat-state", "Stopped")
        assert 3 < page.evaluate("document.querySelector('.answer').textContent.length") < 40
        tells(page, "#requests", "^0 running")
        tells(page, "#finished", r"\d gone")
        assert look.wrong == []

        ask(page, "Grüße", 100_000)
        page.wait_for_selector(".wrong")
        assert re.search(r"100[,_]?0\d\d", page.inner_text(".wrong"))
        assert page.inner_text("#send") == "Send"


@needs_chromium
def test_64_layers_of_128_experts_and_a_server_that_goes_and_comes(browser: Any, many: Many) -> None:
    with contextlib.ExitStack() as stack:
        with listening(many.app("many")) as port:
            look = stack.enter_context(looking(browser, f"http://127.0.0.1:{port}"))
            page = look.page
            assert page.locator(".row").count() == 64 + 3
            stacks = page.locator('.block[data-role="routed_expert"]')
            assert stacks.count() == 64 * 2
            assert "128 experts stacked" in stacks.nth(70).get_attribute("aria-label")
            assert page.locator(".row").last.bounding_box()["y"] < SIZES["desk"]["height"]  # all at a glance
            assert page.inner_text("#chat-state").startswith("This model has no chat template")
            ask(page, "Once", 4)
            tells(page, "#chat-state", "4 tokens in")
            assert look.wrong == []
        page.wait_for_selector("#state.lost")
        assert page.inner_text("#alarm").startswith("The server does not answer")
        ask(page, "Twice", 4)
        page.wait_for_selector(".wrong")
        assert page.inner_text(".wrong") == "The server does not answer."
        with listening(many.app("many-again"), port):
            page.wait_for_selector("#state.live")
            assert page.is_hidden("#alarm")
            tells(page, "#model", "many-again")
            look.wrong.clear()
            ask(page, "Thrice", 4)
            tells(page, "#chat-state", "4 tokens in")
            assert look.wrong == []


@needs_chromium
def test_a_page_that_nobody_sees_asks_nothing(browser: Any, address: str) -> None:
    turn = """(hidden) => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    with looking(browser, address) as look:
        look.page.evaluate(turn, True)
        look.page.wait_for_load_state("networkidle")
        asked: list[str] = []
        look.page.on("request", lambda request: asked.append(request.url))
        look.page.wait_for_timeout(1500)
        assert asked == []
        with look.page.expect_request("**/live/stats"):
            look.page.evaluate(turn, False)


# -- what it is made of ------------------------------------------------------------------------------------------------


def test_experts_that_are_weights_of_their_own_are_one_block_for_each_way_they_are_held(many: Many) -> None:
    plan = many.engine.plan
    placements = []
    for placement in plan.placements:
        weight = placement.weight
        if weight.routing is None:
            placements.append(placement)
            continue
        for expert in range(weight.routing.experts):
            full, relative = (
                name.replace("experts.", f"experts.{expert}.") for name in (weight.full, weight.name.relative or "")
            )
            name = WeightName(full, relative, weight.name.stack, weight.name.layer)
            single = replace(weight, name=name, shape=weight.shape[1:], routing=None)
            held = replace(placement, weight=single, tier=Tier.HOST, access=Access.ZERO_COPY)
            placements.append(held if expert >= 40 else replace(held, tier=Tier.DEVICE, access=Access.RESIDENT))
    entries = tuple(Entry(p.weight.full, p.tier, p.access, p.weight.nbytes, 0) for p in placements)
    rows = map_rows(replace(plan, placements=tuple(placements)), Ledger(entries, (), 0, 0.0))
    assert sum(row.bytes for row in rows) == plan.model.nbytes
    experts = [block for row in rows if row.layer == 7 for block in row.blocks if block.role == "routed_expert"]
    assert [(block.count, block.experts, block.tier, block.access) for block in experts] == [
        (40, 40, "device", "resident"),
        (88, 88, "host", "zero_copy"),
    ] * 2
    assert experts[0].name == "model.layers.7.mlp.experts.*.gate_up_proj"
    assert sum(len(row.blocks) for row in rows) < 2000


def test_the_page_is_the_servers_own_and_needs_nothing_from_elsewhere(many: Many) -> None:
    with listening(many.app("many")) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        page = client.get("/")
        assert page.headers["content-security-policy"].startswith("default-src 'self'; ")
        assert "unsafe" not in page.headers["content-security-policy"]
        assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?! type=\"module\" src=\"/page/)", page.text)
        for path in re.findall(r'(?:href|src)="(/[^"]*)"', page.text):
            answer = client.get(path)
            assert answer.status_code == 200
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert not re.search(r"https?:|@import|url\(|eval\(|innerHTML", answer.text)
        assert client.get("/page/../live.py").status_code == client.get("/page/").status_code == 404
        schemas = client.get("/openapi.json").json()["paths"]
        for path in ("/live/map", "/live/stats"):
            assert "$ref" in schemas[path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]


def test_two_snapshots_tell_the_rate_to_any_number_of_pages(many: Many) -> None:
    with listening(many.app("many")) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        before = client.get("/live/stats").json()
        client.post("/v1/completions", json={"model": "many", "prompt": "abc", "max_tokens": 5, "ignore_eos": True})
        assert eventually(
            lambda: client.get("/live/stats").json()["generation_tokens"] == before["generation_tokens"] + 5
        )
        first, second = (client.get("/live/stats").json() for _ in range(2))
    assert first["prompt_tokens"] - before["prompt_tokens"] == 3
    moved = first["link"]["bytes"] - before["link"]["bytes"]
    assert 0 < moved == second["link"]["bytes"] - before["link"]["bytes"]
    assert before["clock_s"] < first["clock_s"] < second["clock_s"]
    host = next(tier for tier in first["memory"] if tier["tier"] == "host")
    assert host["purposes"][0]["held_bytes"] == many.engine.ledger.allocated_on(Tier.HOST)


def test_every_access_and_tier_that_there_is_has_a_colour() -> None:
    style = (PAGE / "page.css").read_text()
    for access in Access:
        assert f'[data-access="{access}"]' in style
