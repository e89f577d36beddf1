"""How tokens are chosen, and what came out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from overspill.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from overspill.machine.device import LinkTraffic


_COLDEST, _HOTTEST = 1e-3, 1e3


@dataclass(frozen=True)
class SamplingParams:
    """One request's settings. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 cut nothing."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kinds, least, most, bound in (
            ("max_tokens", int, 1, math.inf, "a whole number of at least 1"),
            ("temperature", int | float, 0.0, _HOTTEST, "0, or from 0.001 to 1000"),
            ("top_p", int | float, 1e-9, 1.0, "above 0 and at most 1"),
            ("top_k", int, 0, math.inf, "a whole number of at least 0"),
            ("seed", int, 0, 2**63 - 1, "a whole number from 0 to 2^63-1"),
        ):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
                raise ConfigError(f"{name} is {value!r}", hint=f"{name} must be {bound}")
        if 0.0 < self.temperature < _COLDEST:  # scores divided by less overflow
            raise ConfigError(
                f"temperature is {self.temperature!r}", hint="temperature must be 0, or from 0.001 to 1000"
            )
        if self.temperature == 0.0 and (self.top_p != 1.0 or self.top_k != 0):
            raise ConfigError(
                "top_p or top_k is given, but temperature 0 always takes the likeliest token",
                hint="a temperature above 0, or neither of them",
            )

    def generation_arguments(self) -> dict[str, Any]:
        """The same as fields of transformers' GenerationConfig."""
        arguments: dict[str, Any] = {"max_new_tokens": self.max_tokens, "do_sample": self.temperature > 0.0}
        if self.temperature > 0.0:
            arguments.update(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)
        return arguments


@dataclass(frozen=True)
class Step:
    """One forward pass: `tokens` positions computed, in `seconds`, with what the link carried meanwhile."""

    tokens: int
    seconds: float
    traffic: LinkTraffic


@dataclass(frozen=True)
class Completion:
    """What a request gave. `logits` is float32 [generated tokens, vocabulary], where it was asked for."""

    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    steps: list[Step] = field(default_factory=list, repr=False)
    logits: torch.Tensor | None = field(default=None, repr=False)
