"""Routed experts that come through slots: the ones in demand stay on the device, the others pass through.

For each pass over a block: look up what the router chose; bring what is missing, or have the CPU compute it; run the
architecture's own loop over the experts, each read from its slot; then bring what the next block will probably choose,
by running its router on the present hidden states. A pass that chooses most of a block's experts, as a prompt does,
streams what it misses through two slots of its own and evicts nothing: for a scan over all experts the share that is
held is the hit rate, whatever a policy of replacement does. Slots before a disk are full from the start.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from overspill.errors import CheckpointError
from overspill.machine.cpu_experts import CpuExperts
from overspill.machine.device import Device
from overspill.model.experts import ExpertBlock
from overspill.model.hf_experts import original_forward, weights_from
from overspill.offload.expert_costs import ExpertCosts, split
from overspill.offload.expert_slots import Admission, ExpertSlots, Key, SlotCounts
from overspill.offload.expert_sources import ExpertSource
from overspill.offload.fetches import Fetch
from overspill.offload.in_place import BlockUse, CpuSide
from overspill.offload.loader import Progress
from overspill.plan import Access
from overspill.plan.slots import SWEEP_SLOTS, Slots

_PROMOTED = 2
"""So many experts that the CPU computed are brought into slots after a block, at the most."""


@dataclass
class CpuHelp:
    """What it takes to compute missing experts on the CPU: where, a kernel for each block, and what it costs.

    `costs` are those of the first block's experts, which the others are taken to be alike; None where nothing is to be
    weighed.
    """

    side: CpuSide
    kernels: Sequence[CpuExperts]
    costs: ExpertCosts | None


class ExpertStream:
    """The slots of all streamed blocks. `pool` is device memory of `slots.pool_bytes`, owned by its block."""

    def __init__(
        self, slots: Slots, pool: torch.Tensor, source: ExpertSource, device: Device, help_: CpuHelp | None
    ) -> None:
        self.slots = slots
        self.device = device
        self.source = source
        self.help = help_
        self.cache = ExpertSlots(slots.count)
        self._rooms: list[torch.Tensor] = list(pool.split(slots.slot_bytes))
        self._arriving: dict[Key, Fetch] = {}

    @property
    def counts(self) -> SlotCounts:
        return self.cache.counts

    def install(self, model: nn.Module, routers: Collection[str]) -> list[StreamedExperts]:
        """What computes each block, in order; each knows the next one's router, if that is one of `routers`.

        `routers` are the paths of those that may be read while their layer does not run.
        """
        made = []
        following = [*self.slots.blocks[1:], None]
        for number, (block, after) in enumerate(zip(self.slots.blocks, following, strict=True)):
            guess = None
            if after is not None and after.router is not None and after.router in routers:
                guess = _Guess(model.get_submodule(after.router), after)
            made.append(StreamedExperts(self, number, block, model.get_submodule(block.path), guess))
        return made

    def fill(self, progress: Progress | None = None) -> int:
        """Load as many experts as there are slots, of each block alike; returns their bytes. Raises CheckpointError.

        They are spread over their block: a pass over nearly all of its experts, in their order, then has something to
        compute between its reads.
        """
        share, more = divmod(self.slots.count, len(self.slots.blocks))
        arriving = []
        for number, block in enumerate(self.slots.blocks):
            held = min(block.experts, share + (number < more))
            keys = [(number, index * block.experts // held) for index in range(held)]
            arriving += [(self.bring(key, self.cache.load(key)), block.expert_bytes) for key in keys]
        try:
            for fetch, nbytes in arriving:
                fetch.wait()
                if progress is not None:
                    progress(nbytes)
        finally:  # where one failed the others must not land in memory that is given back
            for fetch, _ in arriving:
                fetch.settle()
        return sum(nbytes for _, nbytes in arriving)

    def room(self, number: int) -> torch.Tensor:
        """The bytes of slot `number`."""
        return self._rooms[number]

    def bring(self, key: Key, room: int) -> Fetch:
        """Begin to fill slot `room` with an expert."""
        number, expert = key
        block = self.slots.blocks[number]
        self.counts.bytes += block.expert_bytes
        return self.source.start(block, expert, self._rooms[room])

    def admit(self, key: Key, keep: set[Key], *, only_if_better: bool = False) -> bool:
        """Bring an expert into the cache, if there is a slot for it."""
        admission = self.cache.admit(key, keep, only_if_better=only_if_better)
        if admission is not None:
            self._begin(key, admission)
        return admission is not None

    def prefetch(self, keys: Sequence[Key], keep: set[Key]) -> None:
        for key in keys:
            if key not in self.cache and (admission := self.cache.prefetch(key, keep)) is not None:
                self._begin(key, admission)

    def _begin(self, key: Key, admission: Admission) -> None:
        """Bring an expert into its slot, once nothing else is on its way there."""
        earlier = None if admission.evicted is None else self._arriving.pop(admission.evicted, None)
        if earlier is not None:
            earlier.settle()
        self._arriving[key] = self.bring(key, admission.slot)

    def arrived(self, key: Key) -> None:
        """Wait for an expert that is in a slot."""
        fetch = self._arriving.pop(key, None)
        if fetch is None:
            return
        try:
            self.wait(fetch)
        except CheckpointError:
            self.cache.forget(key)
            self._forget_failed()
            raise

    def _forget_failed(self) -> None:
        """After a read that failed: what failed beside it is not to fail a later pass."""
        for key, fetch in list(self._arriving.items()):
            if not fetch.settle():
                del self._arriving[key]
                self.cache.forget(key)

    def wait(self, fetch: Fetch) -> None:
        begun = time.perf_counter()
        fetch.wait()
        self.counts.stall_s += time.perf_counter() - begun

    def sweep_room(self, number: int) -> int:
        return self.slots.count + number % SWEEP_SLOTS


class StreamedExperts:
    """One block of experts behind slots; transformers calls it in the place of its own loop."""

    access = Access.STREAM

    def __init__(
        self,
        stream: ExpertStream,
        number: int,
        block: ExpertBlock,
        module: nn.Module,
        guess: _Guess | None,
    ) -> None:
        self.block = block
        self.use = BlockUse()
        self.stream = stream
        self.number = number
        self._module: Any = module
        self._loop = original_forward(module)
        self._guess = guess
        self._shapes = {attribute: tuple(weight.shape[1:]) for attribute, weight in block.weights.items()}

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        stream, number = self.stream, self.number
        if number == 0:
            stream.cache.next_pass()
        chosen, guessed = self._choices(hidden, index)
        keys = {expert: (number, expert) for expert in sorted(chosen)}
        missed = [expert for expert, key in keys.items() if not stream.cache.use(key)]
        keep = set(keys.values())
        on_cpu = self._for_cpu(missed, chosen)
        fetched = [expert for expert in missed if expert not in on_cpu]
        sweep = []
        for expert in fetched:
            if (self._is_step(chosen) or stream.cache.free) and stream.admit(keys[expert], keep):
                stream.counts.fetched += 1
            else:
                sweep.append(expert)
        result = self._compute(hidden, index, weights, sweep, on_cpu)
        stream.counts.computed += len(on_cpu)
        self.use.add(len(hidden), len(chosen) * self.block.expert_bytes)
        promoted = sorted(on_cpu, key=lambda expert: (-chosen[expert], expert))[:_PROMOTED]
        for expert in promoted:
            if stream.admit(keys[expert], keep, only_if_better=True):
                stream.counts.promoted += 1
        coming = [(number + 1, expert) for expert in guessed]
        stream.prefetch(coming, keep | set(coming))
        return result

    def _choices(self, hidden: torch.Tensor, index: torch.Tensor) -> tuple[Counter[int], list[int]]:
        """How many tokens chose each expert, and what the next block will probably choose; the device is asked once."""
        asked = index.flatten()
        chosen = asked.numel()
        if self._guess is not None and 2 * chosen <= min(self.block.experts, self.stream.slots.count):
            asked = torch.cat((asked, self._guess(hidden)))
        told = asked.tolist()
        found = Counter(expert for expert in told[:chosen] if 0 <= expert < self.block.experts)
        return found, sorted(set(told[chosen:]))

    def _is_step(self, chosen: Counter[int]) -> bool:
        """Whether what was chosen is few enough to be kept; more would push out what other blocks have."""
        return 2 * len(chosen) <= min(self.block.experts, self.stream.slots.count)

    def _for_cpu(self, missed: Sequence[int], chosen: Counter[int]) -> set[int]:
        help_ = self.stream.help
        if help_ is None:
            return set()
        if help_.costs is None:
            return set(missed)
        return split([(expert, chosen[expert]) for expert in missed], help_.costs)

    def _compute(
        self,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        sweep: Sequence[int],
        on_cpu: set[int],
    ) -> torch.Tensor:
        if not on_cpu:
            return self._on_device(hidden, index, weights, sweep)
        help_ = self.stream.help
        assert help_ is not None
        cpu = torch.zeros(self.block.experts, dtype=torch.bool)
        cpu[list(on_cpu)] = True
        theirs = cpu.to(index.device)[index]
        results: list[torch.Tensor] = []

        def meanwhile() -> None:
            rows = (~theirs).any(-1).nonzero().flatten()
            if len(rows):
                rest = _without(index[rows], weights[rows], theirs[rows])
                computed = self._on_device(hidden[rows], *rest, sweep)
                results.append(torch.zeros_like(hidden).index_copy_(0, rows, computed))

        outside = index.masked_fill(~theirs, self.block.experts)
        result, _ = help_.side.run(help_.kernels[self.number], hidden, outside, weights, meanwhile)
        return result if not results else result + results[0]

    def _on_device(
        self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, sweep: Sequence[int]
    ) -> torch.Tensor:
        with _Reader(self, sweep) as reader:
            tables = {attribute: _Table(reader, attribute) for attribute in self._shapes}
            with weights_from(self._module, tables):
                return self._loop(hidden, index, weights)

    def view(self, attribute: str, expert: int, room: torch.Tensor) -> torch.Tensor:
        """One weight of `expert` in the slot that holds it."""
        weight = self.block.weights[attribute]
        return room[self.stream.slots.span(weight, expert)].view(weight.dtype).view(self._shapes[attribute])


class _Reader:
    """Hands experts out in the order in which the loop comes for them, ascending, and streams those of `sweep`.

    Two of them are on their way or in use; when the loop comes for the next expert, it is done with the one before.
    """

    def __init__(self, block: StreamedExperts, sweep: Sequence[int]) -> None:
        self._block = block
        self._stream = block.stream
        self._waiting = list(reversed(sweep))
        self._streamed: dict[int, tuple[int, Fetch]] = {}
        self._started = 0
        self._current: int | None = None
        self._room: torch.Tensor = block.stream.room(0)
        for _ in range(SWEEP_SLOTS):
            self._start()

    def __call__(self, attribute: str, expert: int) -> torch.Tensor:
        if expert != self._current:
            self._turn_to(expert)
        return self._block.view(attribute, expert, self._room)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Of a pass that broke off nothing may land later, when its slot is another expert's."""
        if kind is not None:
            for _, fetch in self._streamed.values():
                fetch.settle()

    def _turn_to(self, expert: int) -> None:
        number, stream = self._block.number, self._stream
        if self._current in self._streamed:
            del self._streamed[self._current]
            self._start()
        self._current = expert
        if expert in self._streamed:
            room, fetch = self._streamed[expert]
            stream.wait(fetch)
        else:
            room = stream.cache.slot((number, expert))
            stream.arrived((number, expert))
        self._room = stream.room(room)

    def _start(self) -> None:
        if self._waiting:
            expert = self._waiting.pop()
            room = self._stream.sweep_room(self._started)
            self._started += 1
            self._stream.counts.streamed += 1
            self._streamed[expert] = (room, self._stream.bring((self._block.number, expert), room))


class _Table:
    """Stands where a parameter [experts, ...] stood, for one pass: an expert's part is read from its slot."""

    def __init__(self, reader: _Reader, attribute: str) -> None:
        self._reader = reader
        self._attribute = attribute

    def __getitem__(self, expert: Any) -> torch.Tensor:
        return self._reader(self._attribute, int(expert))


class _Guess:
    """What the next block will probably choose: its router, run on what this block was given."""

    def __init__(self, router: nn.Module, block: ExpertBlock) -> None:
        self._router: Any = router
        self._block = block

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Expert numbers, int64 [T * K]."""
        weight: torch.Tensor = self._router.weight
        scores = nn.functional.linear(hidden.to(weight.dtype), weight)
        bias = getattr(self._router, "bias", None)
        if bias is not None and bias.shape == scores.shape[-1:]:
            scores = scores + bias
        return scores.topk(self._block.top_k, dim=-1).indices.flatten()


def _without(index: torch.Tensor, weights: torch.Tensor, elsewhere: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices for the device alone: those made `elsewhere` become the token's first other one, with no weight.

    Every token has one. Not an index outside the experts: some architectures' loops would read it; nor an expert that
    the token did not choose: what that makes of it need not be finite.
    """
    own = index.gather(-1, (~elsewhere).int().argmax(-1, keepdim=True))
    return torch.where(elsewhere, own, index), weights.masked_fill(elsewhere, 0)
