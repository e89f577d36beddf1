"""Generation over a placed model: prompt in, tokens out, each step timed and its traffic counted.

Sampling, stopping and the architecture's cache are transformers' `generate`; where weights live is not known here.
One request runs at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from overspill.engine.sampling import Completion, SamplingParams, Step
from overspill.engine.tokens import TextStream, encode, refuse_length, refuse_no_text
from overspill.errors import ConfigError, UnsupportedModelError
from overspill.machine.device import Device
from overspill.model.hf import cache_of, forget_longest, tensors_in
from overspill.offload.ledger import Ledger
from overspill.offload.placed import PlacedModel
from overspill.plan import Plan

if TYPE_CHECKING:
    from overspill.engine.grammar import GrammarCompiler

OnText = Callable[[str], None]


class Engine:
    """A placed model with its tokenizer (None for a model without one: then prompts are token ids).

    Of `generation_config` the special tokens are used; how tokens are chosen is a request's own SamplingParams.
    """

    def __init__(self, placed: PlacedModel, tokenizer: Any, generation_config: GenerationConfig) -> None:
        self.placed = placed
        self.tokenizer = tokenizer
        self.generation_config = generation_config
        self._text_config: Any = placed.plan.model.config.get_text_config(decoder=True)
        placed.model.register_forward_hook(_cache_counter(placed.device))

    @property
    def plan(self) -> Plan:
        return self.placed.plan

    @property
    def ledger(self) -> Ledger:
        return self.placed.ledger

    def encode(self, prompt: str | Sequence[int], *, chat: bool = True) -> list[int]:
        """Token ids of `prompt`, as a user's message in the chat template where there is one and `chat` is True."""
        return encode(self.tokenizer, prompt, chat=chat)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, as it is and without special tokens; "" without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

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

        An encoder-decoder reads the prompt with its encoder, and the answer is the decoder's.
        Raises UnsupportedModelError where the model takes no text, ConfigError where a token id is not in the
        vocabulary, or prompt and answer exceed the planned context; DeviceOutOfMemoryError where the device's memory
        runs out on the way. What the request held is then free again
        as soon as the error is.
        """
        refuse_no_text(self.plan.model)
        params = params or SamplingParams()
        ids = self.encode(prompt, chat=chat)
        refuse_length(len(ids), params.max_tokens, self.plan.context_tokens)
        self.refuse_unknown(ids)
        eos = [] if ignore_eos else self.eos_token_ids()
        device = self.placed.device
        model: Any = self.placed.model
        start = next(iter((*self._special("decoder_start_token_id"), *self._special("bos_token_id"))), None)
        if self.plan.model.encodes and start is None:
            raise UnsupportedModelError(
                f"{self.plan.model.architecture} has no token that its decoder starts with",
                hint='"decoder_start_token_id" in generation_config.json',
            )
        config = GenerationConfig(
            **params.generation_arguments(),
            eos_token_id=eos or None,
            pad_token_id=self._pad_token(),
            decoder_start_token_id=start if self.plan.model.encodes else None,
            return_dict_in_generate=True,
            output_logits=logits,
        )
        inputs = device.to_device(torch.tensor([ids]))
        with self.placed.running():
            forget_longest(model)
            recorder = _Recorder(self, on_text)
            model.generation_config = config  # set here too: `generate` fills what is None in its argument from there
            torch.manual_seed(params.seed)
            output: Any = model.generate(
                inputs, attention_mask=torch.ones_like(inputs), generation_config=config, streamer=recorder
            )
            device.synchronize()
            self.placed.experts.prove_used()
            scores = torch.stack([step[0].float().cpu() for step in output.logits]) if logits else None
        tokens = recorder.tokens
        reason = "stop" if tokens[-1] in eos else "length"
        return Completion(ids, tokens, self.decode(tokens), reason, recorder.steps, scores)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Grammars over this model's tokens. ConfigError for a tokenizer that knows none."""
        from overspill.engine.grammar import GrammarCompiler

        return GrammarCompiler(self.tokenizer, self._text_config.vocab_size, self.eos_token_ids())

    def eos_token_ids(self) -> list[int]:
        """The tokens that end an answer; none where the model names none."""
        return self._special("eos_token_id")

    def _pad_token(self) -> int:
        return next(iter((*self._special("pad_token_id"), *self.eos_token_ids())), 0)

    def _special(self, name: str) -> list[int]:
        """As the generation config says, or the model's own config where that is silent."""
        for config in (self.generation_config, self._text_config):
            value = getattr(config, name, None)
            if value is not None:
                return [int(token) for token in (value if isinstance(value, list | tuple) else [value])]
        return []

    def refuse_unknown(self, ids: Sequence[int]) -> None:
        """ConfigError where one of `ids` is not in the model's vocabulary."""
        vocabulary = self._text_config.vocab_size
        unknown = [token for token in ids if not 0 <= token < vocabulary]
        if unknown:
            raise ConfigError(
                f"token id {unknown[0]} is not in the model's vocabulary of {vocabulary}",
                hint="give ids of this model's own tokenizer",
            )


def _cache_counter(device: Device) -> Callable[[Any, Any, Any], None]:
    """A forward hook that counts what the cache holds as such. It keeps the device alive, and no engine."""

    def count(module: Any, args: Any, output: Any) -> None:
        device.label(tensors_in(cache_of(output)), "kv_cache")

    return count


class _Recorder(BaseStreamer):  # type: ignore[misc]
    """Receives each new token from `generate`: keeps it, times its step, and passes whole text on."""

    def __init__(self, engine: Engine, on_text: OnText | None) -> None:
        self.tokens: list[int] = []
        self.steps: list[Step] = []
        self._on_text = on_text
        self._text = TextStream(engine.decode)
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
        self._traffic, self._positions = traffic, 1
        tokens = value.flatten().tolist()
        self.tokens += tokens
        self._show(self._text.feed(tokens) if self._on_text is not None else "")
        self._clock = time.perf_counter()  # what the receiver of the text takes is no part of a step

    def end(self) -> None:
        self._show(self._text.finish())

    def _show(self, text: str) -> None:
        if text and self._on_text is not None:
            self._on_text(text)
