"""The clients of a soak: what they do, how it went."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.served import Served
from benchmarks.soak_asks import KNOWN, Ask, Known, full_queue_faults, malformed
from benchmarks.streams import Answer, ask

PATIENCE_S = 300.0  # a request that takes longer is one without an answer
LINGER_S = 10.0  # so long a closed stream may still count as the server's: it notices within a step
PROGRESS_S = 10.0
WEIGHTS = {"forced": 22, "known": 18, "sampled": 18, "schema": 7, "closed": 15, "malformed": 12, "look": 8}
LOOKS = ("/health", "/metrics", "/v1/models", "/live/stats")


@dataclass
class Tally:
    """What became of the requests of one kind."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def row(self, kind: str) -> dict[str, Any]:
        counts = {name: self.counts[name] for name in ("requests", "whole", "closed", "refused", "queue_full", "wrong")}
        times = {"median_s": statistics.median(self.seconds), "longest_s": max(self.seconds)} if self.seconds else {}
        return {"asked_for": kind, **counts, **times}


class Crowd:
    """Clients that ask until the time is over and then finish what they began."""

    def __init__(self, server: Served, known: Known, clients: int, seed: int) -> None:
        self._server = server
        self._known = known
        self._clients = clients
        self._seed = seed
        self._malformed = malformed(server.model)
        self._tallies: dict[str, Tally] = {}
        self._ids: set[str] = set()
        self._begun = self._end = 0.0
        self._sequences = 0  # asked for, and maybe still the server's
        self.faults: list[str] = []
        self.unanswered: list[str] = []
        self.answered = self.open = self.most_open = 0
        self.deviation = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begun

    def rows(self) -> list[dict[str, Any]]:
        return [tally.row(kind) for kind, tally in sorted(self._tallies.items())]

    async def run(self, seconds: float, progress: Callable[[], None]) -> None:
        self._begun = time.monotonic()
        self._end = self._begun + seconds
        async with self._client() as client:
            lives = asyncio.gather(*(self._live(client, number) for number in range(self._clients)))
            while not (await asyncio.wait([lives], timeout=PROGRESS_S))[0]:
                progress()
            await lives

    async def ask_known_alone(self) -> None:
        """After the load each known prompt is answered as it was before."""
        async with self._client() as client:
            for prompt in KNOWN:
                await self._heard("known prompt alone", self._answered(client, self._known.greedy_for(prompt)))

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._clients)
        return httpx.AsyncClient(base_url=self._server.address, timeout=PATIENCE_S, limits=limits)

    async def _live(self, client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        does = {"closed": self._close, "malformed": self._be_wrong, "look": self._look}
        known = self._known
        makes = {"forced": known.forced, "known": known.greedy, "sampled": known.sampled, "schema": known.by_schema}
        while time.monotonic() < self._end:
            (choice,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
            asking = self._answered(client, makes[choice](rng)) if choice in makes else does[choice](client, rng)
            await asyncio.sleep(await self._heard(choice, asking) * rng.uniform(1.0, 2.0))

    async def _heard(self, what: str, asking: Awaitable[float]) -> float:
        """Wait for an answer, or note that there is none; the seconds to wait before the next request."""
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            retry_s = await asking
        except (httpx.HTTPError, TimeoutError) as error:
            self.unanswered.append(f"{what}: no answer, {type(error).__name__} {error}")
            return 1.0
        except (ValueError, LookupError, TypeError) as error:
            self.faults.append(f"{what}: the answer cannot be read, {type(error).__name__} {error}")
            return 1.0
        finally:
            self.open -= 1
        self.answered += 1
        return retry_s

    async def _answered(self, client: httpx.AsyncClient, asked: Ask, close_after: int | None = None) -> float:
        """Ask, and judge the answer; the seconds to wait where the queue was full."""
        kind = asked.kind if close_after is None else "closed half-way"
        self._sequences += asked.n
        most = self._sequences
        linger_s = 0.0
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer = await ask(client, asked.path, asked.body, close_after=close_after)
            if answer.status == 429:
                self._count(kind, answer, "queue_full", full_queue_faults(answer, max(most, self._sequences)))
                return float(answer.headers.get("Retry-After", 1))
            if answer.ended == "closed":
                linger_s = LINGER_S
                self._count(kind, answer, "closed", ())
                return 0.0
            self._count(kind, answer, "whole", asked.faults(answer))
            self._identify(answer)
            if asked.reference is not None:
                for choice in answer.choices.values():
                    self.deviation = max(self.deviation, asked.reference.deviation(choice))
            return 0.0
        finally:
            asyncio.get_running_loop().call_later(linger_s, self._forget, asked.n)

    def _forget(self, sequences: int) -> None:
        self._sequences -= sequences

    def _identify(self, answer: Answer) -> None:
        if self._ids & answer.ids:
            self.faults.append(f"two answers have the id {answer.ids}")
        self._ids |= answer.ids

    def _count(self, kind: str, answer: Answer, outcome: str, faults: Iterable[str]) -> None:
        tally = self._tallies.setdefault(kind, Tally())
        found = [f"{kind}: {fault}" for fault in faults]
        tally.counts.update(["requests", outcome, *(["wrong"] if found else [])])
        if outcome == "whole":
            tally.seconds.append(answer.seconds)
        self.faults += found

    async def _close(self, client: httpx.AsyncClient, rng: random.Random) -> float:
        """A stream that is left: before its first event, after a few, or for good while it waits."""
        asked = rng.choice((self._known.forced, self._known.sampled, self._known.greedy, self._known.by_schema))(rng)
        asked.body.update(stream=True, stream_options={"include_usage": True})
        return await self._answered(client, asked, close_after=rng.choice((0, 1, 2, 4)))

    async def _be_wrong(self, client: httpx.AsyncClient, rng: random.Random) -> float:
        wrong = rng.choice(self._malformed)
        async with asyncio.timeout(PATIENCE_S):
            answer = await ask(client, wrong.path, wrong.content)
        self._count("malformed", answer, "refused", wrong.faults(answer))
        return 0.0

    async def _look(self, client: httpx.AsyncClient, rng: random.Random) -> float:
        path = rng.choice(LOOKS)
        begun = time.monotonic()
        response = await client.get(path)
        answer = Answer(response.status_code, response.headers, seconds=time.monotonic() - begun)
        self._count("health, metrics, models, live", answer, "whole", _look_faults(path, response))
        return 0.0


def _look_faults(path: str, response: httpx.Response) -> list[str]:
    if response.status_code != 200:
        return [f"{path}: status {response.status_code}"]
    if path == "/metrics" and not list(text_string_to_metric_families(response.text)):
        return ["/metrics has no sample"]
    if path == "/v1/models" and len(response.json()["data"]) != 1:
        return [f"/v1/models: {response.text[:200]}"]
    if path == "/live/stats" and response.json()["failure"] is not None:
        return [f"/live/stats: {response.json()['failure']}"]
    return []
