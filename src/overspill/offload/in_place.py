"""Routed experts computed by the CPU where their weights lie, for a device that only sees the result.

Hidden states, chosen experts and their weights go to the host once, the weighted sum comes back once, both through
pinned staging; the host waits for the first, the device for the second, and nobody for anything else. Where the
architecture calls shared experts after the routed ones, the device computes them meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from overspill.machine.cpu_experts import CpuExperts, activation_of
from overspill.machine.device import Device, Transfer
from overspill.model.experts import ExpertBlock
from overspill.model.hf_experts import gate_of
from overspill.plan import Access
from overspill.plan.staging import STAGED_SETS, set_bytes


@dataclass
class BlockUse:
    """What a block of experts did so far: passes, tokens, and bytes of weights that were read for them."""

    calls: int = 0
    tokens: int = 0
    bytes: int = 0

    def add(self, tokens: int, nbytes: int) -> None:
        self.calls += 1
        self.tokens += tokens
        self.bytes += nbytes


class CpuSide:
    """The host's half, shared by all blocks: staging memory, and the thread that computes while the device does.

    `staging` begins with host memory for STAGED_SETS times twice the `set_bytes` of `blocks` and `rows` tokens.
    """

    def __init__(self, device: Device, staging: torch.Tensor, blocks: Sequence[ExpertBlock], rows: int) -> None:
        self.device = device
        self.rows = rows
        hidden_bytes, choices_bytes = set_bytes(blocks, rows)
        sizes = [hidden_bytes, choices_bytes, choices_bytes, hidden_bytes]
        pieces = staging[: STAGED_SETS * sum(sizes)].split(sizes * STAGED_SETS)
        self._sets = [_Staged(*pieces[begin : begin + len(sizes)]) for begin in range(0, len(pieces), len(sizes))]
        self._next = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="overspill-experts")

    def run(
        self,
        kernel: CpuExperts,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[torch.Tensor, int]:
        """(the weighted sum of `kernel`'s experts, [T, H] on the device; how many experts' weights were read for it).

        An index outside the experts adds nothing. `meanwhile` is run on this thread while the CPU computes.
        """
        result = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        hidden, index, weights = hidden.contiguous(), index.contiguous(), weights.contiguous()
        arrivals: list[Transfer] = []
        read = 0
        for begin in range(0, len(hidden), self.rows):
            span = slice(begin, begin + self.rows)
            staged = self._sets[self._next]
            self._next = (self._next + 1) % STAGED_SETS
            fetched = staged.fetch(self.device, hidden[span], index[span], weights[span])
            if meanwhile is None:
                with self.device.host_execution():
                    read += fetched.compute(kernel)
            else:
                computing = self._worker.submit(fetched.compute, kernel)
                meanwhile()
                meanwhile = None
                read += computing.result()
            arrivals.append(staged.send(self.device, result[span], fetched.out))
        for arrival in arrivals:
            arrival.wait()
        return result, read


@dataclass
class _Fetched:
    """A pass's inputs on their way to host memory, and the memory for its result."""

    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor
    transfers: Sequence[Transfer]

    def compute(self, kernel: CpuExperts) -> int:
        """Fill `out`; returns how many experts were read."""
        for transfer in self.transfers:
            transfer.join()
        kernel(self.hidden, self.index, self.weights, self.out)
        return sum(0 <= expert < kernel.experts for expert in set(self.index.flatten().tolist()))


@dataclass
class _Staged:
    """One set of staging memory, all of it bytes."""

    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor
    leaving: Transfer | None = None

    def fetch(self, device: Device, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> _Fetched:
        if self.leaving is not None:
            self.leaving.join()
        room = torch._C._DisableTorchDispatch  # views of host memory are no work of the device
        transfers = []
        landed = []
        for memory, source in ((self.hidden, hidden), (self.index, index), (self.weights, weights)):
            with room():
                there = memory[: source.nbytes]
                landed.append(there.view(source.dtype).view(source.shape))
                bytes_of = source.view(-1).view(torch.uint8)
            transfers.append(device.download(there, bytes_of))
        with room():
            out = self.out[: hidden.nbytes].view(hidden.dtype).view(hidden.shape)
        return _Fetched(landed[0], landed[1], landed[2], out, transfers)

    def send(self, device: Device, target: torch.Tensor, out: torch.Tensor) -> Transfer:
        with torch._C._DisableTorchDispatch():
            ends = target.view(-1).view(torch.uint8), out.view(-1).view(torch.uint8)
        self.leaving = device.transfer(*ends)
        return self.leaving


class InPlaceExperts:
    """One block of experts on the CPU; transformers calls it in the place of its own loop."""

    access = Access.IN_PLACE

    def __init__(self, block: ExpertBlock, side: CpuSide, kernel: CpuExperts, shared: SharedAhead | None) -> None:
        self.block = block
        self.use = BlockUse()
        self._side = side
        self._kernel = kernel
        self._shared = shared

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        meanwhile = None if self._shared is None else self._shared.ahead_of(hidden)
        result, read = self._side.run(self._kernel, hidden, index, weights, meanwhile)
        self.use.add(len(hidden), read * self.block.expert_bytes)
        return result


class SharedAhead:
    """A block's shared experts, computed while the CPU works instead of when the block asks for them.

    The block's own call gets what was computed, if it is about the same hidden states; where it called before, as some
    architectures do, nothing is done ahead.
    """

    def __init__(self, parent: nn.Module, shared: nn.Module) -> None:
        self._forward: Callable[..., torch.Tensor] = shared.forward
        self._asked = False
        self._given: torch.Tensor | None = None
        self._ahead: tuple[torch.Tensor, torch.Tensor] | None = None
        self.used = 0
        parent.register_forward_pre_hook(self._begin)
        shared.forward = self._answer

    def ahead_of(self, hidden: torch.Tensor) -> Callable[[], None] | None:
        """What computes the shared experts of `hidden` now; None where the block has them already, or where the
        routed experts were given something else than the block was (Nemotron-H's latent experts)."""
        if self._asked or self._given is None or not _same(hidden, self._given):
            return None

        def compute() -> None:
            self._ahead = (hidden, self._forward(hidden))

        return compute

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._asked, self._ahead = False, None
        self._given = args[0] if args and isinstance(args[0], torch.Tensor) else None

    def _answer(self, hidden: torch.Tensor, *others: Any) -> torch.Tensor:
        self._asked, ahead, self._ahead, self._given = True, self._ahead, None, None
        if ahead is not None and not others and _same(ahead[0], hidden):
            self.used += 1
            return ahead[1].view(*hidden.shape[:-1], -1)
        return self._forward(hidden, *others)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same memory, in whatever shape."""
    return (one.data_ptr(), one.numel(), one.dtype) == (other.data_ptr(), other.numel(), other.dtype)


def cpu_kernel(module: Any, tensors: Mapping[str, torch.Tensor]) -> CpuExperts:
    """The kernel of an experts module over host `tensors` by parameter name; it keeps them alive."""
    plain, gate = gate_of(module)
    activation = activation_of(plain) if plain is not None else None
    up = "gate_up_proj" if module.has_gate else "up_proj"
    return CpuExperts(
        tensors[up],
        tensors["down_proj"],
        gated=module.has_gate,
        transposed=module.is_transposed,
        up_bias=tensors.get(f"{up}_bias"),
        down_bias=tensors.get("down_proj_bias"),
        activation=activation,
        apply_gate=gate if activation is None else None,
    )
