"""Proof that a zero-copy view really is the host's memory, before anything relies on it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from overspill.errors import CapacityError

NO_VIEW_HINT = "set VLLM_WEIGHT_OFFLOADING_DISABLE_UVA=1: host weights are then copied to the device for each use"


def prove_zero_copy(host: torch.Tensor, view: torch.Tensor, synchronize: Callable[[], None]) -> None:
    """Write on either side and read on the other; `host` and `view` are uint8 [n], and are overwritten.

    A view that is a detached copy (as under confidential computing), is read from a stale cache, or whose
    writes are lost, gives plausible weights until one changes; so each is tried. Raises CapacityError.
    """
    pattern = torch.arange(host.numel()).remainder_(251).to(torch.uint8)
    contents = {
        "written on the host": pattern,
        "changed on the host after the device had read it": pattern.bitwise_xor(0xFF),
    }
    try:
        for what, content in contents.items():
            host.copy_(content)
            seen = view.bitwise_xor(0).cpu()  # computed, so that the device's cores read it and not its copy engine
            _demand(torch.equal(seen, content), f"what was {what} did not reach the device")
        view.bitwise_xor_(0x5A)
        synchronize()
        arrived = torch.equal(host, content.bitwise_xor(0x5A))
        _demand(arrived, "what was written on the device did not reach the host")
    except torch.AcceleratorError as error:
        raise CapacityError(
            f"zero-copy: the device failed when it used host memory in place: {str(error).splitlines()[0]}",
            hint=NO_VIEW_HINT,
        ) from error


def _demand(met: bool, failure: str) -> None:
    if not met:
        raise CapacityError(f"zero-copy: {failure}, so the device does not see host memory", hint=NO_VIEW_HINT)
