"""The batching engine at work: one thread that steps, and a door for those that ask."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from overspill.engine.choose import choose_batching
from overspill.engine.engine import Engine
from overspill.engine.requests import (
    DrainingError,
    EngineFailedError,
    FinishReason,
    QueueFullError,
    Request,
)
from overspill.engine.scheduler import Scheduler, StepReport
from overspill.engine.sequences import RunningSequence
from overspill.errors import ConfigError, DefectError, OverspillError
from overspill.machine.device import LinkTraffic
from overspill.offload.expert_runs import ExpertRuns
from overspill.offload.expert_slots import SlotCounts
from overspill.offload.in_place import BlockUse

logger = logging.getLogger("overspill")

FAILED_STEPS = 5
"""So many steps that threw, one after the other, and the engine is given up."""

StepListener = Callable[[float, int, list[Request]], None]


@dataclass(frozen=True)
class ExpertStats:
    """Routed experts that the CPU computes (`placed`, by layer) or that stream through slots (`counts`), one or both.

    Without a stream `counts` is None and there are no slots.
    """

    counts: SlotCounts | None
    slots: int
    slots_free: int
    placed: Mapping[int, BlockUse]

    @classmethod
    def of(cls, runs: ExpertRuns) -> ExpertStats | None:
        """A snapshot, to be taken between passes; None where nothing is placed or streamed."""
        if not runs.by_module():
            return None
        placed: dict[int, BlockUse] = {}
        for run in runs.in_place:
            layer = placed.setdefault(run.block.layer, BlockUse())
            layer.calls += run.use.calls
            layer.tokens += run.use.tokens
            layer.bytes += run.use.bytes
        if runs.stream is None:
            return cls(None, 0, 0, placed)
        cache = runs.stream.cache
        return cls(cache.counts.copy(), cache.count, cache.free, placed)


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Counts are since the start; `step_*` are of the latest pass, its seconds and its tokens.

    `stall_s` and `bytes` of `traffic` are what the link held up and carried. `finished` counts requests by finish
    reason. `step_link_floor_s` is the least that the plan says the link needs for a pass (None without a link).
    `experts` is None where the plan neither places nor streams any.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    step_seconds: float = 0.0
    step_tokens: int = 0
    step_link_floor_s: float | None = None
    traffic: LinkTraffic = field(default_factory=LinkTraffic)
    experts: ExpertStats | None = None


class EngineService:
    """Runs requests in batches on `engine`. All methods may be called from any thread.

    Making one takes the KV cache's memory and tries which way of batching the architecture allows (a few short
    passes). CapacityError where the cache does not hold one request of the planned context.
    """

    def __init__(self, engine: Engine, *, max_num_seqs: int, max_waiting: int, max_batch_tokens: int) -> None:
        self.engine = engine
        self._batching = choose_batching(
            engine.placed, max_num_seqs=max_num_seqs, max_batch_tokens=max(max_batch_tokens, max_num_seqs)
        )
        logger.info("batching is %s", self._batching.description)
        self._scheduler = Scheduler(self._batching)
        self._max_waiting = max_waiting
        self._eos = engine.eos_token_ids()
        self._wake = threading.Condition()
        self._arrived: list[RunningSequence] = []
        self._gone: list[RunningSequence] = []
        self._sequences: dict[Request, RunningSequence] = {}
        self._listeners: list[StepListener] = []
        self._draining = self._stopping = False
        self._failure: str | None = None
        self._failed_steps = 0
        self._proved = False
        self._stats = EngineStats(
            step_link_floor_s=engine.plan.step.link_floor_s, experts=ExpertStats.of(engine.placed.experts)
        )
        self._thread = threading.Thread(target=self._run, name="overspill-engine", daemon=True)

    @property
    def batching(self) -> str:
        """How this architecture's requests are batched, in a sentence."""
        return self._batching.description

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and answer together, that one request may have."""
        return self._batching.max_request_tokens

    @property
    def failure(self) -> str | None:
        """Why the engine cannot go on; None while it can."""
        return self._failure

    def start(self) -> None:
        self._thread.start()

    def submit(self, requests: Iterable[Request]) -> None:
        """Take all of `requests` or none.

        Raises ConfigError (a prompt that is too long, a token id that is not in the vocabulary), QueueFullError,
        DrainingError, EngineFailedError.
        """
        new = [RunningSequence(request, self.engine.decode, self._eos) for request in requests]
        for sequence in new:
            self._refuse(sequence.request)
        with self._wake:
            if self._failure is not None:
                raise EngineFailedError(f"the engine has failed: {self._failure}", hint="restart the server")
            if self._draining:
                raise DrainingError("the engine is finishing what it has", hint="ask another server, or again later")
            waiting = len(self._arrived) + len(self._scheduler.waiting)
            if waiting + len(new) > self._max_waiting:
                raise QueueFullError(
                    f"{waiting} requests wait, {len(new)} more would be above the {self._max_waiting} that may",
                    hint="ask again later, or serve with a larger --max-waiting",
                )
            now = time.monotonic()
            for sequence in new:
                sequence.request.times["arrived"] = now
                self._sequences[sequence.request] = sequence
            self._arrived += new
            self._wake.notify()

    def _refuse(self, request: Request) -> None:
        if not request.prompt_ids:
            raise ConfigError("the prompt is empty", hint="give at least one token")
        tokens = len(request.prompt_ids) + request.params.max_tokens
        if tokens > self.max_request_tokens:
            raise ConfigError(
                f"{len(request.prompt_ids)} prompt tokens and {request.params.max_tokens} to generate are {tokens}, "
                f"more than the {self.max_request_tokens} that memory is planned for",
                hint="a shorter prompt, or a smaller max_tokens",
            )
        self.engine.refuse_unknown([*request.prompt_ids, *request.params.logit_bias, *request.params.stop_token_ids])

    def cancel(self, requests: Iterable[Request]) -> None:
        """Free what they hold before the next step. Each emits a last output with ABORT, unless it had ended."""
        with self._wake:
            self._gone += [s for request in requests if (s := self._sequences.get(request)) is not None]
            self._wake.notify()

    def stats(self) -> EngineStats:
        return self._stats

    def add_step_listener(self, listener: StepListener) -> None:
        """`listener(seconds, tokens, ended requests)` is called in the engine's thread after each step."""
        self._listeners.append(listener)

    def drain(self, grace_s: float) -> bool:
        """Take nothing new, finish what is there within `grace_s`, then fail the rest and end the thread.

        Returns whether everything was finished.
        """
        deadline = time.monotonic() + grace_s
        with self._wake:
            self._draining = True
            self._wake.notify()
            while self._sequences and self._failure is None and (left := deadline - time.monotonic()) > 0:
                self._wake.wait(min(left, 0.1))
            finished = not self._sequences
            self._stopping = True
            self._wake.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        return finished

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._failure is None and self._take_in():
                self._step()
                self._forget_ended()
        except Exception as error:  # nobody else would hear of it, and those who wait would wait for ever
            logger.error("the engine failed: %s: %s", type(error).__name__, error, exc_info=error)
            self._failure = f"{type(error).__name__} in the engine"
        told: OverspillError
        if self._failure is not None:
            told = EngineFailedError(f"the engine has failed: {self._failure}", hint="restart the server")
        else:
            told = DrainingError("the server is stopping", hint="ask another server, or again later")
        with self._wake:
            self._scheduler.waiting.extend(self._arrived)
            self._arrived.clear()
        lines = [*self._scheduler.running, *self._scheduler.waiting]
        self._scheduler.end(lines, FinishReason.ERROR, told)
        self._forget_ended()

    def _take_in(self) -> bool:
        """Wait until there is something to do; False where that is to stop."""
        scheduler = self._scheduler
        with self._wake:
            while not (self._arrived or self._gone or self._stopping) and scheduler.idle:
                self._wake.wait()
            scheduler.waiting.extend(self._arrived)
            self._arrived.clear()
            gone, self._gone = self._gone, []
            stopping = self._stopping
        scheduler.end(gone, FinishReason.ABORT)
        return not stopping

    def _step(self) -> None:
        report: StepReport | None = None
        try:
            report = self._scheduler.step()
            if report is not None:
                self._failed_steps = 0
                self._prove_once()
        except Exception as error:  # a step that throws fails its own requests, which have been told
            logger.error("a step failed: %s: %s", type(error).__name__, error, exc_info=error)
            self._failed_steps += 1
            if isinstance(error, DefectError) or self._failed_steps >= FAILED_STEPS:
                self._failure = (
                    f"{type(error).__name__} in a step"
                    if isinstance(error, DefectError)
                    else f"{self._failed_steps} steps failed one after the other, the last with {type(error).__name__}"
                )
        self._stats = self._snapshot(report)
        if report is not None:
            for listener in self._listeners:
                listener(report.seconds, report.tokens, report.ended)

    def _prove_once(self) -> None:
        if not self._proved:
            self._proved = True
            self.engine.placed.experts.prove_used()

    def _snapshot(self, report: StepReport | None) -> EngineStats:
        scheduler, before = self._scheduler, self._stats
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_usage=self._batching.usage,
            steps=scheduler.steps,
            prompt_tokens=scheduler.prompt_tokens,
            generation_tokens=scheduler.generation_tokens,
            preemptions=self._batching.preemptions,
            finished=Counter(scheduler.finished),
            step_seconds=report.seconds if report is not None else before.step_seconds,
            step_tokens=report.tokens if report is not None else before.step_tokens,
            step_link_floor_s=before.step_link_floor_s,
            traffic=self.engine.placed.device.traffic.copy(),
            experts=ExpertStats.of(self.engine.placed.experts),
        )

    def _forget_ended(self) -> None:
        """Under the lock: what has ended is no longer anyone's to wait for."""
        scheduler = self._scheduler
        with self._wake:
            alive = {*scheduler.running, *scheduler.waiting, *self._arrived}
            for request in [request for request, sequence in self._sequences.items() if sequence not in alive]:
                del self._sequences[request]
            if not self._sequences:
                self._wake.notify_all()
