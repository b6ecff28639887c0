"""Passes: pure functions from graph to graph, and the memory planner that follows them."""

from ignis.graph.passes.pipeline import PIPELINE, TOGGLES, Pass, PassReport, run_pipeline
from ignis.graph.passes.plan_memory import MemoryPlan, plan_memory, verify_plan

__all__ = [
    "PIPELINE",
    "TOGGLES",
    "MemoryPlan",
    "Pass",
    "PassReport",
    "plan_memory",
    "run_pipeline",
    "verify_plan",
]
