"""Routed experts computed on the CPU, on their weights as they lie in host memory (kernels/).

Letters in shapes: T tokens, K experts chosen for each, E experts, H hidden size, I intermediate size of an expert.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from transformers import activations

from overspill import _kernels
from overspill._kernels import Activation
from overspill.errors import ConfigError
from overspill.machine.cpus import usable_cpus

__all__ = ["Activation", "CpuExperts", "activation_of", "instruction_set"]

INSTRUCTION_SET_VARIABLE = "OVERSPILL_KERNELS"
_TYPES = {
    torch.float32: _kernels.Type.float32,
    torch.bfloat16: _kernels.Type.bfloat16,
    torch.float16: _kernels.Type.float16,
}
_MOST_TOKENS = 1024  # computed at once: what is kept between the two products is 4 K I bytes for each


class CpuExperts:
    """One block of routed experts, computed where its weights lie. The tensors are kept, never copied or converted.

    `up`: [E, 2 I, H] with the gate's rows first, or [E, I, H] where not `gated`; `down`: [E, H, I]. `transposed`:
    [E, H, 2 I] or [E, H, I], and [E, I, H]. `up_bias`: [E, 2 I] or [E, I], `down_bias`: [E, H]. All contiguous, on the
    host, of one dtype: float32, bfloat16 or float16. What they hold may change between calls.

    What lies between the two products is either `activation`, computed with them, or `apply_gate`, which gets the up
    products float32 [N, 2 I] (with their bias) of all N pairs of a token and an expert and returns float32 [N, I]; it
    must take each pair by itself.

    Sums are kept in float32 and rounded once. A token's result does not depend on what is computed beside it, nor on
    the number of threads (usable_cpus() unless given): not by one bit. It may differ between instruction sets.
    """

    def __init__(
        self,
        up: Tensor,
        down: Tensor,
        *,
        gated: bool,
        transposed: bool = False,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activation: Activation | None = None,
        apply_gate: Callable[[Tensor], Tensor] | None = None,
        threads: int | None = None,
    ) -> None:
        assert (activation is None) != (apply_gate is None), "either an activation or a function in its place"
        experts, hidden, intermediate = down.shape if not transposed else (down.shape[0], down.shape[2], down.shape[1])
        rows = 2 * intermediate if gated else intermediate
        assert up.shape == ((experts, hidden, rows) if transposed else (experts, rows, hidden)), "up beside down"
        assert up_bias is None or up_bias.shape == (experts, rows), "a bias for every row of up"
        assert down_bias is None or down_bias.shape == (experts, hidden), "a bias for every row of down"
        self.tensors = [tensor for tensor in (up, down, up_bias, down_bias) if tensor is not None]
        for tensor in self.tensors:
            assert tensor.dtype == up.dtype, "one dtype"
            assert tensor.is_contiguous(), "weights are read as they lie"
            assert tensor.device.type == "cpu", "weights on the host"
        self.experts, self.hidden, self.rows, self.intermediate = experts, hidden, rows, intermediate
        self.threads = threads or usable_cpus()
        self._activation = activation
        self._apply_gate = apply_gate
        self._path = _path(os.environ.get(INSTRUCTION_SET_VARIABLE))
        self._kernel = _kernels.Experts(
            up.data_ptr(),
            down.data_ptr(),
            up_bias.data_ptr() if up_bias is not None else 0,
            down_bias.data_ptr() if down_bias is not None else 0,
            _TYPES[up.dtype],
            experts,
            hidden,
            intermediate,
            gated,
            transposed,
        )

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor, out: Tensor) -> None:
        """Write into `out` [T, H] the weighted sum of what each token's experts make of `hidden` [T, H].

        `hidden` and `out` are contiguous and of one of the three dtypes, whatever that of the weights. `index`: int64
        [T, K], in any order and with repetitions; a number outside [0, E) stands for no expert. `weights`: [T, K] of
        any floating dtype. A token's experts are added in ascending order.

        Calls from several threads are safe and run one after the other. The interpreter's lock is not held.
        """
        assert hidden.shape[1:] == (self.hidden,), "hidden states of these experts"
        assert (out.shape, out.dtype) == (hidden.shape, hidden.dtype), "out like hidden"
        assert hidden.is_contiguous(), "hidden states are read as they lie"
        assert out.is_contiguous(), "out is written as it lies"
        assert index.dtype == torch.int64, "experts by number"
        assert index.shape == weights.shape, "a weight for each choice"
        assert len(index) == len(hidden), "choices for each token"
        index, weights = index.contiguous(), weights.to(torch.float32).contiguous()
        for first in range(0, len(hidden), _MOST_TOKENS):
            some = slice(first, first + _MOST_TOKENS)
            self._compute(hidden[some], index[some], weights[some], out[some])

    def _compute(self, hidden: Tensor, index: Tensor, weights: Tensor, out: Tensor) -> None:
        tokens, each = index.shape
        kind = _TYPES[hidden.dtype]
        if self._activation is not None:
            self._kernel.compute(
                self._path,
                self._activation,
                index.data_ptr(),
                weights.data_ptr(),
                tokens,
                each,
                hidden.data_ptr(),
                out.data_ptr(),
                kind,
                self.threads,
            )
            return
        assert self._apply_gate is not None
        pairs = int(((index >= 0) & (index < self.experts)).sum())
        products = torch.empty(pairs, self.rows, dtype=torch.float32)
        self._kernel.compute_up(
            self._path, index.data_ptr(), tokens, each, hidden.data_ptr(), kind, products.data_ptr(), self.threads
        )
        gated = self._apply_gate(products).contiguous()
        assert gated.shape == (pairs, self.intermediate), "a row for each pair"
        assert gated.dtype == torch.float32, "float32 in, float32 out"
        self._kernel.compute_down(
            self._path,
            index.data_ptr(),
            weights.data_ptr(),
            tokens,
            each,
            gated.data_ptr(),
            out.data_ptr(),
            kind,
            self.threads,
        )


def activation_of(module: nn.Module) -> Activation | None:
    """The kernels' own for what transformers puts at `act_fn`; None where they have none."""
    match module:
        case nn.SiLU() | activations.SiLUActivation():
            return Activation.silu
        case (
            activations.GELUTanh()
            | activations.NewGELUActivation()
            | activations.FastGELUActivation()
            | activations.AccurateGELUActivation()
        ):
            return Activation.gelu_tanh
        case activations.GELUActivation():
            return Activation.gelu
        case nn.GELU():
            return Activation.gelu if module.approximate == "none" else Activation.gelu_tanh
        case nn.ReLU():
            return Activation.relu
        case activations.ReLUSquaredActivation():
            return Activation.relu2
    return None


def instruction_set() -> str:
    """What the kernels run on: "avx512", "avx2" or "portable"; the environment variable OVERSPILL_KERNELS chooses.

    Raises ConfigError for a name that is none of these or that this processor lacks.
    """
    return _path(os.environ.get(INSTRUCTION_SET_VARIABLE)).name


@cache
def _path(wanted: str | None) -> _kernels.Path:
    found = {name: path for name in _kernels.path_names() if (path := _kernels.path_named(name)) is not None}
    if wanted is not None and wanted not in found:
        known = wanted in _kernels.path_names()
        raise ConfigError(
            f"{INSTRUCTION_SET_VARIABLE}={wanted}: "
            + ("this processor has no such instructions" if known else "no instruction set of the kernels"),
            hint=f"one of {', '.join(found)}, or unset it for the fastest",
        )
    return found[wanted or next(iter(found))]
