"""What can go wrong, as one small tree. The command line's exit code hangs on it.

OverspillError
├── ConfigError              exit 2   what was asked for cannot be, judged before any file is opened
├── ModelError               exit 3
│   ├── CheckpointError               a file is damaged, missing or of a kind that is not opened
│   └── UnsupportedModelError         the architecture cannot be mapped onto its checkpoint
├── CapacityError            exit 3   memory (device, host, disk) does not hold what the plan needs
│   └── DeviceOutOfMemoryError        the device ran out while running
├── VerdictError             exit 1   a comparison ran and a verdict failed
└── DefectError              exit 4   ours: please report it
    ├── PlacementDefect               what lies in memory is not what the plan says
    └── LinkDefect                    an operation read a weight that had not crossed the link
"""

from __future__ import annotations


class OverspillError(Exception):
    """Base of all errors. `message` names the thing, the value and the limit; `hint` the way out."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class ConfigError(OverspillError, ValueError):
    """The caller's settings cannot be honoured. Raised before any model file is opened where that is possible."""

    exit_code = 2


class ModelError(OverspillError):
    """The model cannot be used."""

    exit_code = 3


class CheckpointError(ModelError):
    """A checkpoint file is damaged, missing, or of a kind that is not opened (pickle)."""


class UnsupportedModelError(ModelError):
    """The architecture cannot be mapped onto this checkpoint; raised before any weight is read."""


class CapacityError(OverspillError):
    """Device, host or disk memory does not hold what is needed."""

    exit_code = 3


class DeviceOutOfMemoryError(CapacityError):
    """The device ran out of memory while running."""


class VerdictError(OverspillError):
    """A comparison ran to its end and at least one verdict failed."""

    exit_code = 1


class DefectError(OverspillError):
    """Our own defect."""

    exit_code = 4


class PlacementDefect(DefectError):
    """What lies in memory differs from the plan."""


class LinkDefect(DefectError):
    """An operation on the device read memory that is not the device's."""


class OverspillWarning(UserWarning):
    """Something the caller asked for yields to something else; the text names what wins."""
