"""The real scheduler and cache without a model: virtual time, a runner that computes nothing, workloads."""

from pagefold.sim.cache_only import CacheOnlyReport, replay_cache_only
from pagefold.sim.clock import VirtualClock
from pagefold.sim.comparison import Comparison, Limits, Question, compare
from pagefold.sim.null_runner import NullRunner, hashed_token
from pagefold.sim.replay import SimConfig, replay, simulate
from pagefold.sim.report import PoolSample, Report, Tally
from pagefold.sim.step_cost import LinearStepCost
from pagefold.sim.traces import ChatWorkload, TraceRequest, read_trace

__all__ = [
    "CacheOnlyReport",
    "ChatWorkload",
    "Comparison",
    "Limits",
    "LinearStepCost",
    "NullRunner",
    "PoolSample",
    "Question",
    "Report",
    "SimConfig",
    "Tally",
    "TraceRequest",
    "VirtualClock",
    "compare",
    "hashed_token",
    "read_trace",
    "replay",
    "replay_cache_only",
    "simulate",
]
