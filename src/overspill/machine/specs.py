"""Named GPUs and links, for a machine that is not here or was not measured.

Memory is the total that nvidia-smi shows of a card as it is shipped, with ECC on where it is on by default (data-centre
cards), taken from its output as public repositories quote it; that is less than the round figure on the box. Read
bandwidth and dense 16-bit operations (not sparse, 32-bit sums) are of the document that each row names, as public
tables quote it. Link figures are what one direction carries at the most: the PCI Express Base Specification's rate per
lane after encoding, times lanes. What software reaches of them is less: the shares below are assumed, and said with
each forecast that rests on them.
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
    """`memory_mib` in all, read bandwidth in GB/s, dense 16-bit TFLOP/s, the link that it is made for, what CUDA calls
    it (without "NVIDIA "), and the document that bandwidth and TFLOP/s are of."""

    name: str
    memory_mib: int
    bandwidth_gbs: float
    tflops: float
    link: str
    device_names: tuple[str, ...]
    source: str

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib << 20


_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper"
_ADA = "NVIDIA Ada GPU Architecture whitepaper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet, half of its figure with sparsity"
_GPUS = (
    Gpu("T4", 15360, 320, 65, "pcie3x16", ("Tesla T4", "T4"), "NVIDIA T4 Tensor Core GPU data sheet"),
    Gpu("A10", 23028, 600, 125, "pcie4x16", ("A10",), "NVIDIA A10 Tensor Core GPU data sheet"),
    Gpu("A10G", 23028, 600, 70, "pcie4x16", ("A10G",), "NVIDIA A10G data sheet"),
    Gpu("A100-40GB", 40960, 1555, 312, "pcie4x16", ("A100-SXM4-40GB", "A100-PCIE-40GB"), _A100),
    Gpu("A100-80GB", 81920, 2039, 312, "pcie4x16", ("A100-SXM4-80GB",), _A100),
    Gpu("A100-80GB-PCIe", 81920, 1935, 312, "pcie4x16", ("A100 80GB PCIe",), _A100),
    Gpu("L4", 23034, 300, 121, "pcie4x16", ("L4",), "NVIDIA L4 Tensor Core GPU data sheet, half with sparsity"),
    Gpu("L40", 46068, 864, 181, "pcie4x16", ("L40",), "NVIDIA L40 GPU data sheet"),
    Gpu("L40S", 46068, 864, 362, "pcie4x16", ("L40S",), "NVIDIA L40S GPU data sheet"),
    Gpu("H100-PCIe", 81559, 2000, 756, "pcie5x16", ("H100 PCIe",), _H100),
    Gpu("H100-SXM", 81559, 3350, 989, "pcie5x16", ("H100 80GB HBM3",), _H100),
    Gpu("H200", 143771, 4800, 989, "pcie5x16", ("H200",), "NVIDIA H200 Tensor Core GPU data sheet, half with sparsity"),
    Gpu("RTX-3090", 24576, 936, 71, "pcie4x16", ("GeForce RTX 3090",), _GA102),
    Gpu("RTX-4060-Ti-16GB", 16380, 288, 44, "pcie4x8", ("GeForce RTX 4060 Ti",), f"{_ADA}: twice the FP32 rate"),
    Gpu("RTX-4080", 16376, 717, 97, "pcie4x16", ("GeForce RTX 4080",), _ADA),
    Gpu("RTX-4090", 24564, 1008, 165, "pcie4x16", ("GeForce RTX 4090",), _ADA),
    Gpu("RTX-5080", 16303, 960, 112, "pcie5x16", ("GeForce RTX 5080",), _BLACKWELL),
    Gpu("RTX-5090", 32607, 1792, 209, "pcie5x16", ("GeForce RTX 5090",), _BLACKWELL),
    Gpu("RTX-A6000", 49140, 768, 155, "pcie4x16", ("RTX A6000",), _GA102),
    Gpu(
        *("RTX-6000-Ada", 49140, 960, 364, "pcie4x16", ("RTX 6000 Ada Generation",)),
        source="NVIDIA RTX 6000 Ada Generation data sheet: a quarter of its 1457 TFLOP/s in FP8 with sparsity",
    ),
)
GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in _GPUS}
_BY_DEVICE_NAME = {name: gpu for gpu in _GPUS for name in gpu.device_names}

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
        copy_bytes_s=HOST_READ_BYTES_S,  # a link can be faster than the memory behind it
    )


def gpu_of_device(device_name: str) -> Gpu | None:
    """The GPU of the table whose rates are those of what CUDA calls `device_name`; None where it has none.

    Names are compared whole: "RTX 4090 Laptop GPU" is no RTX 4090. Older drivers leave "NVIDIA " out.
    """
    return _BY_DEVICE_NAME.get(device_name.removeprefix("NVIDIA "))


def _known(what: str, name: str, table: Mapping[str, object]) -> str:
    by_case = {known.lower(): known for known in table}
    if (found := by_case.get(name.lower())) is not None:
        return found
    near = get_close_matches(name.lower(), by_case, cutoff=0.5) or list(by_case)
    raise ConfigError(
        f'"{what}" is "{name}", which the table has not', hint=f"one of {', '.join(by_case[n] for n in near)}"
    )
