"""What operations on meta give, remembered: torch works the shape of a result out in Python, for each layer again."""

from __future__ import annotations

from typing import Any

import torch

_Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides


class MetaResults:
    """Runs operations on meta tensors; one that was run before, on such tensors, is not run again.

    Its result is then made from what is remembered. Never so for what changes its arguments or gives views of them, and
    where not everything it is given is on meta.
    """

    def __init__(self) -> None:
        self._made: dict[object, list[_Made] | None] = {}
        self._functional: dict[Any, bool] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_functional(func):
            return func(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        try:
            key = func, _described(args, tensors), _described(tuple(kwargs.items()), tensors)
            known = self._made.get(key, ())
        except TypeError:  # given what cannot be compared
            return func(*args, **kwargs)
        if known:
            made = [torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, strides, dtype in known]
            return made[0] if len(func._schema.returns) == 1 else tuple(made)
        result = func(*args, **kwargs)
        if known is not None:
            self._made[key] = _to_remember(result, tensors)
        return result

    def _is_functional(self, func: Any) -> bool:
        """Whether its schema says that it changes nothing, and gives tensors of its own."""
        if func not in self._functional:
            schema = func._schema
            self._functional[func] = not schema.is_mutable and all(
                str(returned.type) == "Tensor" and returned.alias_info is None for returned in schema.returns
            )
        return self._functional[func]


def _described(value: Any, tensors: list[torch.Tensor]) -> object:
    """What is equal for arguments that give the same result. TypeError where that cannot be said."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta" or type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError
        tensors.append(value)
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(_described(item, tensors) for item in value)
    return type(value), value  # 1, 1.0 and True are equal


def _to_remember(result: Any, given: list[torch.Tensor]) -> list[_Made] | None:
    """None where a result lies in memory that was given, whatever the schema says."""
    made = [result] if isinstance(result, torch.Tensor) else list(result)
    memory = {tensor.untyped_storage()._cdata for tensor in given}
    if any(one is None or one.device.type != "meta" or one.untyped_storage()._cdata in memory for one in made):
        return None
    return [(tuple(one.shape), one.stride(), one.dtype) for one in made]
