"""Traces: requests that somebody recorded, and workloads that are generated. Their readers, and where traces lie."""

from pagefold.sim.traces.folder import traces_folder
from pagefold.sim.traces.generators import (
    GENERATORS,
    AgentSessionsWorkload,
    AgentTreeWorkload,
    BurstWorkload,
    ChatWorkload,
    RetrievalWorkload,
    SharedPromptWorkload,
    Workload,
    parse_workload,
)
from pagefold.sim.traces.read import read_trace
from pagefold.sim.traces.request import MAX_TOKENS, Trace, TraceRequest, request_of
from pagefold.sim.traces.segments import GeneratedRequest, Segment, SessionTurn

__all__ = [
    "GENERATORS",
    "MAX_TOKENS",
    "AgentSessionsWorkload",
    "AgentTreeWorkload",
    "BurstWorkload",
    "ChatWorkload",
    "GeneratedRequest",
    "RetrievalWorkload",
    "Segment",
    "SessionTurn",
    "SharedPromptWorkload",
    "Trace",
    "TraceRequest",
    "Workload",
    "parse_workload",
    "read_trace",
    "request_of",
    "traces_folder",
]
