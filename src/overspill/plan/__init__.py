"""Where each weight goes."""

from overspill.plan.placement import Access, Placement, Plan, Ring, RingLayer, Tier
from overspill.plan.planner import make_plan, refuse_device

__all__ = ["Access", "Placement", "Plan", "Ring", "RingLayer", "Tier", "make_plan", "refuse_device"]
