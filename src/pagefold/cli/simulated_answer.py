"""What ``pagefold simulate`` shows: progress while it runs, and tables, JSON or pictures of what it found."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from pagefold.files.whole import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pagefold.sim.comparison import Comparison, Progress
    from pagefold.sim.traces import Trace

__all__ = ["print_comparison", "show_table", "shown_progress", "write_pictures"]


@contextmanager
def shown_progress(*, is_shown: bool) -> Iterator[Progress | None]:
    """Yield what draws a bar on stderr; None where nobody would see it."""
    console = Console(stderr=True)
    if not is_shown or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show


def write_pictures(comparison: Comparison, html: Path | None, png: Path | None) -> None:
    """Write the page and the picture that were asked for; neither, if one cannot be made."""
    from pagefold.sim.html import comparison_page  # noqa: PLC0415

    drawn = None
    if png is not None:
        from pagefold.sim.figure import comparison_png  # noqa: PLC0415

        drawn = comparison_png(comparison)
    if html is not None:
        comparison_page(comparison).write(html)
    if png is not None and drawn is not None:
        write_whole(png, drawn)


def print_comparison(comparison: Comparison, trace: Trace, *, as_json: bool) -> None:
    """Print what policies and sizes came to on ``trace``."""
    from pagefold.sim.answer import cache_rows, curve_rows, figures, timed_rows  # noqa: PLC0415

    if as_json:
        told = figures(comparison)
        told |= {"num_bad_lines": trace.num_bad_lines, "prompt_tokens": trace.prompt_tokens}
        typer.echo(json.dumps(told, indent=2))
        return
    console = Console()
    heading = f"{trace.name}: {len(trace.requests):,} requests, {trace.prompt_tokens:,} prompt tokens"
    console.print(heading, markup=False)
    if trace.num_bad_lines:
        console.print(f"{trace.num_bad_lines:,} bad lines were skipped. {trace.first_bad_line}", markup=False)
    more = ", and its share of Belady's" if comparison.bounds is not None else ""
    show_table(console, f"Token hit ratio by tokens of the cache{more}", cache_rows(comparison))
    if not comparison.question.is_cache_only:
        if comparison.bounds is not None:
            console.print("Bounds are of prompts alone: what was answered is cached too, and may be found beyond them.")
        show_table(console, "What requests met, in virtual time", timed_rows(comparison))
        turns = comparison.question.turns
        console.print(f"scheduling policy: {turns.scheduling_policy}, admission: {turns.admission}", markup=False)
    if comparison.curves is not None:
        show_table(console, "Miss-ratio curve of LRU", curve_rows(comparison))
        console.print(f"mean absolute error of the sampled curve: {comparison.curves.error:.5f}")


def show_table(console: Console, title: str, rows: list[list[str]]) -> None:
    """Print a table with its head; the title is not bound to its width."""
    head, *body = rows
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for index, name in enumerate(head):
        table.add_column(name, justify="left" if index == 0 else "right", header_style="cyan", no_wrap=True)
    for row in body:
        table.add_row(*row)
    console.print(f"\n{title}", style="italic", highlight=False, markup=False)
    console.print(table)
