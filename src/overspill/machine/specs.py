"""Named GPUs and links, for a machine that is not here or was not measured.

Memory, bandwidth and dense 16-bit operations (not sparse, 32-bit sums) are of NVIDIA's data sheets. Link figures are
what one direction carries at the most: the PCI Express Base Specification's rate per lane after encoding, times lanes.
What software reaches of them is less: the shares below are assumed, and said with each forecast that rests on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from overspill.errors import ConfigError
from overspill.machine.device import Link
from overspill.machine.rates import Rates

READ_SHARE = 0.8
FLOPS_SHARE = 0.5
LINK_SHARE = 0.85
LAYER_S = 0.25e-3
"""Of a decoder layer in eager transformers: its Python and its launches, beside which the GPU computes."""
HOST_READ_BYTES_S = 40e9
HOST_FLOPS = 1e12
DISK_BYTES_S = 2e9
LINK_LATENCY_S = 10e-6


@dataclass(frozen=True)
class Gpu:
    """`memory_gib`, read bandwidth in GB/s, dense 16-bit TFLOP/s, the link that it is made for, and the source."""

    name: str
    memory_gib: float
    bandwidth_gbs: float
    tflops: float
    link: str
    source: str


_SHEET = "NVIDIA {} data sheet"
_GPUS = (
    ("T4", 16, 320, 65, "pcie3x16"),
    ("A10", 24, 600, 125, "pcie4x16"),
    ("A100-40GB", 40, 1555, 312, "pcie4x16"),
    ("A100-80GB", 80, 2039, 312, "pcie4x16"),
    ("L4", 24, 300, 121, "pcie4x16"),
    ("L40", 48, 864, 181, "pcie4x16"),
    ("L40S", 48, 864, 362, "pcie4x16"),
    ("H100-PCIe", 80, 2000, 756, "pcie5x16"),
    ("H100-SXM", 80, 3350, 989, "pcie5x16"),
    ("H200", 141, 4800, 989, "pcie5x16"),
    ("RTX-3090", 24, 936, 71, "pcie4x16"),
    ("RTX-4060-Ti-16GB", 16, 288, 44, "pcie4x8"),
    ("RTX-4080", 16, 717, 97, "pcie4x16"),
    ("RTX-4090", 24, 1008, 165, "pcie4x16"),
    ("RTX-5080", 16, 960, 112, "pcie5x16"),
    ("RTX-5090", 32, 1792, 209, "pcie5x16"),
    ("RTX-A6000", 48, 768, 155, "pcie4x16"),
    ("RTX-6000-Ada", 48, 960, 182, "pcie4x16"),
)
GPUS: Mapping[str, Gpu] = {row[0]: Gpu(*row, source=_SHEET.format(row[0])) for row in _GPUS}

_LANE_BYTES_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
LINKS: Mapping[str, float] = {
    f"pcie{generation}x{lanes}": lane * lanes for generation, lane in _LANE_BYTES_S.items() for lanes in (4, 8, 16)
}
"""Bytes per second in one direction."""


def gpu_named(name: str) -> Gpu:
    """The GPU of that name, in any case. ConfigError with the closest names."""
    return GPUS[_known("gpu", name, GPUS)]


def link_named(name: str) -> Link:
    """What such a link carries, the assumed share of its rate. ConfigError with the closest names."""
    return Link(LINK_SHARE * LINKS[_known("link", name, LINKS)], LINK_LATENCY_S, measured=False)


def named_rates(gpu: Gpu) -> Rates:
    """Rates of a GPU by its data sheet, beside a host of assumed figures."""
    sixteen = FLOPS_SHARE * gpu.tflops * 1e12
    return Rates(
        origin=f"{gpu.name} by its data sheet ({READ_SHARE:.0%} of {gpu.bandwidth_gbs:g} GB/s, {FLOPS_SHARE:.0%} of "
        f"{gpu.tflops:g} TFLOP/s), and an assumed host ({HOST_READ_BYTES_S / 1e9:g} GB/s) and disk "
        f"({DISK_BYTES_S / 1e9:g} GB/s): not measured",
        read_bytes_s={"bfloat16": READ_SHARE * gpu.bandwidth_gbs * 1e9},
        flops={"bfloat16": sixteen, "float16": sixteen, "float32": sixteen / 4},
        layer_s=LAYER_S,
        expert_bytes_s=HOST_READ_BYTES_S,
        expert_flops=HOST_FLOPS,
        disk_bytes_s=DISK_BYTES_S,
        asynchronous=True,
    )


def gpu_of_device(device_name: str) -> Gpu | None:
    """The GPU of the table that torch calls `device_name`; None where it has none."""
    words = device_name.upper().replace(" ", "-")
    found = [gpu for gpu in GPUS.values() if gpu.name.upper() in words]
    return max(found, key=lambda gpu: len(gpu.name), default=None)


def _known(what: str, name: str, table: Mapping[str, object]) -> str:
    by_case = {known.lower(): known for known in table}
    if (found := by_case.get(name.lower())) is not None:
        return found
    near = get_close_matches(name.lower(), by_case, cutoff=0.5) or list(by_case)
    raise ConfigError(
        f'"{what}" is "{name}", which the table has not', hint=f"one of {', '.join(by_case[n] for n in near)}"
    )
