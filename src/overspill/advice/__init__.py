"""A plan told to other engines: the command line that does the nearest there, and what it cannot do."""

from __future__ import annotations

from overspill.advice.engines import ENGINES, advise
from overspill.advice.record import Advice, as_json, render

__all__ = ["ENGINES", "Advice", "advise", "as_json", "render"]
