"""A model's weights as vLLM holds them, and which of them its offloaders move.

vLLM fuses what transformers keeps apart: q, k and v are one tensor, gate and up another, all experts of a layer two.
Its rules (whole dotted segments of the name within the layer, declaration order, a budget that is tested before each
tensor) are those of vLLM 0.33.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from overspill.advice.vllm_ranks import rank_bytes
from overspill.config.selectors import spellings
from overspill.model.weights import ModelMap, Role, Weight


@dataclass(frozen=True)
class VllmTensor:
    """One parameter of vLLM's: `name` is relative to its layer, `weights` are ours that it is made of."""

    layer: int
    name: str
    weights: tuple[Weight, ...]

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    @property
    def routed(self) -> bool:
        return any(weight.role is Role.ROUTED_EXPERT for weight in self.weights)

    @property
    def key(self) -> tuple[str, tuple[tuple[int, ...], ...], str]:
        """Layers' tensors of one key share buffers in vLLM's static pool."""
        return self.name, tuple(weight.shape for weight in self.weights), str(self.weights[0].dtype)

    def step_bytes(self, tokens: int) -> float:
        """Bytes that a step over `tokens` tokens reads of it where it lies; expected, for experts."""
        return sum(weight.step_bytes(tokens) for weight in self.weights)

    def rank_bytes(self, ranks: int) -> int:
        """What one of `ranks` tensor-parallel ranks holds."""
        return sum(rank_bytes(weight, ranks) for weight in self.weights)


def vllm_tensors(model: ModelMap) -> tuple[VllmTensor, ...]:
    """What vLLM's offloaders can reach, in the order in which they meet it: the parameters of the decoder's layers."""
    layers: dict[int, list[Weight]] = {}
    for weight in model:
        if weight.name.stack == model.decoder.path and weight.role is not Role.BUFFER and weight.nbytes:
            assert weight.name.layer is not None
            layers.setdefault(weight.name.layer, []).append(weight)
    return tuple(tensor for layer in sorted(layers) for tensor in _experts_last(_fused(layer, layers[layer])))


def _fused(layer: int, weights: Iterable[Weight]) -> list[VllmTensor]:
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(vllm_name(weight.name.relative or ""), []).append(weight)
    tensors = []
    for name, members in groups.items():
        alone = len(members) == 1 and members[0].role is not Role.ROUTED_EXPERT  # nothing to fuse it with
        tensors.append(VllmTensor(layer, (members[0].name.relative or "") if alone else name, tuple(members)))
    return tensors


def vllm_name(relative: str) -> str:
    """How vLLM 0.33 calls the parameter that holds the weight of this name within its layer."""
    alike = {name for name in spellings(relative) if ("block_sparse_moe" in name) == ("block_sparse_moe" in relative)}
    return min(alike, key=lambda name: (".routed_experts." not in name, name == relative, name))


def _experts_last(tensors: list[VllmTensor]) -> list[VllmTensor]:
    """vLLM makes router and shared experts of a block before its routed experts."""
    placed = list(tensors)
    for block in {tensor.name.partition("experts.")[0] for tensor in tensors if tensor.routed}:
        slots = [at for at, tensor in enumerate(placed) if tensor.name.startswith(block)]
        members = sorted((placed[at] for at in slots), key=lambda tensor: tensor.routed)
        for at, tensor in zip(slots, members, strict=True):
            placed[at] = tensor
    return placed


def selects(selector: str, name: str) -> bool:
    """vLLM's rule: a run of whole dotted segments of the name, nothing else."""
    return f".{selector}." in f".{name}."


def taken_by_uva(tensors: Iterable[VllmTensor], budget: int, selectors: Collection[str] = ()) -> tuple[VllmTensor, ...]:
    """What a budget moves. It is tested before each tensor, so the last one may overshoot it."""
    taken: list[VllmTensor] = []
    total = 0
    for tensor in tensors:
        if total >= budget:
            break
        if not selectors or any(selects(selector, tensor.name) for selector in selectors):
            taken.append(tensor)
            total += tensor.nbytes
    return tuple(taken)


def taken_by_prefetch(
    tensors: Iterable[VllmTensor], size: int, number: int, selectors: Collection[str] = ()
) -> tuple[VllmTensor, ...]:
    """What the group rule moves."""
    return tuple(
        tensor
        for tensor in tensors
        if tensor.layer % size >= size - number
        and (not selectors or any(selects(selector, tensor.name) for selector in selectors))
    )


def selectors_for(wanted: Collection[str], names: Collection[str], routed: Collection[str]) -> tuple[str, ...]:
    """Selectors of vLLM's that match the `wanted` of `names`, and of the others as few as can be; none for all.

    Where the wanted are routed experts alone it is `experts`, which takes their scales as well.
    """
    if not wanted or set(wanted) == set(names):
        return ()
    if set(wanted) <= set(routed) and all(selects("experts", name) for name in wanted):
        return ("experts",)
    left = set(wanted)
    chosen: list[str] = []
    while left:
        found = {run: {name for name in names if selects(run, name)} for name in left for run in _runs(name)}
        exact = {run: hits & left for run, hits in found.items() if hits <= set(wanted)}
        run, hits = min(
            (exact or {name: {name} for name in left}).items(),
            key=lambda item: (-len(item[1]), item[0].count("."), len(item[0]), item[0]),
        )
        chosen.append(run)
        left -= hits
    return tuple(sorted(chosen))


def _runs(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[a:b]) for a in range(len(parts)) for b in range(a + 1, len(parts) + 1)]


def rounded_bytes(nbytes: int) -> int:
    """What torch's pinned allocator, which vLLM uses, takes for one tensor: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def host_bytes(taken: Sequence[VllmTensor], ranks: int, *, rounded: bool) -> int:
    """Host memory of the moved tensors of all ranks."""
    sizes = [tensor.rank_bytes(ranks) for tensor in taken]
    return ranks * sum(map(rounded_bytes, sizes) if rounded else sizes)


def pool_bytes(taken: Sequence[VllmTensor], step: int, ranks: int) -> int:
    """vLLM's static pools for prefetched tensors, of all ranks: `step` buffers for every name and shape."""
    unique = {tensor.key: tensor.rank_bytes(ranks) for tensor in taken}
    return ranks * step * sum(unique.values())
