"""A real headless Chromium, what it is made to do, and an application for it to look at."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI
from serving import PATIENCE_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
SIZES = {"desk": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}
COUNT_PIECES = """() => {
    window.pieces = 0;
    const observer = new MutationObserver((seen) => (window.pieces += seen.length));
    observer.observe(document.getElementById("log"), { childList: true, subtree: true });
}"""
STOP_SOON = """() => {
    const observer = new MutationObserver(() => {
        if (!(document.querySelector(".answer")?.textContent.length > 3)) return;
        observer.disconnect();
        document.getElementById("send").click();
    });
    observer.observe(document.getElementById("log"), { childList: true, subtree: true });
}"""


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser with a profile of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield launched
        launched.close()


@dataclass
class Look:
    """An open page, and what went wrong on it."""

    page: Any
    wrong: list[str]


@contextlib.contextmanager
def looking(browser: Any, address: str, size: str = "desk") -> Iterator[Look]:
    context = browser.new_context(viewport=SIZES[size], has_touch=size == "phone")
    look = Look(context.new_page(), [])
    look.page.on("console", lambda message: message.type in ("error", "warning") and look.wrong.append(message.text))
    look.page.on("pageerror", lambda error: look.wrong.append(str(error)))
    look.page.set_default_timeout(PATIENCE_S * 1000)
    look.page.goto(f"{address}/")
    look.page.wait_for_selector("#state.live")
    yield look
    context.close()


def tells(page: Any, selector: str, pattern: str) -> None:
    """Wait until an element's text holds `pattern`; the page lets no text be evaluated, so without a predicate."""
    from playwright.sync_api import expect

    expect(page.locator(selector)).to_contain_text(re.compile(pattern), timeout=PATIENCE_S * 1000)


def ask(page: Any, text: str, max_tokens: int) -> None:
    page.fill("#temperature", "0")
    page.fill("#max-tokens", str(max_tokens))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


@contextlib.contextmanager
def listening(app: FastAPI, port: int = 0) -> Iterator[int]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
