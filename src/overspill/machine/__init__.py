"""What can hold weights and move them: devices, exact blocks of memory, links.

What is for a GPU alone is imported when `select_device` chooses one.
"""

from __future__ import annotations

from overspill.machine.arena import Arena, Block
from overspill.machine.cpu import CpuDevice
from overspill.machine.device import Device, Link, LinkTraffic, Transfer
from overspill.machine.emulated import EmulatedDevice
from overspill.machine.memory import MemoryAccount, host_available_bytes
from overspill.machine.select import select_device

__all__ = [
    "Arena",
    "Block",
    "CpuDevice",
    "Device",
    "EmulatedDevice",
    "Link",
    "LinkTraffic",
    "MemoryAccount",
    "Transfer",
    "host_available_bytes",
    "select_device",
]
