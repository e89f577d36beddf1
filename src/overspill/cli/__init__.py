"""The command line: `overspill plan|run|compare`. Data on stdout, logs on stderr; exit codes in errors.py."""

from __future__ import annotations

from overspill.cli.app import main

__all__ = ["main"]
