"""The planning of a bench, in four steps: the model, its head profile, its pool, and what a worker
gets."""

from __future__ import annotations

from kvtier.bench.planning.model import Model
from kvtier.bench.planning.plans import PolicyPlan, make_plans

__all__ = ["Model", "PolicyPlan", "make_plans"]
