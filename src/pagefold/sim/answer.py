"""What a comparison comes to: rows of tables, figures for JSON, and what is drawn."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

from pagefold.sim.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.sim.comparison import Comparison, Run

__all__ = ["OVER_TIME", "Plot", "cache_rows", "curve_rows", "figures", "over_time", "run_name", "timed_rows"]


class Plot(NamedTuple):
    """A figure over time.

    Attributes:
        name: of a window's figure.
        title: above it.
        unit: of its values.
    """

    name: str
    title: str
    unit: str


OVER_TIME = (
    Plot("hit_ratio", "Token hit ratio", ""),
    Plot("ttft_s", "Time to first token", "s"),
    Plot("inter_token_s", "Inter-token latency", "s"),
    Plot("num_waiting", "Requests waiting", ""),
    Plot("num_running", "Requests running", ""),
    Plot("use", "Share of blocks in use", ""),
    Plot("num_evictions", "Blocks evicted, a window", ""),
    Plot("num_preemptions", "Preemptions, a window", ""),
)
"""What is drawn of a run with timing."""

_TIMED: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("TTFT 50/95", lambda report: _pair(report.ttft_p50_s, report.ttft_p95_s)),
    ("ITL 50/95", lambda report: _pair(report.itl_p50_s, report.itl_p95_s)),
    ("queue", lambda report: f"{report.mean_waiting:,.0f}"),
    ("use", lambda report: f"{report.mean_use:.0%}"),
    ("evicted", lambda report: f"{sum(report.num_evictions.values()):,}"),
    ("preempted", lambda report: f"{report.num_preemptions:,}"),
)

_TIERED: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("from host", lambda report: f"{report.num_host_loaded:,}"),
    ("from disk", lambda report: f"{report.num_disk_read:,}"),
)
"""Blocks, where there are tiers."""


def _pair(median_s: float, high_s: float) -> str:
    """Return two durations in the unit that the longer one needs."""
    if high_s < 1:
        return f"{median_s * 1e3:,.0f}/{high_s * 1e3:,.0f} ms"
    return f"{median_s:,.1f}/{high_s:,.1f} s"


def run_name(run: Run) -> str:
    """Return what a run is called."""
    return f"{run.policy}, {run.cache_tokens:,} tokens"


def cache_rows(comparison: Comparison) -> list[list[str]]:
    """Return a table with a row a policy and bound and a column a size of the cache; the head first.

    With bounds, a policy's ratio is followed by its share of what Belady's rule reaches.
    """
    bounds = comparison.bounds
    sizes = list(dict.fromkeys(run.cache_tokens for run in comparison.runs))
    rows = [["policy", *(f"{size:,}" for size in sizes)]]
    for policy in dict.fromkeys(run.policy for run in comparison.runs):
        row = [policy]
        for run in comparison.runs:
            if run.policy == policy:
                best = 0.0 if bounds is None else bounds.belady[run.cache_tokens]
                row.append(f"{run.token_hit_ratio:.4f}" + (f" {run.token_hit_ratio / best:4.0%}" if best else ""))
        rows.append(row)
    if bounds is not None:
        rows.append(["Belady", *(f"{bounds.belady[size]:.4f} 100%" for size in sizes)])
        rows.append(["infinite", *(f"{bounds.infinite:.4f}     " for _ in sizes)])
    return rows


def timed_rows(comparison: Comparison) -> list[list[str]]:
    """Return a table with a row a run: what its requests met; the head first. Of runs without timing only the head."""
    columns = _TIMED + (_TIERED if comparison.question.tiers.host_tokens else ())
    rows = [["policy", "cache", "hits", *(name for name, _ in columns)]]
    for run in comparison.runs:
        if isinstance(run.report, Report):
            told = (tell(run.report) for _, tell in columns)
            rows.append([run.policy, f"{run.cache_tokens:,}", f"{run.token_hit_ratio:.1%}", *told])
    return rows


def curve_rows(comparison: Comparison) -> list[list[str]]:
    """Return a table of the curves at a tenth of their sizes, the head first."""
    curves = comparison.curves
    assert curves is not None
    head = ["cache (tokens)", "miss ratio, exact", f"sampled at {curves.sampled.rate:g}"]
    step = max(1, len(curves.sizes) // 10)
    return [head] + [
        [f"{size:,}", f"{1 - curves.exact.at(size):.4f}", f"{1 - curves.sampled.at(size):.4f}"]
        for size in curves.sizes[step - 1 :: step]
    ]


def over_time(report: Report, name: str) -> list[tuple[float, float | None]]:
    """Return (virtual seconds, value) of each window."""
    told = [window.figures(report.num_blocks) for window in report.windows]
    return [(each["end_s"] or 0.0, each[name]) for each in told]


def figures(comparison: Comparison) -> dict[str, object]:
    """Return all figures for JSON: those of the first run by their names, and all runs in ``runs``."""
    question = comparison.question
    runs = [_run_figures(run, comparison) for run in comparison.runs]
    told: dict[str, object] = {
        "trace": question.name,
        "mode": "cache-only" if question.is_cache_only else "full",
        **({} if question.is_cache_only else asdict(question.turns)),
        **{name: value for name, value in runs[0].items() if name != "over_time"},
        "runs": runs,
    }
    if comparison.bounds is not None:
        told["infinite_token_hit_ratio"] = comparison.bounds.infinite
    if comparison.curves is not None:
        curves = comparison.curves
        told["curves"] = {
            "policy": "lru",
            "cache_tokens": list(curves.sizes),
            "exact_token_hit_ratio": [curves.exact.at(size) for size in curves.sizes],
            "sampled_token_hit_ratio": [curves.sampled.at(size) for size in curves.sizes],
            "sample_rate": curves.sampled.rate,
            "mean_absolute_error": curves.error,
        }
    return told


def _run_figures(run: Run, comparison: Comparison) -> dict[str, object]:
    bounds = comparison.bounds
    told: dict[str, object] = {
        "policy": run.policy,
        "cache_tokens": run.cache_tokens,
        "block_size": comparison.question.block_size,
        "token_hit_ratio": run.token_hit_ratio,
    }
    told |= {name: value for name, value in run.report.figures().items() if name not in {*told, "hit_share"}}
    if bounds is not None:
        best = bounds.belady[run.cache_tokens]
        told["belady_token_hit_ratio"] = best
        told["fraction_of_belady"] = run.token_hit_ratio / best if best else None
        told["fraction_of_infinite"] = run.token_hit_ratio / bounds.infinite if bounds.infinite else None
    if isinstance(run.report, Report):
        told["over_time"] = [window.figures(run.report.num_blocks) for window in run.report.windows]
    return told
