"""The engine's thread and its door: joins, cancels, a full queue, a step that throws, an end in good order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from crowds import CONTEXT, SEQUENCES, engine_of

from overspill.engine import Engine, SamplingParams
from overspill.engine.grammar import GrammarError
from overspill.engine.requests import (
    DrainingError,
    EngineFailedError,
    FinishReason,
    Output,
    QueueFullError,
    Request,
    RequestParams,
)
from overspill.engine.service import FAILED_STEPS, EngineService
from overspill.errors import ConfigError, LinkDefect, PlacementDefect
from overspill.offload.in_place import InPlaceExperts
from tiny_models import VOCABULARY, MakeTiny

PATIENCE_S = 60.0
LONG = CONTEXT - 4


class Asked:
    """A request whose outputs can be waited for. With `held`, the engine waits in the first output until released."""

    def __init__(self, prompt: list[int], max_tokens: int, *, held: bool = False, **how: Any) -> None:
        self.outputs: list[Output] = []
        self.begun, self.ended, self.go = threading.Event(), threading.Event(), threading.Event()
        if not held:
            self.go.set()
        self.request = Request(prompt, RequestParams(max_tokens=max_tokens, **how), self._emit)

    def _emit(self, output: Output) -> None:
        self.outputs.append(output)
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        if output.finish_reason is not None:
            self.ended.set()

    def reason(self) -> FinishReason | None:
        assert self.ended.wait(PATIENCE_S)
        return self.outputs[-1].finish_reason

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]


@pytest.fixture(scope="module")
def engine(tiny: MakeTiny) -> Engine:
    return engine_of(tiny("llama"), {"prefetch": {"offload_group_size": 2}})


@pytest.fixture
def service(engine: Engine) -> Iterator[EngineService]:
    made = EngineService(engine, max_num_seqs=SEQUENCES, max_waiting=6, max_batch_tokens=24)
    made.start()
    yield made
    made.drain(0)


def submit(service: EngineService, *asked: Asked) -> None:
    service.submit([one.request for one in asked])


def test_requests_that_join_on_the_way_are_answered_as_alone(service: EngineService, engine: Engine) -> None:
    first = Asked([5, 17, 99], 20)
    submit(service, first)
    assert first.begun.wait(PATIENCE_S)
    others = [Asked([number, 3, 64], 6) for number in range(6)]
    submit(service, *others)
    for asked in (first, *others):
        assert asked.reason() is FinishReason.LENGTH
        params = SamplingParams(max_tokens=asked.request.params.max_tokens)
        assert asked.tokens == engine.generate(asked.request.prompt_ids, params, ignore_eos=True).token_ids
        times = asked.request.times
        assert times["arrived"] <= times["started"] <= times["first"] <= times["finished"]


def test_what_was_counted_is_what_was_asked(service: EngineService) -> None:
    told: list[tuple[int, list[Request]]] = []
    service.add_step_listener(lambda seconds, tokens, ended: told.append((tokens, ended)))
    asked = [Asked([1, 2, 3, 4], 5), Asked([7] * 30, 2)]
    submit(service, *asked)
    assert service.drain(PATIENCE_S)
    stats = service.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (34, 7)
    assert stats.finished == {FinishReason.LENGTH: 2}
    assert sum(tokens for tokens, _ in told) == 34 + 7 - 2  # the last token of an answer is not computed
    assert stats.steps == len(told)
    assert [request for _, ended in told for request in ended] == [asked[1].request, asked[0].request]
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert stats.traffic.bytes >= stats.steps * service.engine.plan.step.link_bytes


def test_a_cancelled_request_frees_what_it_holds_within_a_step(service: EngineService) -> None:
    held, other = Asked([5], LONG, held=True), Asked([6], 3)
    submit(service, held)
    assert held.begun.wait(PATIENCE_S)
    service.cancel([held.request])
    service.cancel([held.request])
    held.go.set()
    assert held.reason() is FinishReason.ABORT
    assert len(held.tokens) == 1, "the step after the cancel computed nothing of it"
    submit(service, other)
    assert other.reason() is FinishReason.LENGTH
    service.cancel([other.request])  # it had ended
    assert service.drain(PATIENCE_S)
    assert other.outputs[-1].finish_reason is FinishReason.LENGTH
    assert service.stats().kv_usage == 0.0


def test_a_full_queue_is_told_and_takes_all_or_none(service: EngineService) -> None:
    held = Asked([5], 3, held=True)
    submit(service, held)
    assert held.begun.wait(PATIENCE_S)
    waiting = [Asked([1], 2) for _ in range(6)]
    submit(service, *waiting[:5])
    with pytest.raises(QueueFullError, match=r"5 requests wait, 2 more .* 6") as full:
        submit(service, Asked([1], 2), Asked([1], 2))
    assert "--max-waiting" in (full.value.hint or "")
    submit(service, waiting[5])
    held.go.set()
    assert all(asked.reason() is FinishReason.LENGTH for asked in (held, *waiting))


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (lambda: Asked([], 2), "the prompt is empty"),
        (lambda: Asked([1] * CONTEXT, 1), f"{CONTEXT} prompt tokens and 1 to generate are {CONTEXT + 1}"),
        (lambda: Asked([VOCABULARY], 1), f"token id {VOCABULARY}"),
        (lambda: Asked([1], 1, logit_bias={VOCABULARY + 1: 1.0}), f"token id {VOCABULARY + 1}"),
        (lambda: Asked([1], 1, stop_token_ids=(-1,)), "token id -1"),
    ],
)
def test_what_cannot_be_answered_is_refused(service: EngineService, asked: Callable[[], Asked], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        submit(service, Asked([1], 1), asked())
    assert service.stats().waiting == 0


def failing(engine: Engine, error: Exception, times: int) -> Any:
    """A hook by which the next `times` passes throw."""
    left = [times]

    def throw(module: Any, args: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise error

    return engine.placed.model.register_forward_pre_hook(throw)


def test_a_step_that_throws_fails_only_its_requests(service: EngineService, engine: Engine) -> None:
    held = Asked([5], 8, held=True)
    submit(service, held)
    assert held.begun.wait(PATIENCE_S)
    hook = failing(engine, RuntimeError("/a/path/of/this/machine"), 1)
    late = [Asked([7] * 3, 2) for _ in range(SEQUENCES)]
    submit(service, *late)
    held.go.set()
    reasons = [asked.reason() for asked in (held, *late)]
    hook.remove()
    assert reasons[0] is FinishReason.ERROR
    assert reasons[-1] is FinishReason.LENGTH, "it waited while the step threw"
    error = held.outputs[-1].error
    assert "RuntimeError" in str(error)
    assert "/a/path" not in str(error)
    assert service.failure is None
    again = Asked([5], 3)
    submit(service, again)
    assert again.reason() is FinishReason.LENGTH
    assert again.tokens == engine.generate([5], SamplingParams(max_tokens=3), ignore_eos=True).token_ids


class Lost:
    """A grammar that no answer can follow for long."""

    def start(self) -> Lost:
        return self

    def allowed(self, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def take(self, token: int) -> bool:
        raise GrammarError("it ends nowhere")


def test_one_requests_own_trouble_is_no_neighbours(service: EngineService) -> None:
    good = Asked([5, 6], 12)
    bad = [Asked([7], 4, grammar=Lost()) for _ in range(FAILED_STEPS + 1)]
    submit(service, good, *bad[:4])
    assert all(one.reason() is FinishReason.ERROR for one in bad[:4])
    for one in bad[4:]:
        submit(service, one)
        assert one.reason() is FinishReason.ERROR
        assert "ends nowhere" in str(one.outputs[-1].error)
    assert good.reason() is FinishReason.LENGTH
    assert service.failure is None


@pytest.mark.parametrize(
    ("error", "times", "why"),
    [(RuntimeError("broken"), FAILED_STEPS, "5 steps failed"), (LinkDefect("ours"), 1, "LinkDefect")],
    ids=["again and again", "a defect"],
)
def test_an_engine_that_cannot_go_on_says_why_and_leaves_nobody_waiting(
    engine: Engine, error: Exception, times: int, why: str
) -> None:
    service = EngineService(engine, max_num_seqs=1, max_waiting=20, max_batch_tokens=24)
    hook = failing(engine, error, times)
    asked = [Asked([5], 4) for _ in range(FAILED_STEPS + 2)]
    submit(service, *asked)
    service.start()
    assert all(one.reason() is FinishReason.ERROR for one in asked)
    hook.remove()
    service.drain(PATIENCE_S)
    assert why in (service.failure or "")
    with pytest.raises(EngineFailedError, match=why):
        submit(service, Asked([5], 4))


def test_what_arrives_while_the_engine_fails_is_told_too(engine: Engine) -> None:
    service = EngineService(engine, max_num_seqs=1, max_waiting=20, max_batch_tokens=24)
    first, late = Asked([5], 4), Asked([6], 4)

    def throw(module: Any, args: Any) -> None:
        submit(service, late)
        raise LinkDefect("ours")

    hook = engine.placed.model.register_forward_pre_hook(throw)
    submit(service, first)
    service.start()
    assert first.reason() is FinishReason.ERROR
    assert late.reason() is FinishReason.ERROR
    hook.remove()


def test_draining_finishes_what_runs_and_takes_nothing_new(service: EngineService) -> None:
    held = Asked([5], 10, held=True)
    submit(service, held)
    assert held.begun.wait(PATIENCE_S)
    finished: list[bool] = []
    drain = threading.Thread(target=lambda: finished.append(service.drain(PATIENCE_S)))
    drain.start()
    while True:
        try:
            submit(service, Asked([5], 1))
        except DrainingError:
            break
    held.go.set()
    drain.join(PATIENCE_S)
    assert finished == [True]
    assert held.reason() is FinishReason.LENGTH
    assert len(held.tokens) == 10


def test_what_has_not_ended_when_the_grace_is_over_is_told(service: EngineService) -> None:
    held = Asked([5], LONG, held=True)
    submit(service, held, *[Asked([6], LONG) for _ in range(5)])
    assert held.begun.wait(PATIENCE_S)
    threading.Timer(0.2, held.go.set).start()
    assert service.drain(0.0) is False
    assert held.reason() is FinishReason.ERROR
    assert "stopping" in str(held.outputs[-1].error)


def test_sampled_requests_do_not_hang_on_their_neighbours(service: EngineService) -> None:
    def sampled(*neighbours: Asked) -> list[int]:
        asked = Asked([5, 6, 7], 10, temperature=3.0, seed=11, top_k=50)
        submit(service, asked, *neighbours)
        for one in (asked, *neighbours):
            one.reason()
        return asked.tokens

    alone = sampled()
    assert sampled(Asked([9] * 9, 10, temperature=3.0, seed=11), Asked([4], 3)) == alone


@pytest.fixture
def experts(tiny: MakeTiny) -> Engine:
    """Layers 0 and 1 have their experts on the CPU, those of the others stream through four slots."""
    stream = {"expert_stream": {"slots": 4}, "placement": {"n_cpu_moe": 2}}
    return engine_of(tiny("qwen3_moe"), {"overspill": stream})


def test_a_snapshot_of_experts_is_of_whole_passes_and_stays_as_it_was(experts: Engine) -> None:
    service = EngineService(experts, max_num_seqs=2, max_waiting=6, max_batch_tokens=24)
    before = service.stats().experts
    assert before is not None
    service.start()
    told = []
    service.add_step_listener(lambda seconds, tokens, ended: told.append(service.stats().experts))
    asked = [Asked([1, 2, 3], 4), Asked([7] * 9, 2)]
    submit(service, *asked)
    assert service.drain(PATIENCE_S)
    after, stats = service.stats().experts, service.stats()
    assert after is not None
    assert [*before.placed] == [*after.placed] == [0, 1]
    for layer, use in after.placed.items():
        assert use.calls - before.placed[layer].calls == stats.steps == len(told)
        assert use.tokens - before.placed[layer].tokens == 3 + 9 + 4 + 2 - 2
    for one in (before, *told):
        assert one is not None
        assert one.counts is not None
        assert one.counts.fills - one.counts.evictions == one.slots - one.slots_free <= one.slots == 4
    assert before.counts is not None
    assert after.counts is not None
    assert before.counts.lookups < after.counts.lookups
    stream = experts.placed.experts.stream
    assert stream is not None
    assert after.counts == stream.counts is not after.counts
    stream.cache.check()


def test_experts_that_no_pass_ran_are_a_defect(experts: Engine) -> None:
    runs = experts.placed.experts
    used = runs.in_place[0]
    runs.in_place += (InPlaceExperts(used.block, used._side, used._kernel, None),)  # nothing calls it
    with pytest.raises(PlacementDefect, match=r"1 layers .*layers\.0\.mlp\.experts"):
        experts.generate([5], SamplingParams(max_tokens=2), ignore_eos=True)
    service = EngineService(experts, max_num_seqs=1, max_waiting=6, max_batch_tokens=24)
    asked = Asked([5], 4)
    submit(service, asked)
    service.start()
    assert asked.reason() is FinishReason.ERROR
    service.drain(PATIENCE_S)
    assert "PlacementDefect" in (service.failure or "")


def test_without_such_experts_there_are_no_statistics_of_them(service: EngineService) -> None:
    assert service.stats().experts is None
