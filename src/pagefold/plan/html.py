"""A plan as a page: the tables of the report, and charts of memory, concurrency and techniques."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.pages.chart import Bar, bars, stacked
from pagefold.pages.page import Page
from pagefold.plan.ledger import entries_of
from pagefold.plan.report import headline, notes, sections, technique_rows

if TYPE_CHECKING:
    from pagefold.plan.plan import Plan

__all__ = ["TECHNIQUE_HEAD", "plan_page"]

TECHNIQUE_HEAD = ("technique", "gain", "flags", "worth a month", "costs and notes")


def plan_page(plan: Plan) -> Page:
    """Return the page of a plan."""
    page = Page(f"Plan: {headline(plan)}")
    device = plan.memory.tightest
    page.heading("Memory of the device that binds")
    entries = entries_of(plan.memory, device, plan.question.device)
    parts = [Bar(entry.what, entry.span.likely, entry.size) for entry in entries]
    page.chart(stacked(parts, "Memory of a device"))
    page.heading("Requests at once")
    load = plan.load
    longest = plan.memory.max_concurrency
    counts = [
        Bar(f"of max_model_len ({plan.memory.max_model_len:,})", longest, f"{longest:,.1f}"),
        Bar("of the workload, at full length", load.full, f"{load.full:,.1f}"),
        Bar("of the workload, as reached", load.reached.mean, f"{load.reached.mean:,.1f}"),
    ]
    if load.workload.prefix_len:
        counts.append(Bar("with the prefix held once", load.reached_shared.mean, f"{load.reached_shared.mean:,.1f}"))
    page.chart(bars(counts, "Requests at once"))
    for section in sections(plan):
        page.heading(section.title)
        page.table(section.rows)
    page.heading("What more could be had, the best first")
    if plan.techniques:
        gains = [
            Bar(each.name, each.gain_per_device, f"{each.gain_per_device:.2f} x")
            for each in plan.techniques
            if each.gain_per_device > 1
        ]
        page.chart(bars(gains, "Requests for each device, times as many"))
    page.table(technique_rows(plan), TECHNIQUE_HEAD)
    for note in notes(plan):
        page.text(note)
    page.text(f"Model: {plan.question.shape.source}. Device: {plan.question.device.source}.")
    return page
