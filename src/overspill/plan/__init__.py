"""Where each weight goes."""

from overspill.plan.placement import Placement, Plan
from overspill.plan.planner import make_plan, refuse_device
from overspill.plan.ring import Ring, RingLayer
from overspill.plan.slots import Slots
from overspill.plan.tiers import Access, Tier

__all__ = ["Access", "Placement", "Plan", "Ring", "RingLayer", "Slots", "Tier", "make_plan", "refuse_device"]
