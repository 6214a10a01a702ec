"""Profiling-guided scheduling: cost models, plan search, simulator, explanation."""

from m2flow.sched.comparison import compare
from m2flow.sched.errors import InfeasibleError, InputError, SchedError
from m2flow.sched.explanation import explain
from m2flow.sched.planning import best_plan, plan
from m2flow.sched.profiles import fold_spans, merge, usable
from m2flow.sched.replanning import Replan, replan
from m2flow.sched.simulation import simulate

__all__ = [
    "InfeasibleError",
    "InputError",
    "Replan",
    "SchedError",
    "best_plan",
    "compare",
    "explain",
    "fold_spans",
    "merge",
    "plan",
    "replan",
    "simulate",
    "usable",
]
