"""What a load came to: figures under the names of ``vllm bench serve``, and what that lacks: cached tokens."""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING, Any

from pagefold.pages.chart import steps
from pagefold.pages.page import Page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.bench.load import LoadResult, LoadSettings

__all__ = ["bench_page", "print_rows", "summarize"]

_METRICS = (
    ("ttft", "Time to First Token"),
    ("tpot", "Time per Output Token (excl. 1st token)"),
    ("itl", "Inter-token Latency"),
    ("e2el", "End-to-end Latency"),
)
_PERCENTILES = (50, 95, 99)


def summarize(
    result: LoadResult, settings: LoadSettings, *, backend: str, model: str, chains: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return the figures of a load, ready for JSON. Lists are in order of the prompts; times in them are seconds."""
    records = result.records
    good = [record for record in records if not record.error]
    total_input = sum(record.prompt_tokens for record in good)
    total_output = sum(record.output_tokens for record in good)
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]
    seconds = max(result.duration_s, 1e-9)
    figures: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": backend,
        "model_id": model,
        "num_prompts": len(records),
        "request_rate": "inf" if math.isinf(settings.request_rate) else settings.request_rate,
        "burstiness": settings.burstiness,
        "max_concurrency": settings.max_concurrency,
        "duration": result.duration_s,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "total_cached_tokens": sum(cached) if cached else None,
        "cached_share": sum(cached) / total_input if cached and total_input else None,
        "request_throughput": len(good) / seconds,
        "output_throughput": total_output / seconds,
        "total_token_throughput": (total_input + total_output) / seconds,
    }
    tpots = [record.tpot_s for record in good if record.tpot_s is not None]
    series = {
        "ttft": [record.ttft_s for record in good],
        "tpot": tpots,
        "itl": [itl for record in good for itl in record.itls_s],
        "e2el": [record.latency_s for record in good],
    }
    for name, values in series.items():
        figures |= _spread(name, values)
    return figures | {
        "server": result.gauge.figures(),
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "cached_lens": [record.cached_tokens for record in records],
        "start_times": [record.start_s for record in records],
        "ttfts": [record.ttft_s for record in records],
        "itls": [record.itls_s for record in records],
        "errors": [record.error for record in records],
        "hash_ids": [list(chain) for chain in chains],
    }


def _spread(name: str, values: list[float]) -> dict[str, float | None]:
    """Return mean, median, deviation and percentiles (nearest rank) in ms; None of nothing."""
    in_order = sorted(1e3 * value for value in values)
    found: dict[str, float | None] = {
        f"mean_{name}_ms": statistics.fmean(in_order) if in_order else None,
        f"median_{name}_ms": statistics.median(in_order) if in_order else None,
        f"std_{name}_ms": statistics.pstdev(in_order) if in_order else None,
    }
    for percent in _PERCENTILES:
        rank = max(0, math.ceil(len(in_order) * percent / 100) - 1)
        found[f"p{percent}_{name}_ms"] = in_order[rank] if in_order else None
    return found


def print_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows that people read: what ``vllm bench serve`` prints, and what the cache gave."""
    rows = [
        ("Successful requests", f"{figures['completed']:,}"),
        ("Failed requests", f"{figures['failed']:,}"),
        ("Benchmark duration (s)", f"{figures['duration']:.2f}"),
        ("Total input tokens", f"{figures['total_input_tokens']:,}"),
        ("Total generated tokens", f"{figures['total_output_tokens']:,}"),
        ("Cached input tokens", _cached(figures)),
        ("Request throughput (req/s)", f"{figures['request_throughput']:.2f}"),
        ("Output token throughput (tok/s)", f"{figures['output_throughput']:.2f}"),
        ("Total token throughput (tok/s)", f"{figures['total_token_throughput']:.2f}"),
    ]
    for name, title in _METRICS:
        if figures[f"mean_{name}_ms"] is None:
            continue
        rows.append((title, ""))
        short = name.upper()
        labels = [
            (f"Mean {short} (ms)", "mean"),
            (f"Median {short} (ms)", "median"),
            (f"P95 {short} (ms)", "p95"),
            (f"P99 {short} (ms)", "p99"),
        ]
        rows += [(f"  {label}", f"{figures[f'{key}_{name}_ms']:.2f}") for label, key in labels]
    server = figures["server"]
    if server:
        rows.append(("Server", ""))
        mean = server["mean_running_while_waiting"]
        running = f"{server['max_num_requests_running']:.0f} at most"
        rows.append(("  Requests running", running if mean is None else f"{running}, {mean:.1f} while others waited"))
        rows.append(("  KV cache usage, at most", f"{server['max_kv_cache_usage_perc']:.0%}"))
        rows.append(("  Preemptions", f"{server['num_preemptions']:.0f}"))
    return rows


def _cached(figures: dict[str, Any]) -> str:
    if figures["total_cached_tokens"] is None:
        return "the server does not say"
    return f"{figures['total_cached_tokens']:,} ({figures['cached_share']:.1%})"


def bench_page(figures: dict[str, Any], url: str) -> Page:
    """Return the figures as a page with charts."""
    page = Page(f"Bench: {figures['model_id']} at {url}")
    page.table(print_rows(figures))
    good = [index for index, error in enumerate(figures["errors"]) if not error]
    for title, values in (
        ("Time to first token: share of requests within so many ms", [1e3 * figures["ttfts"][i] for i in good]),
        (
            "Inter-token latency: share of gaps within so many ms",
            [1e3 * itl for i in good for itl in figures["itls"][i]],
        ),
    ):
        page.heading(title)
        page.chart(steps(values, title, unit="ms"))
    errors = sorted({error for error in figures["errors"] if error})
    if errors:
        page.heading("Errors")
        page.table([(error,) for error in errors[:20]])
    return page
