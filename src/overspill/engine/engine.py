"""Generation over a placed model: prompt in, tokens out, each step timed and its traffic counted.

Sampling, stopping and the architecture's cache are transformers' `generate`; where weights live is not known here.
One request runs at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from overspill.engine.sampling import Completion, SamplingParams, Step
from overspill.errors import ConfigError
from overspill.model.hf import cache_of, tensors_in
from overspill.offload.ledger import Ledger
from overspill.offload.placed import PlacedModel
from overspill.plan import Plan

OnText = Callable[[str], None]


class Engine:
    """A placed model with its tokenizer (None for a model without one: then prompts are token ids)."""

    def __init__(self, placed: PlacedModel, tokenizer: Any, generation_config: GenerationConfig) -> None:
        self.placed = placed
        self.tokenizer = tokenizer
        self.generation_config = generation_config
        placed.model.register_forward_hook(self._count_cache)

    @property
    def plan(self) -> Plan:
        return self.placed.plan

    @property
    def ledger(self) -> Ledger:
        return self.placed.ledger

    def encode(self, prompt: str | Sequence[int], *, chat: bool = True) -> list[int]:
        """Token ids of `prompt`, as a user's message in the chat template where there is one and `chat` is True."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ConfigError("this model has no tokenizer", hint="give the prompt as token ids")
        if chat and getattr(self.tokenizer, "chat_template", None):
            message = [{"role": "user", "content": prompt}]
            encoded = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
            return list(encoded["input_ids"])
        return list(self.tokenizer(prompt)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return "" if self.tokenizer is None else str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        chat: bool = True,
        on_text: OnText | None = None,
        logits: bool = False,
        ignore_eos: bool = False,
    ) -> Completion:
        """Complete `prompt`. `on_text` receives the text piece by piece; `logits` keeps every step's scores.

        Raises ConfigError where prompt and answer exceed the planned context, DeviceOutOfMemoryError where the
        device's memory runs out on the way.
        """
        params = params or SamplingParams()
        ids = self.encode(prompt, chat=chat)
        self._check_length(len(ids), params.max_tokens)
        device = self.placed.device
        recorder = _Recorder(self, on_text)
        torch.manual_seed(params.seed)
        config = deepcopy(self.generation_config)
        config.update(**params.generation_arguments(), output_logits=logits, pad_token_id=self._pad_token())
        if ignore_eos:
            config.eos_token_id = None
        inputs = device.to_device(torch.tensor([ids]))
        with self.placed.running():
            output: Any = self.placed.model.generate(  # type: ignore[operator]
                inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=config,
                streamer=recorder,
            )
            device.synchronize()
            scores = torch.stack([step[0].float().cpu() for step in output.logits]) if logits else None
        tokens = recorder.tokens
        stopped = tokens[-1:] != [] and tokens[-1] in self.eos_token_ids() and not ignore_eos
        return Completion(
            ids, tokens, self.decode(tokens), "stop" if stopped else "length", recorder.steps, scores
        )  # fmt: skip

    def eos_token_ids(self) -> list[int]:
        eos = self.generation_config.eos_token_id
        return [] if eos is None else [int(e) for e in (eos if isinstance(eos, list) else [eos])]

    def _pad_token(self) -> int:
        pad = self.generation_config.pad_token_id
        return int(pad) if isinstance(pad, int) else next(iter(self.eos_token_ids()), 0)

    def _check_length(self, prompt_tokens: int, max_tokens: int) -> None:
        limit = self.plan.context_tokens
        if prompt_tokens == 0:
            raise ConfigError("the prompt is empty", hint="give at least one token")
        if prompt_tokens + max_tokens > limit:
            raise ConfigError(
                f"the prompt's {prompt_tokens} tokens and {max_tokens} to generate exceed the planned {limit}",
                hint="--max-model-len plans a longer context, --max-tokens asks for a shorter answer",
            )

    def _count_cache(self, module: Any, args: Any, output: Any) -> None:
        self.placed.device.label(tensors_in(cache_of(output)), "kv_cache")


class _Recorder(BaseStreamer):  # type: ignore[misc]
    """Receives each new token from `generate`: keeps it, times its step, and passes whole text on."""

    def __init__(self, engine: Engine, on_text: OnText | None) -> None:
        self.engine = engine
        self.on_text = on_text
        self.tokens: list[int] = []
        self.steps: list[Step] = []
        self._shown = ""
        self._positions = 0
        self._device = engine.placed.device
        self._traffic = self._device.traffic.copy()
        self._clock = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        if self._positions == 0:  # the prompt itself comes first
            self._positions = value.numel()
            self._clock = time.perf_counter()
            return
        now, traffic = time.perf_counter(), self._device.traffic.copy()
        self.steps.append(Step(self._positions, now - self._clock, traffic - self._traffic))
        self._clock, self._traffic, self._positions = now, traffic, 1
        self.tokens += value.flatten().tolist()
        if self.on_text is not None:
            text = self.engine.decode(self.tokens)
            if not text.endswith("�"):  # an unfinished character waits for its other bytes
                self.on_text(text[len(self._shown) :])
                self._shown = text

    def end(self) -> None:
        if self.on_text is not None:
            text = self.engine.decode(self.tokens)
            self.on_text(text[len(self._shown) :])
