"""The kernels against float64, on every instruction set that this processor has."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from overspill import _kernels
from overspill.errors import ConfigError
from overspill.machine.cpu_experts import (
    INSTRUCTION_SET_VARIABLE,
    Activation,
    CpuExperts,
    activation_of,
    instruction_set,
)

PATHS = [name for name in _kernels.path_names() if _kernels.path_named(name) is not None]
# What rounding to a dtype once costs, and for the products their order.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
DTYPES = list(TOLERANCES)
ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.silu: functional.silu,
    Activation.gelu: functional.gelu,
    Activation.gelu_tanh: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.relu: functional.relu,
    Activation.relu2: lambda x: functional.relu(x).square(),
}


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(INSTRUCTION_SET_VARIABLE, request.param)
    return request.param


@contextmanager
def using(path: str) -> Iterator[None]:
    """For a property, whose examples a fixture would outlive."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(INSTRUCTION_SET_VARIABLE, path)
        yield


@dataclass
class Case:
    """Random experts and hidden states, and what they come to in float64."""

    hidden: Tensor
    index: Tensor
    weights: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    gated: bool
    transposed: bool

    @classmethod
    def random(
        cls,
        tokens: int,
        each: int,
        experts: int,
        hidden: int,
        intermediate: int,
        *,
        weights: torch.dtype = torch.float32,
        states: torch.dtype = torch.float32,
        gated: bool = True,
        transposed: bool = False,
        biased: bool = False,
        seed: int = 0,
    ) -> Case:
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random)

        rows = 2 * intermediate if gated else intermediate
        up = normal(experts, rows, hidden) / hidden**0.5
        down = normal(experts, hidden, intermediate) / intermediate**0.5
        if transposed:
            up, down = up.mT.contiguous(), down.mT.contiguous()
        return cls(
            normal(tokens, hidden).to(states),
            torch.randint(0, experts, (tokens, each), generator=random),
            torch.rand(tokens, each, generator=random),
            up.to(weights),
            down.to(weights),
            normal(experts, rows).to(weights) if biased else None,
            normal(experts, hidden).to(weights) if biased else None,
            gated,
            transposed,
        )

    def experts(self, activation: Activation | None = Activation.silu, **others: object) -> CpuExperts:
        return CpuExperts(
            self.up,
            self.down,
            gated=self.gated,
            transposed=self.transposed,
            up_bias=self.up_bias,
            down_bias=self.down_bias,
            activation=activation,
            **others,
        )

    def computed(self, experts: CpuExperts | None = None, tokens: slice = slice(None)) -> Tensor:
        hidden = self.hidden[tokens].contiguous()
        out = torch.full_like(hidden, torch.nan)
        (experts or self.experts())(hidden, self.index[tokens], self.weights[tokens], out)
        return out

    def expected(self, gate: Callable[[Tensor], Tensor]) -> Tensor:
        """`gate` maps up products [2 I] or [I] to [I]."""
        out = torch.zeros(self.hidden.shape, dtype=torch.float64)
        for token, state in enumerate(self.hidden.double()):
            for expert, weight in zip(self.index[token].tolist(), self.weights[token].double(), strict=True):
                if not 0 <= expert < len(self.up):
                    continue
                up, down = self.up[expert].double(), self.down[expert].double()
                products = (up.mT if self.transposed else up) @ state
                if self.up_bias is not None:
                    products = products + self.up_bias[expert].double()
                result = (down.mT if self.transposed else down) @ gate(products)
                if self.down_bias is not None:
                    result = result + self.down_bias[expert].double()
                out[token] += weight * result
        return out

    def gate(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        function = ACTIVATIONS[activation]
        if not self.gated:
            return function
        return lambda products: function(products.chunk(2)[0]) * products.chunk(2)[1]


def assert_close(found: Tensor, expected: Tensor) -> None:
    scale = expected.abs().max().clamp(min=1e-3) if expected.numel() else 1
    assert ((found.double() - expected).abs() <= TOLERANCES[found.dtype] * scale).all()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = st.one_of(st.integers(1, 40), st.sampled_from([1, 15, 16, 17, 31, 32, 33, 64, 100, 257]))
    experts = draw(st.integers(1, 6))
    case = Case.random(
        draw(st.integers(0, 30)),
        draw(st.integers(1, 4)),
        experts,
        draw(size),
        draw(size),
        weights=draw(st.sampled_from(DTYPES)),
        states=draw(st.sampled_from(DTYPES)),
        gated=draw(st.booleans()),
        transposed=draw(st.booleans()),
        biased=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )
    choice = draw(st.sampled_from(["random", "all the same", "twice the same", "some nobody"]))
    if choice == "all the same":
        case.index[:] = draw(st.integers(0, experts - 1))
    elif choice == "twice the same":
        case.index[:, -1] = case.index[:, 0]
    elif choice == "some nobody":
        case.index[::2, 0] = draw(st.sampled_from([experts, -1, 2**40]))
    return case


@settings(max_examples=200)
@given(case=cases(), activation=st.sampled_from(list(ACTIVATIONS)), number=st.integers(0, 9))
def test_any_shape_is_what_float64_says(case: Case, activation: Activation, number: int) -> None:
    with using(PATHS[number % len(PATHS)]):
        assert_close(case.computed(case.experts(activation)), case.expected(case.gate(activation)))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("weights", DTYPES)
def test_every_instruction_set_takes_every_kind_of_weights(path: str, weights: torch.dtype, transposed: bool) -> None:
    case = Case.random(9, 3, 4, 130, 70, weights=weights, transposed=transposed, biased=True)
    assert_close(case.computed(), case.expected(case.gate(Activation.silu)))


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activations_over_their_whole_range(path: str, activation: Activation) -> None:
    values = torch.cat([torch.linspace(-120, 120, 481), torch.tensor([0.0, -0.0, 1e-6, -1e-6])])
    count = len(values)
    up = torch.zeros(1, count, count)
    up[0, :, 0] = values
    hidden, out = torch.zeros(1, count), torch.empty(1, count)
    hidden[0, 0] = 1
    experts = CpuExperts(up, torch.eye(count).unsqueeze(0), gated=False, activation=activation)
    experts(hidden, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), out)
    absolute = 1e-6 if activation is Activation.gelu else 1e-12  # 1 + erf(x) cancels, in torch's float32 as well
    torch.testing.assert_close(out[0].double(), ACTIVATIONS[activation](values.double()), rtol=1e-5, atol=absolute)


def test_what_is_not_a_number_stays_none(path: str) -> None:
    case = Case.random(3, 2, 2, 40, 24)
    case.hidden[1, 5] = torch.nan
    for activation in ACTIVATIONS:
        found = case.computed(case.experts(activation))
        assert found[1].isnan().all()
        assert not found[[0, 2]].isnan().any()


def test_a_gate_of_the_callers(path: str) -> None:
    """Clamped and interleaved, as GPT-OSS has it."""

    def apply_gate(products: Tensor) -> Tensor:
        gate, up = products[..., ::2], products[..., 1::2]
        gate, up = gate.clamp(max=0.5), up.clamp(min=-0.5, max=0.5)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)

    for transposed in (False, True):
        case = Case.random(40, 2, 3, 48, 20, weights=torch.bfloat16, transposed=transposed, biased=True)
        case.index[3] = -1
        case.index[4, 0] = 99
        assert_close(case.computed(case.experts(None, apply_gate=apply_gate)), case.expected(apply_gate))


def test_more_tokens_than_are_computed_at_once(path: str) -> None:
    case = Case.random(2100, 1, 2, 8, 8)
    alone = torch.cat([case.computed(tokens=slice(t, t + 1)) for t in (0, 1023, 1024, 2099)])
    assert torch.equal(case.computed()[[0, 1023, 1024, 2099]], alone)


@settings(max_examples=150)
@given(
    case=cases().filter(lambda case: len(case.hidden) > 0),
    number=st.integers(0, 9),
    threads=st.integers(1, 5),
    data=st.data(),
)
def test_a_token_s_bits_do_not_depend_on_its_neighbours(
    case: Case, number: int, threads: int, data: st.DataObject
) -> None:
    with using(PATHS[number % len(PATHS)]):
        together = case.computed(case.experts(threads=threads))
        first = data.draw(st.integers(0, len(case.hidden) - 1))
        some = slice(first, first + data.draw(st.sampled_from([1, 2, 3, 5, 7, 11])))
        assert torch.equal(case.computed(case.experts(threads=1), some), together[some])


def test_wide_blocks_give_the_bits_of_narrow_ones(path: str) -> None:
    """The sizes at which few tokens are computed in other pieces than many."""
    for transposed in (False, True):
        case = Case.random(64, 2, 2, 320, 1100, weights=torch.bfloat16, transposed=transposed)
        together = case.computed(case.experts(threads=1))
        assert torch.equal(case.computed(case.experts(threads=7)), together)
        assert torch.equal(case.computed(tokens=slice(5, 6)), together[5:6])


def test_experts_are_added_in_ascending_order() -> None:
    case = Case.random(6, 4, 8, 32, 16)
    sorted_index, order = case.index.sort(dim=1, stable=True)
    found = case.computed()
    case.index, case.weights = sorted_index, case.weights.gather(1, order)
    assert torch.equal(case.computed(), found)


def test_weights_are_read_anew_in_every_call() -> None:
    case = Case.random(4, 2, 3, 32, 16, biased=True)
    experts = case.experts()
    case.computed(experts)
    for tensor in (case.up, case.down, case.up_bias, case.down_bias):
        assert tensor is not None
        tensor.mul_(0.5)
    assert_close(case.computed(experts), case.expected(case.gate(Activation.silu)))


def test_calls_from_several_threads_at_once() -> None:
    each = [Case.random(8, 2, 4, 96, 64, seed=seed) for seed in range(4)]
    expected = [case.computed() for case in each]
    wrong: list[int] = []

    def work(number: int) -> None:
        experts = each[number].experts(threads=3)
        if not all(torch.equal(each[number].computed(experts), expected[number]) for _ in range(50)):
            wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_other_threads_run_meanwhile() -> None:
    """With an interval that never ends, the counting thread runs only while the kernel has given up the lock."""
    case = Case.random(256, 4, 4, 512, 512)
    out = torch.empty_like(case.hidden)
    kind, path = _kernels.Type.float32, _kernels.path_named(instruction_set())
    kernel = _kernels.Experts(case.up.data_ptr(), case.down.data_ptr(), 0, 0, kind, 4, 512, 512, True, False)
    choices = (case.index.data_ptr(), case.weights.data_ptr(), *case.index.shape)
    states = (case.hidden.data_ptr(), out.data_ptr(), kind)
    counted, done = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not done.wait(0.0002):
            counted += 1

    counting = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        counting.start()
        before = counted
        kernel.compute(path, Activation.silu, *choices, *states, 1)
        during = counted - before
    finally:
        sys.setswitchinterval(interval)
        done.set()
        counting.join()
    assert torch.equal(out, case.computed())
    assert during > 0


def test_a_forked_child_has_its_own_threads() -> None:
    case = Case.random(8, 2, 4, 96, 64)
    experts = case.experts(threads=3)
    expected = case.computed(experts)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(case.computed(experts), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(case.computed(experts), expected)


def test_activations_are_known_by_what_transformers_puts_there() -> None:
    known = {name: activation_of(ACT2FN[name]) for name in ("silu", "swish", "relu", "relu2", "gelu", "gelu_python")}
    assert known == {
        "silu": Activation.silu,
        "swish": Activation.silu,
        "relu": Activation.relu,
        "relu2": Activation.relu2,
        "gelu": Activation.gelu,
        "gelu_python": Activation.gelu,
    }
    for name in ("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast", "gelu_accurate"):
        assert activation_of(ACT2FN[name]) is Activation.gelu_tanh
    assert activation_of(nn.GELU()) is Activation.gelu
    assert activation_of(nn.GELU(approximate="tanh")) is Activation.gelu_tanh
    for name in ("quick_gelu", "gelu_10", "relu6", "leaky_relu", "mish", "tanh"):
        assert activation_of(ACT2FN[name]) is None


def test_known_activations_compute_what_transformers_does() -> None:
    values = torch.linspace(-8, 8, 101)
    for name in ("silu", "relu", "relu2", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"):
        module = ACT2FN[name]
        activation = activation_of(module)
        assert activation is not None
        torch.testing.assert_close(ACTIVATIONS[activation](values), module(values))


def test_the_instruction_set_is_the_fastest_or_the_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INSTRUCTION_SET_VARIABLE, raising=False)
    assert instruction_set() == PATHS[0]
    for name in PATHS:
        monkeypatch.setenv(INSTRUCTION_SET_VARIABLE, name)
        assert instruction_set() == name


def test_an_instruction_set_that_is_none_or_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INSTRUCTION_SET_VARIABLE, "mmx")
    with pytest.raises(ConfigError, match="mmx: no instruction set") as refused:
        instruction_set()
    assert refused.value.hint is not None
    assert "portable" in refused.value.hint
    for name in set(_kernels.path_names()) - set(PATHS):
        monkeypatch.setenv(INSTRUCTION_SET_VARIABLE, name)
        with pytest.raises(ConfigError, match="no such instructions"):
            instruction_set()


def test_mistakes_of_ours_are_told() -> None:
    case = Case.random(2, 1, 2, 16, 8)
    with pytest.raises(AssertionError, match="as they lie"):
        CpuExperts(case.up.mT, case.down.mT, gated=True, transposed=True, activation=Activation.silu)
    with pytest.raises(AssertionError, match="either"):
        CpuExperts(case.up, case.down, gated=True)
    experts = case.experts()
    with pytest.raises(AssertionError, match="out like hidden"):
        experts(case.hidden, case.index, case.weights, torch.empty(2, 16, dtype=torch.bfloat16))
    with pytest.raises(AssertionError, match="by number"):
        experts(case.hidden, case.index.int(), case.weights, torch.empty(2, 16))
