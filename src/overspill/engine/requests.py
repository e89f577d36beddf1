"""What is asked of the batching engine, and what comes back piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from overspill.engine.sampling import SamplingParams
from overspill.errors import CapacityError, ConfigError, DefectError, OverspillError

if TYPE_CHECKING:
    from overspill.engine.grammar import Grammar

MAX_LOGPROBS = 20


@dataclass(frozen=True)
class RequestParams(SamplingParams):
    """One request's settings: those of SamplingParams, and what only the batching engine does.

    Applied in this order: `logit_bias` (token id -> added to its score), `repetition_penalty` (over prompt and answer,
    Keskar et al. 2019), `frequency_penalty` and `presence_penalty` (over the answer, OpenAI's formula), `grammar`,
    temperature, top-k, top-p, `min_p` (of the likeliest token's probability). `stop` texts end the answer and are not
    part of it; `stop_token_ids` do as the end token does. `logprobs` asks for the chosen token's log-probability and
    that many alternatives', of the model's own scores before any of this.
    """

    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least, most, bound in (
            ("min_p", 0.0, 1.0, "from 0 to 1"),
            ("repetition_penalty", 1e-3, 1e3, "from 0.001 to 1000"),
            ("presence_penalty", -2.0, 2.0, "from -2 to 2"),
            ("frequency_penalty", -2.0, 2.0, "from -2 to 2"),
            ("logprobs", 0, MAX_LOGPROBS, f"a whole number from 0 to {MAX_LOGPROBS}"),
        ):
            value: Any = getattr(self, name)
            if value is not None and not (math.isfinite(value) and least <= value <= most):
                raise ConfigError(f"{name} is {value!r}", hint=f"{name} must be {bound}")
        if any(not math.isfinite(bias) or abs(bias) > 100 for bias in self.logit_bias.values()):
            raise ConfigError(f"logit_bias is {dict(self.logit_bias)!r}", hint="a bias must be from -100 to 100")
        if any(not text for text in self.stop):
            raise ConfigError('stop holds an empty text ""', hint="an empty text would stop every answer at once")


class FinishReason(StrEnum):
    """Why an answer ended, in OpenAI's words; `ABORT` is a client that went away, `ERROR` a step that threw."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class TokenLogprob:
    """A chosen token with its log-probability, and the likeliest alternatives as (token id, log-probability)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """What one step added to a request's answer; the texts of all outputs join to the answer.

    `text` may be "" while a character or a possible stop text is unfinished. The last output has `finish_reason`, and
    `error` where that is ERROR.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: OverspillError | None = None


@dataclass(eq=False)
class Request:
    """One sequence to complete. `emit` is called in the engine's thread, once per step that added something.

    `times` are filled by the engine, on `time.monotonic`: "arrived", "started" (first computed), "first" (first token),
    "finished".
    """

    prompt_ids: list[int]
    params: RequestParams
    emit: Callable[[Output], None] = field(repr=False)
    times: dict[str, float] = field(default_factory=dict, repr=False)
    generated: int = 0


class QueueFullError(CapacityError):
    """As many requests wait as are allowed to."""


class DrainingError(OverspillError):
    """The engine is finishing what it has and takes nothing new."""


class EngineFailedError(DefectError):
    """The engine cannot go on; the message says why."""
