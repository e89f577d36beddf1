"""Generation."""

from overspill.engine.engine import Engine
from overspill.engine.sampling import Completion, SamplingParams, Step

__all__ = ["Completion", "Engine", "SamplingParams", "Step"]
