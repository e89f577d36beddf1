"""What a request gets in a crowd is what it gets alone, in every way of batching and with every way of offloading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from crowds import BATCH_TOKENS, CONTEXT, SEQUENCES, Crowd, batching_of, engine_of
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from emulated_runs import gib
from overspill.engine import Engine, SamplingParams
from overspill.engine.batching import Batching
from overspill.engine.choose import NMSE_BOUND
from overspill.engine.packed import PackedBatching, size_pools
from overspill.engine.requests import FinishReason
from overspill.engine.unpacked import CachedModel, JoinedBatching, SingleBatching
from overspill.errors import CapacityError, ConfigError
from overspill.model.hf_packed import LayerShape
from tiny_models import ARCHITECTURES, VOCABULARY, MakeTiny

UVA = {"uva": {"cpu_offload_gb": gib(100_000)}}
PREFETCH = {"prefetch": {"offload_group_size": 2}}
STATES_ONLY = ("mamba", "bamba")
WITH_STATE = ("qwen3_next", "kimi_linear", "nemotron_h", *STATES_ONLY)
PROMPTS = ((5, 17, 99, 3, 64, 21, 120, 7, 40), (1, 2, 3), (9,) * 20, (4, 5, 6, 7), (8,))


def nmse(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).pow(2).mean() / expected.var())


def bound_of(engine: Engine) -> float:
    return max(NMSE_BOUND[weight.dtype] for weight in engine.plan.model)


@pytest.fixture(scope="module")
def crowded(tiny: MakeTiny) -> Iterator[object]:
    """From a name to its engine and batching, each made once."""
    made: dict[str, tuple[Engine, Batching]] = {}

    def get(name: str) -> tuple[Engine, Batching]:
        if name not in made:
            engine = engine_of(tiny(name), UVA if len(made) % 2 else PREFETCH)
            made[name] = engine, batching_of(engine)
        return made[name]

    yield get
    made.clear()


@contextmanager
def crowd_of(batching: Batching) -> Iterator[Crowd]:
    crowd = Crowd(batching)
    try:
        yield crowd
    finally:
        crowd.leave()
    assert crowd.scheduler.idle
    if isinstance(batching, PackedBatching):
        for pool in batching.pools.values():
            pool.check()
            assert pool.held == 0
    assert batching.usage == 0.0


@pytest.mark.parametrize("name", [*ARCHITECTURES, *STATES_ONLY])
def test_each_architecture_is_batched_and_answers_as_alone(name: str, crowded: object) -> None:
    engine, batching = crowded(name)  # type: ignore[operator]
    assert isinstance(batching, JoinedBatching if name in WITH_STATE else PackedBatching), batching.description
    with crowd_of(batching) as crowd:
        asked = [crowd.ask(prompt, 3 + number) for number, prompt in enumerate(PROMPTS)]
        crowd.run()
        assert crowd.mixed or name in WITH_STATE
    for number, request in enumerate(asked):
        params = SamplingParams(max_tokens=3 + number)
        alone = engine.generate(request.prompt_ids, params, ignore_eos=True, logits=True)
        assert alone.logits is not None
        same = 0
        for step, (got, expected) in enumerate(zip(crowd.scores[request], alone.logits, strict=True)):
            assert nmse(got, expected) <= bound_of(engine), f"step {step} of {request.prompt_ids}"
            best = expected.topk(2).values
            if crowd.tokens(request)[step] != alone.token_ids[step]:
                assert best[0] - best[1] <= 2 * (got - expected).abs().max(), "only a near tie may turn"
                break
            same += 1
        assert same >= 1


Event = tuple[str, int, int, int]
EVENTS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "step", "step", "cancel"]), *[st.integers(0, 10_000)] * 3), max_size=24
)


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v2", "nemotron_h"])
def test_nothing_of_a_neighbour_enters(name: str, crowded: object) -> None:
    """Random joins, lengths, cancels and seeds: each request sees the scores that it sees alone, and no more."""
    engine, batching = crowded(name)  # type: ignore[operator]

    @settings(max_examples=8, phases=[Phase.explicit, Phase.generate])  # an example takes too long to be made small
    @given(EVENTS)
    def check(events: list[Event]) -> None:
        with crowd_of(batching) as crowd:
            asked, cancelled = [], set()
            for what, a, b, c in events:
                if what == "ask":
                    length, new = 1 + a % 20, 1 + b % 10
                    prompt = [(a * 7 + b * 3 + c + i * i) % VOCABULARY for i in range(length)]
                    asked.append(crowd.ask(prompt, new, temperature=float(c % 2), seed=c))
                elif what == "step":
                    crowd.scheduler.step()
                elif asked:
                    crowd.cancel(asked[a % len(asked)])
                    cancelled.add(asked[a % len(asked)])
            crowd.run()
        for request in asked:
            reason = crowd.outputs[request][-1].finish_reason
            assert reason in (
                (FinishReason.LENGTH, FinishReason.ABORT) if request in cancelled else (FinishReason.LENGTH,)
            )
            tokens = crowd.tokens(request)
            assert len(tokens) == len(crowd.scores[request])
            if tokens:
                assert_as_forced(engine, request.prompt_ids, tokens, crowd.scores[request])

    check()


def assert_as_forced(engine: Engine, prompt: list[int], tokens: list[int], scores: list[torch.Tensor]) -> None:
    """The architecture by itself, with its own cache and the same tokens, gives the scores that were seen."""
    model = CachedModel(engine.placed)
    expected, cache = model([prompt], None, [0])
    for number, (token, got) in enumerate(zip(tokens, scores, strict=True)):
        assert nmse(got, expected[0]) <= bound_of(engine)
        expected, cache = model([[token]], cache, [len(prompt) + number])


def test_where_pages_run_out_the_last_comer_waits_and_gets_the_same_answer(tiny: MakeTiny) -> None:
    roomy = engine_of(tiny("llama"), PREFETCH)
    with crowd_of(batching_of(roomy)) as crowd:
        expected = [crowd.ask(prompt, 20) for prompt in PROMPTS]
        crowd.run()
    least = 5_000
    with pytest.raises(ConfigError, match=r"one request of 48 tokens takes") as refused:
        engine_of(tiny("llama"), PREFETCH, kv_cache_memory_bytes=least)
    least = int((refused.value.hint or "").split()[2].rstrip(","))
    tight = engine_of(tiny("llama"), PREFETCH, kv_cache_memory_bytes=least)
    batching = batching_of(tight)
    with crowd_of(batching) as scarce:
        asked = [scarce.ask(prompt, 20) for prompt in PROMPTS]
        scarce.run()
    assert batching.preemptions > 0
    assert [scarce.tokens(r) for r in asked] == [crowd.tokens(r) for r in expected]
    assert tight.placed.device.held_bytes("kv_cache") <= least


def test_a_chunk_is_no_longer_than_a_pass(crowded: object) -> None:
    _, batching = crowded("llama")  # type: ignore[operator]
    with crowd_of(batching) as crowd:
        request = crowd.ask([3] * 40, 2)
        assert [crowd.scheduler.step().tokens for _ in range(2)] == [BATCH_TOKENS, 40 - BATCH_TOKENS]  # type: ignore[union-attr]
        crowd.run()
        assert len(crowd.tokens(request)) == 2


def test_a_chunk_and_a_decoding_token_of_the_same_length_are_masked_each_in_its_way(crowded: object) -> None:
    engine, batching = crowded("llama")  # type: ignore[operator]
    with crowd_of(batching) as crowd:
        decoding = crowd.ask(PROMPTS[2], 8)
        for _ in range(3):
            crowd.scheduler.step()
        prompt = [(7 * number) % VOCABULARY for number in range(BATCH_TOKENS - 1)]
        joining = crowd.ask(prompt, 2)
        crowd.scheduler.step()  # both are as long now
        crowd.run()
    for request in (decoding, joining):
        assert_as_forced(engine, request.prompt_ids, crowd.tokens(request), crowd.scores[request])


def test_no_more_run_than_are_allowed(crowded: object) -> None:
    _, batching = crowded("llama")  # type: ignore[operator]
    with crowd_of(batching) as crowd:
        for _ in range(SEQUENCES + 3):
            crowd.ask([1, 2], 4)
        crowd.scheduler.step()
        assert (len(crowd.scheduler.running), len(crowd.scheduler.waiting)) == (SEQUENCES, 3)
        crowd.run()


def test_rotary_frequencies_that_hang_on_the_longest_are_not_shared(tiny: MakeTiny) -> None:
    batching = batching_of(engine_of(tiny("llama_dynamic"), PREFETCH))
    assert isinstance(batching, SingleBatching)
    assert "dynamic" in batching.description
    with crowd_of(batching) as crowd:
        asked = [crowd.ask(prompt, 20) for prompt in (PROMPTS[0], PROMPTS[2], PROMPTS[0], PROMPTS[1])]
        crowd.scheduler.step()
        used = batching.usage
        crowd.cancel(crowd.ask([1], 1))  # one that waits takes nothing of the one that runs
        assert batching.usage == used == len(PROMPTS[0]) / CONTEXT
        crowd.run()
    tokens = [crowd.tokens(request) for request in asked]
    assert tokens[0] == tokens[2], "what was asked before, and was longer, leaves nothing behind"
    fresh = engine_of(tiny("llama_dynamic"), PREFETCH)
    for prompt, answer in ((PROMPTS[2], tokens[1]), (PROMPTS[1], tokens[3])):
        assert fresh.generate(prompt, SamplingParams(max_tokens=20), ignore_eos=True).token_ids == answer


def test_a_cache_that_turns_is_computed_anew(tiny: MakeTiny) -> None:
    """As transformers' generate does it for longrope: beyond the original length keys are rotated otherwise."""
    engine = engine_of(tiny("phi3_longrope"), PREFETCH)
    batching = batching_of(engine)
    assert isinstance(batching, SingleBatching)
    assert "longrope" in batching.description
    with crowd_of(batching) as crowd:
        asked = [crowd.ask(list(range(3, 3 + length)), 12) for length in (4, 9, 20)]
        crowd.run()
    model = CachedModel(engine.placed)
    for request in asked:
        tokens = crowd.tokens(request)
        for number, got in enumerate(crowd.scores[request]):
            expected, _ = model([[*request.prompt_ids, *tokens[:number]]], None, [0])
            assert nmse(got, expected[0]) <= bound_of(engine)
    assert isinstance(batching_of(engine_of(tiny("phi3_longrope"), PREFETCH, context=16)), PackedBatching)


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_next"])
def test_states_do_not_count_by_token(name: str, tiny: MakeTiny) -> None:
    """A cache planned for so many requests holds so many, however long the context is."""
    batching = batching_of(engine_of(tiny(name), PREFETCH, context=64))
    with crowd_of(batching) as crowd:
        for _ in range(SEQUENCES):
            crowd.ask([1, 2], 62)
        for _ in range(2 * SEQUENCES):
            crowd.scheduler.step()
        assert len(crowd.scheduler.running) == SEQUENCES
        assert 0.0 < batching.usage <= 1.0
        for request in list(crowd.outputs):
            crowd.cancel(request)


FULL = LayerShape(heads=2, key_size=8, value_size=8, dtype=torch.float32, window=None)
WINDOWED = LayerShape(heads=1, key_size=8, value_size=8, dtype=torch.float32, window=20)


@given(st.integers(1, 9), st.integers(1, 200), st.integers(1, 64), st.integers(0, 1 << 20))
def test_pools_never_exceed_their_budget_and_hold_a_request(
    sequences: int, context: int, chunk: int, more: int
) -> None:
    shapes = [FULL, WINDOWED, None, FULL]
    how = {"max_num_seqs": sequences, "max_batch_tokens": chunk, "context_tokens": context}
    least = size_pools(shapes, None, **how).nbytes
    with pytest.raises(CapacityError, match="KV cache"):
        size_pools(shapes, least - 1, **how)
    sizes = size_pools(shapes, least + more, **how)
    assert sizes.nbytes <= least + more
    assert sizes.pages[None] * 16 >= context
    assert sizes.pages[20] * 16 >= min(context, 20 + 16)
    assert sizes.nbytes >= least


def test_the_planned_context_is_what_a_request_may_have(crowded: object) -> None:
    _, batching = crowded("llama")  # type: ignore[operator]
    assert batching.max_request_tokens == CONTEXT
