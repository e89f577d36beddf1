from __future__ import annotations

from typing import Any

import pytest
import torch

from emulated_runs import mapped
from overspill.model.meta_results import MetaResults
from tiny_models import MakeTiny

ATEN = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Counted:
    """An operation that counts how often it runs."""

    def __init__(self, func: Any) -> None:
        self._func, self._schema, self.runs = func, func._schema, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self._func(*args, **kwargs)


@pytest.mark.parametrize(
    ("func", "args", "others"),
    [
        (
            ATEN.mul.Tensor,
            (meta(2, 3), meta(3)),
            [(meta(2, 3), meta(2, 1)), (meta(2, 3), meta(3, dtype=torch.float64))],
        ),
        (ATEN.add.Tensor, (meta(2, dtype=torch.long), 1), [(meta(2, dtype=torch.long), 1.0)]),
        (ATEN.clone.default, (meta(2, 3).t(),), [(meta(3, 2),)]),
        (ATEN.cat.default, ([meta(2), meta(3)], 0), [([meta(2), meta(4)], 0), ([meta(2), meta(3), meta(1)], 0)]),
        (ATEN.sum.dim_IntList, (meta(2, 3), [0]), [(meta(2, 3), [1]), (meta(2, 3), [0], True)]),
        (ATEN.topk.default, (meta(2, 3), 2), [(meta(2, 3), 1)]),
        (ATEN.full.default, ([2, 3], 1.0), [([3, 2], 1.0)]),
    ],
)
def test_what_ran_before_is_not_run_again_and_gives_the_same(func: Any, args: Any, others: list[Any]) -> None:
    run, counted = MetaResults(), Counted(func)
    for number, given in enumerate([args, *others], 1):
        for _ in range(3):
            made = run(counted, given, {"device": "meta"} if func is ATEN.full.default else {})
            expected = func(*given, **({"device": "meta"} if func is ATEN.full.default else {}))
            pairs = zip(made, expected, strict=True) if isinstance(expected, tuple) else [(made, expected)]
            for one, other in pairs:
                assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
                assert one.device.type == "meta"
        assert counted.runs == number, given


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (ATEN.view.default, (meta(2, 3), [3, 2])),
        (ATEN._unsafe_view.default, (meta(2, 3), [3, 2])),  # whose schema does not say that it is a view
        (ATEN.add_.Tensor, (meta(2, 3), 1)),
        (ATEN.mul.Tensor, (torch.zeros(2), torch.zeros(2))),  # not on meta
    ],
)
def test_views_changes_and_real_tensors_always_run(func: Any, args: Any) -> None:
    run, counted = MetaResults(), Counted(func)
    for number in range(1, 4):
        made = run(counted, args, {})
        assert counted.runs == number
        shared = made.untyped_storage()._cdata == args[0].untyped_storage()._cdata
        assert shared == (args[0].device.type == "meta")


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3", "nemotron_h"])
def test_a_trace_is_the_same_without_it(name: str, tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    found = mapped(tiny(name), tokens=8).trace
    monkeypatch.setattr(MetaResults, "__call__", lambda self, func, args, kwargs: func(*args, **kwargs))
    assert mapped(tiny(name), tokens=8).trace == found
