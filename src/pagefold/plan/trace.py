"""The workload of a trace: its lengths, and the beginning that its prompts share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.plan.workload import Lengths, Workload, spread
from pagefold.sim.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pagefold.sim.traces import TraceRequest

__all__ = ["trace_workload", "workload_of"]

_MAX_REQUESTS = 200_000
_MAX_LENGTHS = 2048


def trace_workload(path: Path) -> Workload:
    """Return a trace's workload: its lengths (all, or so many that means are quick) and the beginning it shares.

    Raises:
        TraceError: the file cannot be read, or holds what cannot be lengths.
    """
    requests = read_trace(path, max_requests=_MAX_REQUESTS, lengths_only=True).requests
    return workload_of(requests, f"{path.name}: {len(requests):,} requests")


def workload_of(requests: Sequence[TraceRequest], name: str) -> Workload:
    """Return the workload of recorded requests, one at least: their lengths, and the beginning that most share."""
    lengths = spread((Lengths(request.prompt_tokens, request.output_tokens) for request in requests), _MAX_LENGTHS)
    shared, share = common_prefix(requests)
    shared = min(shared, max(each.prompt for each in lengths) - 1)
    name += f", {share:.0%} of which begin with the same {shared:,} tokens" if shared else ""
    return Workload(name=name, lengths=lengths, prefix_len=shared, prefix_share=share if shared else 1.0)


def common_prefix(requests: Sequence[TraceRequest]) -> tuple[int, float]:
    """Return (tokens, share of requests) of the beginning that spares the most when shared; (0, 0) without any."""
    counts: dict[tuple[int, int], list[int]] = {}
    for request in requests:
        for depth, each in enumerate(request.prefix_ids, start=1):
            counts.setdefault((depth, each), []).append(request.tokens_per_id)
    best, share = 0, 0.0
    for (depth, _), sizes in counts.items():
        tokens = depth * min(sizes)
        if len(sizes) > 1 and tokens * len(sizes) > best * share * len(requests):
            best, share = tokens, len(sizes) / len(requests)
    return best, share
