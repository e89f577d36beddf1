from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import overspill
from emulated_runs import CONTEXT, PROMPT, emulated, gib, mapped, placed
from overspill.engine import Engine, SamplingParams
from overspill.errors import ConfigError, DeviceOutOfMemoryError
from overspill.model.hf_experts import set_experts_implementation
from talking_model import save_talking_model
from tiny_models import VOCABULARY, MakeTiny

PREFETCH = {"prefetch": {"offload_group_size": 2}}
NEW = 8


def uva(nbytes: float, *selectors: str) -> dict[str, Any]:
    return {"uva": {"cpu_offload_gb": gib(nbytes), "cpu_offload_params": list(selectors)}}


def engine_of(folder: Path, document: Any = None, **placing: Any) -> Engine:
    return Engine(placed(folder, document, **placing), None, GenerationConfig(eos_token_id=2, pad_token_id=0))


def greedy(engine: Engine, max_tokens: int = NEW, **how: Any) -> overspill.Completion:
    return engine.generate(PROMPT, SamplingParams(max_tokens=max_tokens), **how)


@pytest.fixture(scope="module")
def llama(tiny: MakeTiny) -> Engine:
    """Half of its bytes overspilled, zero-copy."""
    return engine_of(tiny("llama"), uva(100_000))


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = save_talking_model(tmp_path_factory.mktemp("talking"))
    return overspill.load(folder, PREFETCH, device="emulated", link_bandwidth="1000GB/s", debug=True)


# -- the answer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3", "nemotron_h"])
@pytest.mark.parametrize("document", [uva(1 << 30), PREFETCH], ids=["uva", "prefetch"])
def test_greedy_ids_are_those_of_transformers(name: str, document: Any, tiny: MakeTiny) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny(name), dtype=torch.float32)
    set_experts_implementation(reference.eval(), "eager")
    ids = torch.tensor([PROMPT])
    expected = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=2
    )
    completion = greedy(engine_of(tiny(name), document))
    assert completion.prompt_ids == list(PROMPT)
    assert completion.token_ids == expected[0, len(PROMPT) :].tolist()


def test_logits_are_of_each_step(llama: Engine) -> None:
    completion = greedy(llama, logits=True)
    assert completion.logits is not None
    assert completion.logits.dtype == torch.float32
    assert completion.logits.shape == (len(completion.token_ids), VOCABULARY)
    assert completion.logits.argmax(-1).tolist() == completion.token_ids
    assert greedy(llama).logits is None


def test_sampling_follows_its_seed(llama: Engine) -> None:
    def sampled(seed: int, **cut: Any) -> list[int]:
        params = SamplingParams(max_tokens=NEW, temperature=2.0, seed=seed, **cut)
        return llama.generate(PROMPT, params, ignore_eos=True).token_ids

    assert sampled(1) == sampled(1)
    assert len({tuple(sampled(seed)) for seed in range(3)}) > 1
    assert sampled(1, top_k=1) == sampled(2, top_k=1) == greedy(llama, ignore_eos=True).token_ids


def test_how_tokens_are_chosen_is_the_request_s(tiny: MakeTiny) -> None:
    plain = greedy(engine_of(tiny("llama")), ignore_eos=True).token_ids
    model = placed(tiny("llama"))
    defaults = GenerationConfig(no_repeat_ngram_size=1, suppress_tokens=[plain[0]], temperature=3.0, do_sample=True)
    model.model.generation_config = defaults
    assert greedy(Engine(model, None, defaults), ignore_eos=True).token_ids == plain


def test_an_answer_stops_at_its_end(tiny: MakeTiny) -> None:
    engine = engine_of(tiny("llama"))
    whole = greedy(engine, ignore_eos=True)
    assert (len(whole.token_ids), whole.finish_reason) == (NEW, "length")
    end = whole.token_ids[2]
    until = whole.token_ids[: whole.token_ids.index(end) + 1]
    unused = next(token for token in range(VOCABULARY) if token not in until)
    for eos in (end, [unused, end]):
        engine.generation_config = GenerationConfig(eos_token_id=eos)
        stopped = greedy(engine)
        assert (stopped.token_ids, stopped.finish_reason) == (until, "stop")
    assert greedy(engine, ignore_eos=True).token_ids == whole.token_ids


def test_where_the_generation_config_is_silent_the_model_s_config_names_the_end(tiny: MakeTiny) -> None:
    assert Engine(placed(tiny("llama")), None, GenerationConfig()).eos_token_ids() == [2]


# -- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["Grüße, 世界 😀", "plain"])
def test_pieces_of_text_join_to_the_answer(talking: Engine, prompt: str) -> None:
    pieces: list[str] = []
    completion = talking.generate(
        prompt, SamplingParams(max_tokens=24, temperature=1.5, seed=3), on_text=pieces.append, ignore_eos=True
    )
    assert len(pieces) > 1
    assert all(pieces)
    assert "".join(pieces) == completion.text == talking.decode(completion.token_ids)
    assert talking.decode(completion.prompt_ids) == f"[user] {prompt}\n"


def test_the_chat_template_can_be_left_out(talking: Engine) -> None:
    completion = talking.generate("raw", SamplingParams(max_tokens=1), chat=False)
    assert talking.decode(completion.prompt_ids) == "raw"


# -- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "selectors"), [("llama", ()), ("llama", ("mlp",)), ("qwen3_moe", ("experts",)), ("gpt_oss", ())]
)
def test_a_step_moves_what_the_plan_says(name: str, selectors: tuple[str, ...], tiny: MakeTiny) -> None:
    engine = engine_of(tiny(name), uva(1 << 30, *selectors))
    completion = greedy(engine, ignore_eos=True)
    assert [step.tokens for step in completion.steps] == [len(PROMPT)] + [1] * (NEW - 1)
    planned = round(engine.plan.step.link_bytes)
    assert planned > 0
    assert [step.traffic.bytes for step in completion.steps[1:]] == [planned] * (NEW - 1)
    assert all(step.seconds > 0 for step in completion.steps)


def test_prefetched_passes_move_what_the_plan_says(tiny: MakeTiny) -> None:
    engine = engine_of(tiny("llama"), PREFETCH)
    before = engine.placed.device.traffic.copy()
    completion = greedy(engine, ignore_eos=True)
    moved = (
        engine.placed.device.traffic - before
    )  # copies run ahead, so that a step may order what the next one waits for
    assert moved.bytes == len(completion.steps) * engine.plan.step.link_bytes > 0
    assert moved.transfers == len(completion.steps) * engine.plan.step.transfers
    assert sum(step.traffic.bytes for step in completion.steps) <= moved.bytes


def test_nothing_moves_where_nothing_is_offloaded(tiny: MakeTiny) -> None:
    assert {step.traffic.bytes for step in greedy(engine_of(tiny("llama"))).steps} == {0}


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_the_cache_is_counted_to_the_byte_as_traced(name: str, tiny: MakeTiny) -> None:
    engine = engine_of(tiny(name))
    device = engine.placed.device
    held: list[int] = []
    engine.placed.model.register_forward_hook(lambda *_: held.append(device.held_bytes("kv_cache")))
    greedy(engine, ignore_eos=True)
    assert held[0] == mapped(tiny(name), tokens=len(PROMPT)).trace.kv_cache_bytes
    if name == "llama":  # the others keep a window, or a state of one size
        assert held[-1] == mapped(tiny(name), tokens=len(PROMPT) + NEW - 1).trace.kv_cache_bytes
    assert 0 < max(held) <= engine.plan.memory.kv_cache_bytes
    assert device.held_bytes("kv_cache") == 0, "an answer that is done holds no cache"


@pytest.mark.parametrize("document", [uva(100_000), PREFETCH], ids=["uva", "prefetch"])
def test_out_of_memory_names_what_is_missing_and_leaves_nothing_behind(document: Any, tiny: MakeTiny) -> None:
    device = emulated()
    engine = engine_of(tiny("llama"), document, device=device)
    expected = greedy(engine).token_ids
    gc.collect()
    resting = device.account.total_bytes
    enough, device.account.budget_bytes = device.account.budget_bytes, resting + 2048
    with pytest.raises(
        DeviceOutOfMemoryError, match=r"working memory needs .* of .* are free \(held or reserved: weights .*\nhint: "
    ) as told:
        greedy(engine)
    del told
    gc.collect()
    assert device.account.total_bytes == resting
    assert device.held_bytes("working") == device.held_bytes("kv_cache") == 0
    device.account.budget_bytes = enough
    assert greedy(engine).token_ids == expected, "the engine goes on as before"


def test_dropping_an_engine_frees_the_device(tiny: MakeTiny) -> None:
    device = emulated()
    engine = engine_of(tiny("llama"), PREFETCH, device=device)
    greedy(engine)
    assert device.held_bytes("weights") > 0
    assert device.held_bytes("buffer_pool") > 0
    del engine
    gc.collect()
    assert device.held_bytes("weights") == device.held_bytes("buffer_pool") == 0


def test_two_engines_in_one_process_do_not_meet(tiny: MakeTiny) -> None:
    folder = tiny("llama")
    alone = greedy(engine_of(folder), logits=True)
    first, second = engine_of(folder, PREFETCH), engine_of(folder, uva(100_000))
    for engine in (first, second, first):
        again = greedy(engine, logits=True)
        assert again.token_ids == alone.token_ids
        assert torch.equal(again.logits, alone.logits)
    assert first.placed.device.traffic.bytes > 0 < second.placed.device.traffic.bytes


# -- refusals --------------------------------------------------------------------------------------------------------


def test_prompt_and_answer_may_fill_the_planned_context(llama: Engine) -> None:
    completion = greedy(llama, CONTEXT - len(PROMPT), ignore_eos=True)
    assert len(completion.token_ids) == CONTEXT - len(PROMPT)
    before = llama.placed.device.traffic.copy()
    with pytest.raises(ConfigError, match=f"more than the {CONTEXT} that memory is planned for"):
        greedy(llama, CONTEXT - len(PROMPT) + 1)
    assert llama.placed.device.traffic == before, "refused before a pass"


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_token_that_the_model_does_not_know_is_refused(llama: Engine, token: int) -> None:
    with pytest.raises(ConfigError, match=f"token id {token} is not in the model's vocabulary of {VOCABULARY}"):
        llama.generate([5, token], SamplingParams(max_tokens=1))


def test_text_for_a_model_without_a_tokenizer_is_refused(llama: Engine) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        llama.generate("text")
    assert llama.decode([5, 6]) == ""
