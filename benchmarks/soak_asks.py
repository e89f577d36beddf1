"""What a soak's clients ask for, and what must come back."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.streams import Answer, Choice

CONTEXT, MAX_WAITING, MAX_BODY_BYTES = 256, 208, 64 * 1024
TIE = 0.02  # where the two likeliest tokens are nearer than this, rounding may choose either
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
FORCED, GREEDY, SAMPLED, SCHEMA = "forced token", "known prompt, greedy", "sampled", "JSON schema"

KNOWN = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was a miller who",
    "The three primary colours are",
    "def fibonacci(n):\n",
    "To make pancakes, you first need",
    "Monday, Tuesday, Wednesday,",
    "The opposite of hot is",
)
WORDS = (  # a token each
    " river stone garden window horse music winter summer bridge market silver doctor letter mountain island forest"
    " bread water apple school yellow green mother father engine planet circle number"
)
QUESTIONS = (
    "Name three colours.",
    "Why is the sky blue?",
    "Write a short poem about rain.",
    "What is 7 times 8?",
    "Wer schrieb Faust? 🙂",
)


@dataclass(frozen=True)
class Reference:
    """What the server answers to a known prompt while nobody else asks."""

    tokens: list[str]
    logprobs: list[float]
    certain: int  # so many of the first tokens no rounding can change

    @classmethod
    def of(cls, choice: Choice) -> Reference:
        near = (place for place, margin in enumerate(choice.margins) if margin < TIE)
        return cls(choice.tokens, choice.logprobs, next(near, len(choice.tokens)))

    def differs(self, choice: Choice) -> str | None:
        if choice.tokens[: self.certain] == self.tokens[: self.certain]:
            return None
        return f"the tokens are {choice.tokens}, alone they were {self.tokens} (certain: the first {self.certain})"

    def deviation(self, choice: Choice) -> float:
        """The largest difference of a chosen token's log-probability, while the tokens are the same."""
        pairs = zip(self.tokens, choice.tokens, self.logprobs, choice.logprobs, strict=False)
        largest = 0.0
        for ours, theirs, before, now in pairs:
            if ours != theirs:
                break
            largest = max(largest, abs(before - now))
        return largest


@dataclass(frozen=True)
class Ask:
    """A request for an answer. `forced`: the one text that each token must have; `among`: what its JSON must be."""

    kind: str
    path: str
    body: dict[str, Any]
    prompt_tokens: int
    forced: str | None = None
    reference: Reference | None = None
    among: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        return int(self.body.get("n", 1))

    def faults(self, answer: Answer) -> Iterator[str]:
        """What is wrong with an answer that was read to its end."""
        if answer.status != 200 or answer.errors:
            yield f"status {answer.status}, {answer.errors}"
            return
        if not answer.done or answer.after_done:
            yield f"[DONE] is {'not the last event' if answer.done else 'missing'}"
        if len(answer.ids) != 1:
            yield f"its parts have the ids {sorted(answer.ids)}"
        if set(answer.choices) != set(range(self.n)):
            yield f"the choices are {sorted(answer.choices)} of {self.n}"
        for index, choice in sorted(answer.choices.items()):
            yield from (f"choice {index}: {fault}" for fault in self._choice_faults(choice))
        yield from self._usage_faults(answer)

    def _choice_faults(self, choice: Choice) -> Iterator[str]:
        most, counted, endless = self.body["max_tokens"], self._counted, "ignore_eos" in self.body
        if choice.finish_reasons not in ([["length"]] if endless else [["length"], ["stop"]]):
            yield f"it finishes with {choice.finish_reasons}"
        elif counted and not (len(choice.tokens) == most or choice.finish_reasons == ["stop"]):
            yield f"{len(choice.tokens)} tokens of {most}, but it finishes with length"
        if len(choice.tokens) > most:
            yield f"{len(choice.tokens)} tokens, more than {most}"
        if self.forced is not None and (set(choice.tokens) != {self.forced} or choice.text != self.forced * most):
            yield f"mixed up: {self.forced!r} was forced, and it is {choice.text!r} of {choice.tokens}"
        if self.reference is not None and (fault := self.reference.differs(choice)):
            yield f"mixed up: {fault}"
        if self.among and choice.finish_reasons == ["stop"] and json.loads(choice.text) not in self._objects:
            yield f"mixed up: {choice.text!r} is none of {self._objects}"

    @property
    def _objects(self) -> list[dict[str, str]]:
        return [{"word": word} for word in self.among]

    def _usage_faults(self, answer: Answer) -> Iterator[str]:
        if len(answer.usages) != 1:
            yield f"usage comes {len(answer.usages)} times"
            return
        usage = answer.usages[0]
        told, most = usage["completion_tokens"], self.n * self.body["max_tokens"]
        tokens = sum(len(choice.tokens) for choice in answer.choices.values())
        if usage["prompt_tokens"] != self.prompt_tokens or usage["total_tokens"] != self.prompt_tokens + told:
            yield f"usage is {usage}, the prompt has {self.prompt_tokens} tokens"
        if told != tokens if self._counted else not self.n <= told <= most:
            yield f"usage is {usage}, and {tokens} tokens came"

    @property
    def _counted(self) -> bool:
        return self.body.get("logprobs") not in (None, False)


@dataclass(frozen=True)
class Malformed:
    """A request that must be refused with `status`, and blame `blamed`: the error's `param`, or else its `code`."""

    name: str
    path: str
    content: bytes
    status: int
    blamed: str | None

    def faults(self, answer: Answer) -> Iterator[str]:
        error = answer.error
        found = error.get("param") or error.get("code")
        if (answer.status, found) != (self.status, self.blamed) or not error.get("message"):
            yield f"{self.name}: status {answer.status} and {answer.errors}, not {self.status} for {self.blamed}"


def malformed(model: str) -> list[Malformed]:
    chat = [{"role": "user", "content": "x"}]
    bodies: list[tuple[str, str, Any, int, str | None]] = [
        ("invalid JSON", TEXT, b'{"prompt": "x"', 400, "invalid_json"),
        ("not text", CHAT, b"\xff\xfe\x00{}", 400, "invalid_json"),
        ("no object", TEXT, [1, 2], 400, None),
        ("no body", CHAT, b"", 400, None),
        ("unknown field", TEXT, {"prompt": "x", "max_token": 3}, 400, "max_token"),
        ("unknown field", CHAT, {"messages": chat, "stream": True, "temprature": 0}, 400, "temprature"),
        ("wrong type", TEXT, {"prompt": "x", "max_tokens": "many", "stream": True}, 400, "max_tokens"),
        ("wrong type", CHAT, {"messages": "hello"}, 400, "messages"),
        ("out of range", TEXT, {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("not honoured", CHAT, {"messages": chat, "tools": [{"type": "function"}]}, 400, "tools"),
        ("unknown token", TEXT, {"prompt": [1, 999_999]}, 400, "prompt"),
        ("unknown model", TEXT, {"prompt": "x", "model": f"not-{model}"}, 404, "model"),
        ("unknown model", CHAT, {"messages": chat, "model": "gpt-4", "stream": True}, 404, "model"),
        ("too long a prompt", TEXT, {"prompt": "word " * 2 * CONTEXT, "stream": True}, 400, "prompt"),
        ("too long an answer", CHAT, {"messages": chat, "max_tokens": CONTEXT}, 400, "messages"),
        ("body over the limit", TEXT, {"prompt": "word " * (MAX_BODY_BYTES // 4)}, 413, "body_too_large"),
    ]
    return [
        Malformed(name, path, body if isinstance(body, bytes) else json.dumps(body).encode(), status, blamed)
        for name, path, body, status, blamed in bodies
    ]


@dataclass(frozen=True)
class Known:
    """What was learned from the server before the load: tokens of prompts, ids of words, its own answers."""

    model: str
    prompt_tokens: dict[str, int]
    word_ids: dict[str, int]
    references: dict[str, Reference]

    def forced(self, rng: random.Random) -> Ask:
        word = rng.choice(list(self.word_ids))
        more = {"logit_bias": {str(self.word_ids[word]): 100}, "ignore_eos": True}
        return self._ask(FORCED, rng, {**more, "temperature": rng.choice((0, 1))}, counted=True, forced=word)

    def sampled(self, rng: random.Random) -> Ask:
        ways: Sequence[dict[str, Any]] = (
            {"temperature": 0.8, "top_p": 0.9},
            {"temperature": 1.0, "top_k": 20, "seed": rng.getrandbits(32)},
            {"temperature": 1.2, "frequency_penalty": 0.5, "min_p": 0.05},
            {"temperature": 0, "repetition_penalty": 1.1},
        )
        return self._ask(SAMPLED, rng, dict(rng.choice(ways)), counted=rng.random() < 0.5)

    def by_schema(self, rng: random.Random) -> Ask:
        among = tuple(rng.sample([word.strip() for word in self.word_ids], 2))
        properties = {"word": {"enum": list(among)}}
        schema = {"type": "object", "properties": properties, "required": ["word"], "additionalProperties": False}
        format_ = {"type": "json_schema", "json_schema": {"name": "word", "schema": schema}}
        asked = self._ask(SCHEMA, rng, {"response_format": format_, "max_tokens": 24}, counted=True)
        return replace(asked, among=among)

    def greedy(self, rng: random.Random) -> Ask:
        return self.greedy_for(rng.choice(KNOWN), stream=rng.random() < 0.9, n=rng.choice((1, 1, 1, 2)))

    def greedy_for(self, prompt: str, *, stream: bool = True, n: int = 1) -> Ask:
        """Complete a known prompt as it was completed for the reference."""
        body = {"prompt": prompt, "n": n, "max_tokens": 12, "temperature": 0, "logprobs": 2, **_streamed(stream)}
        tokens, reference = self.prompt_tokens[prompt], self.references.get(prompt)
        return Ask(GREEDY, TEXT, body, tokens, reference=reference)

    def _ask(
        self, kind: str, rng: random.Random, more: dict[str, Any], *, counted: bool, forced: str | None = None
    ) -> Ask:
        body = {"n": rng.choice((1, 1, 1, 2)), "max_tokens": rng.randint(3, 12), "model": self.model, **more}
        body |= _streamed(rng.random() < 0.9)
        if rng.random() < 0.5:
            prompt = rng.choice(KNOWN)
            body |= {"prompt": prompt, **({"logprobs": 0} if counted else {})}
            return Ask(kind, TEXT, body, self.prompt_tokens[prompt], forced)
        question = rng.choice(QUESTIONS)
        body |= {"messages": [{"role": "user", "content": question}], "logprobs": counted}
        return Ask(kind, CHAT, body, self.prompt_tokens[question], forced)


def _streamed(stream: bool) -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}} if stream else {}


_FULL = re.compile(r"(\d+) requests wait, (\d+) more would be above the (\d+) that may")


def full_queue_faults(answer: Answer, outstanding: int) -> Iterator[str]:
    """What is wrong with a 429. `outstanding`: the most that the server may still have had, this request included."""
    found = _FULL.search(answer.error.get("message", ""))
    if answer.error.get("code") != "queue_full" or found is None:
        yield f"429 with {answer.errors}"
        return
    waiting, more, most = map(int, found.groups())
    if waiting + more <= most or most != MAX_WAITING or outstanding <= most:
        yield f'429 says "{found[0]}", and at most {outstanding} were asked for and not answered'
    if not answer.headers.get("Retry-After", "").isdigit():
        yield "429 without Retry-After"
