"""What goes to a worker process and what comes back: plain values, written as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any, TypeVar

from pydantic import TypeAdapter

from overspill.offload.expert_slots import SlotCounts

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One run of one side. `document` is an offload document, `engine` fields of EngineSettings.

    `folder` takes RESULT, LOGITS or ERROR. Each prompt is token ids. `observe` names the experts module whose inputs
    and output in the first prompt's pass go into the logits file, under OBSERVED; None observes nothing.
    """

    model: str
    document: dict[str, Any]
    engine: dict[str, Any]
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    folder: str
    observe: str | None = None


RESULT, LOGITS, ERROR = "result.json", "logits.safetensors", "error.json"
OBSERVED = ("observed.hidden", "observed.index", "observed.weights", "observed.output")
"""What a pass gave an experts module (hidden states [T, H], chosen experts and their weights [T, K]) and got of it."""


@dataclass(frozen=True)
class Failure:
    """An OverspillError of a worker, to be raised again as what it was."""

    kind: str
    message: str
    hint: str | None


@dataclass(frozen=True)
class Pass:
    """One forward pass: `tokens` positions, its time, and what the link carried meanwhile against what was planned.

    `planned_low` and `planned_high` differ only where routing decides: several tokens may share their experts or not,
    and experts missing from the slots may be computed on the CPU, which sends a result. What came into expert slots is
    in neither: it depends on what they hold, and is counted for the whole answer (`Generation.slots`).
    """

    tokens: int
    seconds: float
    link_bytes: int
    stall_s: float
    planned_low: float
    planned_high: float


@dataclass(frozen=True)
class Generation:
    """One prompt's answer. `link_bytes` is the whole of it, from an idle link to an idle link.

    The first pass is over the prompt; each of the others decodes one token. `slots` is what happened to expert slots
    meanwhile, None where there are none. What came from files meanwhile, alignment included: `experts_read_bytes` for
    them, `layers_read_bytes` for layers on disk.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    passes: tuple[Pass, ...]
    link_bytes: int
    slots: SlotCounts | None = None
    experts_read_bytes: int = 0
    layers_read_bytes: int = 0

    @property
    def read_bytes(self) -> int:
        return self.experts_read_bytes + self.layers_read_bytes

    @property
    def decode(self) -> tuple[Pass, ...]:
        return self.passes[1:]


@dataclass(frozen=True)
class PlacedWeight:
    """One weight: what it is and why it is where it is (the plan), and where that really is (the ledger)."""

    name: str
    aliases: tuple[str, ...]
    stack: str | None
    layer: int | None
    role: str
    dtype: str
    bytes: int
    tier: str
    access: str
    reason: str
    address: int
    host_address: int | None


@dataclass(frozen=True)
class Allocation:
    """One block of memory: what was asked for and what the allocator took, in bytes."""

    purpose: str
    tier: str
    requested_bytes: int
    allocated_bytes: int
    pinned: bool


@dataclass(frozen=True)
class ExpertUse:
    """Routed experts of one layer that are `in_place` or `stream`: passes, tokens and bytes read in all answers."""

    path: str
    access: str
    expert_bytes: int
    calls: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class SlotState:
    """The expert slots when all was done: how many there are and are full, and everything since loading."""

    count: int
    held: int
    counts: SlotCounts


@dataclass(frozen=True)
class PassTime:
    """Seconds that a pass over so many sequences, a token each, was forecast to take, and what it waits for most."""

    tokens: int
    seconds: float
    limit: str


@dataclass(frozen=True)
class TimeForecast:
    """`origin` is the rates'. `step_s` is of a decode step as this comparison's answers have them; `batches` grow."""

    origin: str
    step_s: float
    batches: tuple[PassTime, ...]


@dataclass(frozen=True)
class Forecast:
    """What the plan said beforehand. Bytes, but for floors: seconds that a decoded token takes at least.

    The step's figures are for one token, which is what a decode step of a comparison computes. None: not known.
    `ways` says how weights off the device are used; none where none is. `placed` and `streamed` are the experts modules
    that the CPU computes and that go through slots; `stream_bytes` is what the slots would bring if all experts were
    alike, no part of `link_bytes`. A step reads `disk_bytes` of layers, at most `disk_most_bytes` with what lies beside
    them in the disk's blocks; an expert brings `expert_edges_bytes` besides at most. `other_kernels` says where kernels
    compute that do not compute a resident model. `times` is None where nothing is known of how fast the machine is.
    """

    backend: str | None
    ways: tuple[str, ...]
    offloaded_bytes: int
    saved_bytes: int
    weights_bytes: int
    mapped_bytes: int
    buffer_pool_bytes: int
    expert_slots_bytes: int
    kv_cache_bytes: int | None
    working_bytes: int | None
    host_bytes: int
    staging_bytes: int
    context_tokens: int
    sequences: int
    zero_copy_bytes: float
    prefetch_bytes: int
    in_place_bytes: int
    stream_bytes: float
    disk_bytes: int
    disk_most_bytes: int
    expert_edges_bytes: int
    zero_copy_floor_s: float | None
    prefetch_floor_s: float | None
    in_place_floor_s: float | None
    placed: tuple[str, ...]
    streamed: tuple[str, ...]
    slots: int
    policy: str | None
    other_kernels: str | None
    times: TimeForecast | None = None

    @property
    def pools_bytes(self) -> int:
        return self.buffer_pool_bytes + self.expert_slots_bytes

    @property
    def link_bytes(self) -> float:
        return self.zero_copy_bytes + self.prefetch_bytes + self.in_place_bytes

    @property
    def link_floor_s(self) -> float | None:
        floors = (self.zero_copy_floor_s, self.prefetch_floor_s, self.in_place_floor_s)
        known = [floor for floor in floors if floor is not None]
        return sum(known) if len(known) == len(floors) else None


@dataclass(frozen=True)
class Memory:
    """Device bytes as measured: held after loading, by purpose, and the most while generating.

    `kv_cache_peak_bytes` is what caches held, `peak_bytes` everything at once, reservations included.
    """

    held_bytes: dict[str, int]
    kv_cache_peak_bytes: int
    peak_bytes: int
    budget_bytes: int
    process_peak_bytes: int


@dataclass(frozen=True)
class RunResult:
    """All that one run measured, but for the logits, which lie in a file beside it."""

    device_kind: str
    device_name: str
    zero_copy_counted: bool
    plan: Forecast
    weights: tuple[PlacedWeight, ...]
    blocks: tuple[Allocation, ...]
    memory: Memory
    load_seconds: float
    read_bytes: int
    generations: tuple[Generation, ...]
    experts: tuple[ExpertUse, ...]
    slots: SlotState | None
    notes: tuple[str, ...]
    versions: dict[str, str]
    threads: int

    @property
    def offloaded_ledger_bytes(self) -> int:
        return sum(weight.bytes for weight in self.weights if weight.tier != "device")

    @property
    def mapped_ledger_bytes(self) -> int:
        """Weights that are used where they lie in mapped files."""
        return sum(weight.bytes for weight in self.weights if weight.tier == "disk" and weight.access == "in_place")

    @property
    def weights_and_pool_bytes(self) -> int:
        """Device bytes held after loading for weights, the prefetch ring and expert slots."""
        return sum(self.memory.held_bytes[purpose] for purpose in ("weights", "buffer_pool", "expert_slots"))

    @property
    def slot_counts(self) -> SlotCounts | None:
        """What happened to expert slots in all answers."""
        return total_counts([self])

    @property
    def longest_tokens(self) -> int:
        """The most tokens that a cache held: the last token of an answer is never fed back."""
        return max(len(g.prompt_ids) + len(g.token_ids) - 1 for g in self.generations)

    @property
    def step_read_bytes(self) -> float:
        """Read from disk for a pass, alignment included: the average of all, since reads run ahead of their pass."""
        read_bytes = sum(generation.read_bytes for generation in self.generations)
        return read_bytes / sum(len(generation.passes) for generation in self.generations)

    @property
    def token_ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple(generation.token_ids for generation in self.generations)

    @property
    def decode_seconds(self) -> list[float]:
        return [p.seconds for generation in self.generations for p in generation.decode]

    @property
    def decode_median_s(self) -> float | None:
        return median(self.decode_seconds) if self.decode_seconds else None

    @property
    def prompt_median_s(self) -> float:
        return median(generation.passes[0].seconds for generation in self.generations)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(least, median, most)."""
    return min(values), median(values), max(values)


def total_counts(runs: Sequence[RunResult]) -> SlotCounts | None:
    """What happened to expert slots in all answers of `runs`; None where there are no slots."""
    counted = [generation.slots for run in runs for generation in run.generations if generation.slots is not None]
    if not counted:
        return None
    return SlotCounts(**{f.name: sum(getattr(counts, f.name) for counts in counted) for f in fields(SlotCounts)})


def to_json(value: Any) -> bytes:
    """A dataclass of this file as JSON."""
    return TypeAdapter(type(value)).dump_json(value)


def from_json(kind: type[T], text: bytes) -> T:
    return TypeAdapter(kind).validate_json(text)
