"""``pagefold simulate --replicas``: a workload on servers behind a router, beside one as large as all of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import typer
from rich.console import Console

from pagefold.cli.simulated_answer import show_table
from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.sim.comparison import Progress, Question
    from pagefold.sim.replicas import FleetReport
    from pagefold.sim.report import Report

__all__ = ["OF_ONE_SERVER", "Fleets", "compare_fleets", "print_fleets"]

OF_ONE_SERVER = (
    "--bounds",
    "--curve",
    "--kv-keep",
    "--host-tokens",
    "--disk-tokens",
    "--token-bytes",
    "--host-bandwidth",
    "--disk-bandwidth",
    "--disk-latency",
    "--fault-rate",
    "--fault-seed",
    "--html",
    "--png",
)
"""Flags that say nothing to several servers."""


class Fleets(NamedTuple):
    """What came of a workload on several servers.

    Attributes:
        name: of the workload.
        num_requests: of it.
        num_replicas: the servers.
        cache_tokens: of each.
        runs: by routing policy.
        together: one server as large and as fast as all of them.
    """

    name: str
    num_requests: int
    num_replicas: int
    cache_tokens: int
    runs: tuple[FleetReport, ...]
    together: Report


def compare_fleets(question: Question, num_replicas: int, routings: Sequence[str], progress: Progress | None) -> Fleets:
    """Run a workload under each routing policy.

    Args:
        question: the workload, and each server; of one eviction policy and one size.
        num_replicas: how many servers.
        routings: names of routing policies.
        progress: as of a comparison.

    Raises:
        ConfigError: there are several sizes or none, several eviction policies, or one that does not go with servers.
        BudgetTooSmallError: a request can never fit into a server.
    """
    from pagefold.kv.keep import KEEP_ALL  # noqa: PLC0415 - so that --help answers at once
    from pagefold.sim.replay import SimConfig  # noqa: PLC0415
    from pagefold.sim.replicas import Fleet, simulate_replicas, simulate_together  # noqa: PLC0415

    if len(question.cache_tokens) != 1 or len(question.policies) != 1:
        msg = "Replicas are alike: each has one size of the cache and one eviction policy."
        raise ConfigError(msg, remedy="Give one --cache-tokens, what each replica holds, and at most one --policy.")
    if question.rules != (KEEP_ALL,):
        msg = "The model's layers keep different tokens, and replicas are simulated of models whose layers keep all."
        raise ConfigError(msg, remedy="Name another --model, or leave --replicas out.")
    (cache_tokens,) = question.sizes()
    server = SimConfig(
        num_blocks=cache_tokens // question.block_size,
        block_size=question.block_size,
        max_num_seqs=question.limits.max_num_seqs,
        max_num_batched_tokens=question.limits.max_num_batched_tokens,
        eviction_policy=question.policies[0],
        admission=question.turns.admission,
        scheduling_policy=question.turns.scheduling_policy,
    )
    fleets = [Fleet(num_replicas=num_replicas, replica=server, routing=name) for name in routings]
    requests = question.timed or question.requests
    runs = tuple(
        simulate_replicas(
            requests,
            fleet,
            step_cost=question.step_cost,
            runner=question.runner,
            progress=_told(progress, fleet.routing, len(requests)),
        )
        for fleet in fleets
    )
    together = simulate_together(
        requests,
        fleets[0],
        step_cost=question.step_cost,
        runner=question.runner,
        progress=_told(progress, "together", len(requests)),
    )
    return Fleets(question.name, len(requests), num_replicas, cache_tokens, runs, together)


def print_fleets(fleets: Fleets, *, as_json: bool) -> None:
    """Print what routing policies came to."""
    best = fleets.together
    if as_json:
        told = {
            "trace": fleets.name,
            "num_replicas": fleets.num_replicas,
            "cache_tokens": fleets.cache_tokens,
            "together": {
                "token_hit_ratio": best.hit_share,
                "ttft_p50_s": best.ttft_p50_s,
                "ttft_p95_s": best.ttft_p95_s,
            },
            "runs": [
                each.figures() | {"hits_over_together": _over(each.hit_share, best.hit_share)} for each in fleets.runs
            ],
        }
        typer.echo(json.dumps(told, indent=2))
        return
    console = Console()
    heading = (
        f"{fleets.name}: {fleets.num_requests:,} requests on {fleets.num_replicas:,} replicas, each with a cache of "
        f"{fleets.cache_tokens:,} tokens"
    )
    console.print(heading, markup=False)
    rows = [["routing", "hits", "of one cache", "TTFT 50", "TTFT 95", "busiest", "why"]]
    for each in fleets.runs:
        over = _over(each.hit_share, best.hit_share)
        why = ", ".join(f"{reason} {num:,}" for reason, num in sorted(each.num_choices.items()))
        rows.append(
            [
                each.routing,
                f"{each.hit_share:.1%}",
                "" if over is None else f"{over:.0%}",
                f"{each.ttft_p50_s:,.2f} s",
                f"{each.ttft_p95_s:,.2f} s",
                f"{each.busiest_share:.2f}",
                why,
            ]
        )
    rows.append(["one cache", f"{best.hit_share:.1%}", "", f"{best.ttft_p50_s:,.2f} s", f"{best.ttft_p95_s:,.2f} s"])
    rows[-1] += [""] * (len(rows[0]) - len(rows[-1]))
    show_table(console, "What requests met, in virtual time", rows)
    console.print(
        "One cache: a server with the memory and the speed of all replicas. Busiest: what the busiest replica"
    )
    console.print("computed, over the mean.")


def _told(progress: Progress | None, what: str, total: int) -> Callable[[int], None] | None:
    return None if progress is None else lambda num_done: progress(what, num_done, total)


def _over(part: float, whole: float) -> float | None:
    return part / whole if whole else None
