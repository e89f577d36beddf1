"""The ways in which a block of routed experts is computed on a CPU: ours, torch's, kt-kernel's, on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from overspill.machine.arena import cut, map_memory
from overspill.machine.cpu_experts import Activation, CpuExperts
from overspill.machine.cpus import usable_cpus

OURS, EAGER, GROUPED, BATCHED, WIDENED, KT = "ours", "eager", "grouped_mm", "batched_mm", "widened", "kt"
_BATCHED_MOST_TOKENS = 8  # it copies an expert for each pair

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    experts: int = 128
    hidden: int = 2048
    intermediate: int = 768
    each: int = 8

    @property
    def expert_values(self) -> int:
        return 3 * self.hidden * self.intermediate


class Block:
    """One layer's experts, random, in memory that asks for huge pages: `memory` uint8 holds all of them."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        up_shape = (shape.experts, 2 * shape.intermediate, shape.hidden)
        down_shape = (shape.experts, shape.hidden, shape.intermediate)
        up_bytes = shape.experts * 2 * shape.intermediate * shape.hidden * dtype.itemsize
        self.shape = shape
        self.memory = map_memory(up_bytes + up_bytes // 2)
        some = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
        for part in self.memory.view(dtype).split(len(some)):
            part.copy_(some[: len(part)])
        self.up = cut(self.memory, 0, up_shape, dtype)
        self.down = cut(self.memory, up_bytes, down_shape, dtype)

    def ways(self, tokens: int) -> Iterator[tuple[str, Way]]:
        yield OURS, ours(self)
        yield from ((name, torch_experts(self, name)) for name in (EAGER, GROUPED))
        if tokens <= _BATCHED_MOST_TOKENS:
            yield BATCHED, torch_experts(self, BATCHED)
        if self.up.dtype != torch.float32:
            yield WIDENED, widened(self)


def ours(block: Block) -> Way:
    experts = CpuExperts(block.up, block.down, gated=True, activation=Activation.silu)

    def compute(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        experts(hidden, index, weights, out)
        return out

    return compute


def torch_experts(block: Block, implementation: str) -> Way:
    """What transformers runs under `experts_implementation`."""
    shape = block.shape
    config = SimpleNamespace(
        num_experts=shape.experts,
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        hidden_act="silu",
        _experts_implementation=implementation,
    )
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    module.gate_up_proj = nn.Parameter(block.up, requires_grad=False)
    module.down_proj = nn.Parameter(block.down, requires_grad=False)

    def compute(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            out: Tensor = module(hidden, index, weights.to(hidden.dtype))
        return out

    return compute


def widened(block: Block) -> Way:
    """float32 products, each expert's matrices first widened into memory that is used again."""
    up, down = torch.empty(block.up.shape[1:]), torch.empty(block.down.shape[1:])

    def compute(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        states, out = hidden.float(), torch.zeros(hidden.shape)
        for expert in index.unique().tolist():
            token, place = torch.where(index == expert)
            gate, factor = functional.linear(states[token], up.copy_(block.up[expert])).chunk(2, dim=-1)
            result = functional.linear(functional.silu(gate) * factor, down.copy_(block.down[expert]))
            out.index_add_(0, token, result * weights[token, place, None])
        return out.to(hidden.dtype)

    return compute


class Kt:
    """kt-kernel's AVX2 path for bfloat16, on a copy of `block` that it makes."""

    def __init__(self, ext: Any, block: Block, most_tokens: int) -> None:
        shape = block.shape
        pool = ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [usable_cpus()]
        self._infer = ext.CPUInfer(pool)
        on_gpu = torch.zeros(shape.experts, dtype=torch.bool)
        config = ext.moe.MOEConfig(shape.experts, shape.each, shape.hidden, shape.intermediate, on_gpu.data_ptr())
        config.layer_idx, config.pool, config.max_len = 0, self._infer.backend_, most_tokens
        config.gate_projs = [[up[: shape.intermediate].data_ptr() for up in block.up]]
        config.up_projs = [[up[shape.intermediate :].data_ptr() for up in block.up]]
        config.down_projs = [[down.data_ptr() for down in block.down]]
        config.gate_scales = config.up_scales = config.down_scales = [[0] * shape.experts]
        self._moe = ext.moe.AVX2BF16_MOE(config)
        order = torch.arange(shape.experts)
        self._infer.submit(self._moe.load_weights_task(order.data_ptr()))
        self._infer.sync()
        self._kept = (on_gpu, config)

    @classmethod
    def of(cls, block: Block, most_tokens: int) -> Kt | None:
        """None where kt-kernel is not installed."""
        with suppress(ImportError):
            from kt_kernel import kt_kernel_ext

            return cls(kt_kernel_ext, block, most_tokens)
        return None

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out, count = torch.empty_like(hidden), torch.tensor([len(hidden)], dtype=torch.int32)
        addresses = (index.data_ptr(), weights.data_ptr(), hidden.data_ptr(), out.data_ptr())
        self._infer.submit(self._moe.forward_task(count.data_ptr(), index.shape[1], *addresses, False))
        self._infer.sync()
        return out


def choices(shape: Shape, tokens: int, number: int) -> Tensor:
    """int64 [tokens, each]; one token's go round all experts, so that none is asked for again while a cache has it."""
    if tokens == 1:
        first = number * shape.each
        return torch.arange(first, first + shape.each).remainder_(shape.experts).unsqueeze(0)
    return torch.stack([torch.randperm(shape.experts)[: shape.each] for _ in range(tokens)])


def compared(found: Sequence[Tensor], expected: Tensor) -> float:
    """The largest normalised mean square error."""
    return max(
        ((one.float() - expected.float()).square().sum() / expected.float().square().sum()).item() for one in found
    )
