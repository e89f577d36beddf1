from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from serving import CONTEXT, Server

import overspill
from overspill import SamplingParams
from overspill.engine import Engine

CHAT: list[Any] = [{"role": "user", "content": "Grüße"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def engine(talking: Path) -> Engine:
    """The same model in this process, one request at a time."""
    return overspill.load(talking, device="emulated", cpu_offload_gb="100KiB")


def test_the_model_is_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["talking"]
    assert client.models.retrieve("talking").id == "talking"


def test_a_greedy_chat_is_what_the_engine_generates(client: OpenAI, engine: Engine) -> None:
    expected = engine.generate("Grüße", SamplingParams(12))
    answer = client.chat.completions.create(model="talking", messages=CHAT, **GREEDY)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_ids)
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.total_tokens == len(expected.prompt_ids) + len(expected.token_ids)


def test_a_greedy_completion_is_what_the_engine_generates(client: OpenAI, engine: Engine) -> None:
    expected = engine.generate("Grüße", SamplingParams(12), chat=False)
    for prompt in ("Grüße", engine.encode("Grüße", chat=False)):
        answer = client.completions.create(model="talking", prompt=prompt, **GREEDY, top_p=0.5)
        assert answer.choices[0].text == expected.text
        assert answer.choices[0].finish_reason == expected.finish_reason


def test_text_parts_are_one_text(client: OpenAI) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("Grü", "ße")]}]
    answers = [client.chat.completions.create(model="talking", messages=m, **GREEDY) for m in (CHAT, parts)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


@pytest.mark.parametrize("stop", [None, "-"])
def test_a_streamed_chat_is_the_whole_one(client: OpenAI, stop: str | None) -> None:
    wanted: dict[str, Any] = {"max_tokens": 24, "n": 2, "seed": 7, "stop": stop}
    whole = client.chat.completions.create(model="talking", messages=CHAT, **wanted)
    texts, reasons, roles, usage = ["", ""], [None, None], 0, []
    with client.chat.completions.create(
        model="talking", messages=CHAT, stream=True, stream_options={"include_usage": True}, **wanted
    ) as stream:
        for chunk in stream:
            assert chunk.object == "chat.completion.chunk"
            usage.append(chunk.usage)
            for choice in chunk.choices:
                roles += choice.delta.role == "assistant"
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert roles == 2
    assert usage[-1] == whole.usage
    assert set(usage[:-1]) == {None}


def test_a_streamed_completion_is_the_whole_one(client: OpenAI) -> None:
    wanted: dict[str, Any] = {"prompt": ["one", "two"], "max_tokens": 20, "seed": 3, "logprobs": 1}
    whole = client.completions.create(model="talking", **wanted)
    texts, tokens, offsets = ["", ""], [[], []], [[], []]
    for chunk in client.completions.create(model="talking", stream=True, **wanted):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
            offsets[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices if choice.logprobs]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices if choice.logprobs]


def test_a_seed_makes_an_answer_again_and_choice_i_has_seed_plus_i(client: OpenAI) -> None:
    def texts(**wanted: Any) -> list[str]:
        answer = client.completions.create(model="talking", prompt="so", max_tokens=12, **wanted)
        return [choice.text for choice in answer.choices]

    first = texts(n=3, seed=41)
    assert len(set(first)) == 3
    assert texts(n=3, seed=41) == first
    assert texts(seed=43) == first[2:]
    assert len(set(texts(n=4))) == 4, "without a seed each answer has one of its own"
    assert texts(seed=-5) == texts(seed=-5)


def test_a_stop_text_ends_the_answer_and_is_no_part_of_it(client: OpenAI) -> None:
    free = client.completions.create(model="talking", prompt="go", max_tokens=24, seed=5).choices[0]
    at = free.text[6:8]
    cut = client.completions.create(model="talking", prompt="go", max_tokens=24, seed=5, stop=[at, "never"]).choices[0]
    assert cut.text == free.text[: free.text.index(at)]
    assert cut.finish_reason == "stop"


def test_logprobs_of_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="talking", messages=CHAT, logprobs=True, top_logprobs=3, temperature=0, max_tokens=8
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 8
    assert bytes(b for token in logprobs.content for b in token.bytes or ()).decode(errors="replace") == (
        answer.choices[0].message.content
    )
    for token in logprobs.content:
        assert [token.token, token.logprob] == [token.top_logprobs[0].token, token.top_logprobs[0].logprob]
        assert sorted((other.logprob for other in token.top_logprobs), reverse=True) == [
            other.logprob for other in token.top_logprobs
        ]


def test_logprobs_of_a_completion_have_the_chosen_token_among_the_top(client: OpenAI) -> None:
    choice = client.completions.create(model="talking", prompt="x", logprobs=2, max_tokens=12, seed=1).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs is not None
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == logprob < 0
        assert 2 <= len(top) <= 3
    assert any(token.startswith("bytes:\\x") for token in logprobs.tokens), "a part of a character is told as bytes"


def test_bias_decides_what_is_sampled(client: OpenAI, engine: Engine) -> None:
    [letter] = engine.encode("Z", chat=False)
    answer = client.completions.create(
        model="talking", prompt="x", max_tokens=4, logit_bias={str(letter): 100}, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == "ZZZZ"
    stopped = client.completions.create(
        model="talking", prompt="x", logit_bias={str(letter): 100}, extra_body={"stop_token_ids": [letter]}
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens == 1


def test_echo_puts_the_prompt_before_the_answer(client: OpenAI, engine: Engine) -> None:
    plain = client.completions.create(model="talking", prompt="abc", **GREEDY)
    for prompt in ("abc", engine.encode("abc", chat=False)):
        echoed = client.completions.create(model="talking", prompt=prompt, echo=True, **GREEDY)
        assert echoed.choices[0].text == "abc" + plain.choices[0].text
        stream = client.completions.create(model="talking", prompt=prompt, echo=True, stream=True, **GREEDY)
        assert "".join(choice.text for chunk in stream for choice in chunk.choices) == echoed.choices[0].text


def test_defaults_are_openais(client: OpenAI) -> None:
    extra: dict[str, Any] = {"extra_body": {"ignore_eos": True}}
    completion = client.completions.create(model="talking", prompt="x", **extra)
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 16
    chat = client.chat.completions.create(model="talking", messages=CHAT, **extra)
    assert chat.usage is not None
    assert chat.usage.total_tokens == CONTEXT, "an answer has what the context leaves"
    assert chat.choices[0].finish_reason == "length"
    named = client.chat.completions.create(model="talking", messages=CHAT, max_completion_tokens=3, **extra)
    assert named.usage is not None
    assert named.usage.completion_tokens == 3


def test_what_asks_for_nothing_is_accepted(client: OpenAI) -> None:
    client.chat.completions.create(
        model="talking",
        messages=CHAT,
        max_tokens=1,
        user="u",
        metadata={"a": "b"},
        store=False,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        service_tier="auto",
        extra_body={"top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "best_of": None},
    )


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "stars": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "stars"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_follows_its_schema(client: OpenAI, temperature: float) -> None:
    how: dict[str, Any] = {
        "model": "talking",
        "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}},
        "temperature": temperature,
        "seed": 3,
    }
    answer = client.chat.completions.create(messages=CHAT, n=3, **how)
    for choice in answer.choices:
        found = json.loads(choice.message.content or "")
        assert found["city"] in ("Paris", "Rome")
        assert 0 <= found["stars"] <= 9
        assert choice.finish_reason == "stop"
    pieces = client.chat.completions.create(messages=CHAT, stream=True, **how)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answer.choices[0].message.content
    text = client.completions.create(
        model="talking", prompt="x", max_tokens=60, extra_body={"response_format": how["response_format"]}
    )
    assert set(json.loads(text.choices[0].text)) == {"city", "stars"}


def test_tokens_there_and_back(server: Server, engine: Engine) -> None:
    with server.http() as http:
        tokens = http.post("/tokenize", json={"prompt": "Grüße", "return_token_strs": True}).json()
        assert tokens["tokens"] == engine.encode("Grüße", chat=False)
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        assert tokens["max_model_len"] == CONTEXT
        assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "Grüße"}
        chat = http.post("/tokenize", json={"messages": CHAT}).json()
        assert chat["tokens"] == engine.encode("Grüße")


def test_the_plan_and_the_ledger_are_told_without_addresses(server: Server, engine: Engine) -> None:
    with server.http() as http:
        told = http.get("/v1/offload").json()
        assert http.get("/version").json() == {"version": overspill.__version__}
        assert http.get("/health").text == ""
    assert told["plan"]["offloaded_bytes"] > 0
    hosted = [entry for entry in told["ledger"]["entries"] if entry["tier"] == "host"]
    assert sum(entry["bytes"] for entry in hosted) == told["plan"]["offloaded_bytes"]
    assert {entry["name"] for entry in told["ledger"]["entries"]} == {entry.name for entry in engine.ledger.entries}
    assert set(hosted[0]) == {"name", "tier", "access", "bytes"}
