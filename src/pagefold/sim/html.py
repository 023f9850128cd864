"""A comparison as a page: its tables, hit ratio by size, and what happened over time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.pages.chart import Line, lines
from pagefold.pages.page import Page
from pagefold.sim.answer import OVER_TIME, cache_rows, curve_rows, over_time, run_name, timed_rows
from pagefold.sim.report import Report

if TYPE_CHECKING:
    from pagefold.sim.comparison import Comparison

__all__ = ["comparison_page", "size_lines"]


def comparison_page(comparison: Comparison) -> Page:
    """Return the page of a comparison."""
    question = comparison.question
    page = Page(f"Simulation: {question.name}")
    mode = "cache only" if question.is_cache_only else "the real scheduler and cache under a virtual clock"
    page.text(f"{len(question.requests):,} requests; {mode}; blocks of {question.block_size} tokens.")
    page.heading("Token hit ratio by size of the cache")
    head, *rows = cache_rows(comparison)
    page.table(rows, head)
    page.chart(lines(size_lines(comparison), "Token hit ratio by size", x_unit="tokens", y_unit="token hit ratio"))
    timed = [run for run in comparison.runs if isinstance(run.report, Report)]
    if timed:
        page.heading("What requests met")
        head, *rows = timed_rows(comparison)
        page.table(rows, head)
        for plot in OVER_TIME:
            page.heading(f"{plot.title} over time")
            drawn = [
                Line(run_name(run), over_time(run.report, plot.name)) for run in timed if isinstance(run.report, Report)
            ]
            page.chart(lines(drawn, plot.title, x_unit="s", y_unit=plot.unit))
    if comparison.curves is not None:
        curves = comparison.curves
        page.heading("Miss-ratio curve of LRU")
        head, *rows = curve_rows(comparison)
        page.table(rows, head)
        page.text(f"Mean absolute error of the sampled curve, over {len(curves.sizes)} sizes: {curves.error:.5f}.")
        drawn = [
            Line("exact", [(size, 1 - curves.exact.at(size)) for size in curves.sizes]),
            Line(f"sampled at {curves.sampled.rate:g}", [(size, 1 - curves.sampled.at(size)) for size in curves.sizes]),
        ]
        page.chart(lines(drawn, "Miss-ratio curve", x_unit="tokens", y_unit="miss ratio"))
    return page


def size_lines(comparison: Comparison) -> list[Line]:
    """Return the hit ratio of each policy by size, and the bounds."""
    policies = dict.fromkeys(run.policy for run in comparison.runs)
    drawn = [
        Line(name, sorted((run.cache_tokens, run.token_hit_ratio) for run in comparison.runs if run.policy == name))
        for name in policies
    ]
    if comparison.bounds is not None:
        drawn.append(Line("Belady", sorted(comparison.bounds.belady.items())))
        sizes = sorted(comparison.bounds.belady)
        drawn.append(Line("infinite", [(size, comparison.bounds.infinite) for size in sizes]))
    return drawn
