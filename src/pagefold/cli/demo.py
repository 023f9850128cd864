"""``pagefold demo``: the real scheduler and cache at work on generated chats. No model, no torch."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pagefold.cli.fail import fail
from pagefold.errors import ConfigError, PagefoldError
from pagefold.sim import ChatWorkload, Report, SimConfig, simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.sim import PoolSample

__all__ = ["demo", "demo_svg"]

_NUM_BLOCKS, _NUM_CHATS = 800, 160

_PICTURE_WIDTH = 64
_PICTURE_HEIGHT = 8
_SVG_WIDTH = 84
_CELLS = {"active": ("█", "cyan"), "cached": ("▒", "yellow"), "free": ("·", "bright_black")}

_ROWS: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("prompt tokens asked for", lambda report: f"{report.num_asked_tokens:,}"),
    ("  found in the cache (prefix hits)", lambda report: f"{report.num_hit_tokens:,} ({report.hit_share:.0%})"),
    ("  computed", lambda report: f"{report.num_computed_tokens:,}"),
    ("blocks evicted for new tokens", lambda report: f"{report.num_evictions.get('allocation', 0):,}"),
    ("requests preempted", lambda report: f"{report.num_preemptions:,}"),
    ("blocks in use, mean and peak", lambda report: f"{report.mean_use:.0%}, {report.peak_use:.0%}"),
    ("waste: positions in use that hold no token", lambda report: f"{report.waste:.1%}"),
    ("virtual time to first token, p50", lambda report: f"{report.ttft_p50_s * 1e3:,.0f} ms"),
    ("virtual time to first token, p95", lambda report: f"{report.ttft_p95_s * 1e3:,.0f} ms"),
)
_CAPTION = """\
Waste is what rounding to blocks costs: less than a block a request,
and a larger share of the fewer blocks that sharing leaves in use."""


def demo(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    num_blocks: Annotated[int, typer.Option(min=1, help="Blocks of the KV pool, 16 tokens each.")] = _NUM_BLOCKS,
    num_chats: Annotated[int, typer.Option(min=1, max=5000, help="Chats of the generated workload.")] = _NUM_CHATS,
    seed: Annotated[int, typer.Option(help="Of the generated workload.")] = 0,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the table and the blocks into FILE.")] = None,
) -> None:
    """Replay generated chats through the real scheduler and KV cache, with and without prefix sharing.

    A null runner stands in for the model, and time is virtual: nothing is downloaded, nothing heavy is imported.
    """
    try:
        shown = _Demo.of(num_blocks=num_blocks, num_chats=num_chats, seed=seed)
    except PagefoldError as error:
        fail(error)
    if svg is not None:
        _save(shown.svg(), svg)
    if as_json:
        typer.echo(json.dumps(shown.figures(), indent=2))
    else:
        Console().print(shown.screen())


def demo_svg() -> str:
    """Return what ``pagefold demo`` shows by default, as a picture: that of the README."""
    return _Demo.of(num_blocks=_NUM_BLOCKS, num_chats=_NUM_CHATS, seed=0).svg()


@dataclass(frozen=True, slots=True)
class _Demo:
    """One workload, replayed with prefix sharing and without."""

    workload: ChatWorkload
    config: SimConfig
    shared: Report
    unshared: Report

    @classmethod
    def of(cls, *, num_blocks: int, num_chats: int, seed: int) -> _Demo:
        workload = ChatWorkload(num_chats=num_chats, seed=seed)
        sharing = SimConfig(num_blocks=num_blocks, admission="prompt")
        alone = SimConfig(num_blocks=num_blocks, admission="prompt", enable_prefix_caching=False)
        return cls(workload, sharing, simulate(workload.requests(), sharing), simulate(workload.requests(), alone))

    def screen(self) -> Group:
        heading = _heading(self.workload, self.config, self.shared)
        return Group(heading, _table(self.shared, self.unshared), _picture(self.shared.samples))

    def svg(self) -> str:
        console = Console(record=True, width=_SVG_WIDTH, file=StringIO(), force_terminal=True)
        console.print(self.screen())
        # rich would have the picture fetch its fonts from somewhere: any monospaced one will do.
        return re.sub(r"@font-face\s*{[^}]*}\s*", "", console.export_svg(title="pagefold demo")) + "\n"

    def figures(self) -> dict[str, Any]:
        return {
            "workload": asdict(self.workload),
            "config": asdict(self.config),
            "sharing": self.shared.figures(),
            "no_sharing": self.unshared.figures(),
        }


def _save(drawn: str, file: Path) -> None:
    try:
        file.write_text(drawn, encoding="utf-8")
    except OSError as error:
        msg = f"Cannot write {file}: {error.strerror}."
        fail(ConfigError(msg, remedy="Name a file in a folder that can be written."))


def _heading(workload: ChatWorkload, config: SimConfig, report: Report) -> Text:
    return Text(
        f"{workload.num_chats} chats under {workload.num_system_prompts} system prompts: {report.num_requests} "
        f"requests in {report.duration_s:.0f} virtual seconds;\n"
        f"{config.num_blocks:,} blocks of {config.block_size} tokens. "
        "The scheduler and the cache are real, the model is not.\n"
    )


def _table(shared: Report, unshared: Report) -> Table:
    table = Table("", box=None, pad_edge=False, caption=_CAPTION, caption_justify="left")
    table.add_column("with prefix sharing", justify="right", style="bold")
    table.add_column("without", justify="right")
    for what, show in _ROWS:
        table.add_row(what, show(shared), show(unshared))
    return table


def _picture(samples: tuple[PoolSample, ...]) -> Text:
    """Draw the pool over time: a column a moment, from the bottom up what is active, cached and free."""
    columns = [_column(bucket) for bucket in _buckets(samples)]
    picture = Text("\nblocks over time, with prefix sharing:  ")
    for name, (cell, style) in _CELLS.items():
        picture.append(cell, style=style).append(f" {name}  ")
    for height in reversed(range(_PICTURE_HEIGHT)):
        picture.append("\n  ")
        for column in columns:
            cell, style = _CELLS[column[height]]
            picture.append(cell, style=style)
    return picture


def _buckets(samples: tuple[PoolSample, ...]) -> list[list[PoolSample]]:
    """Cut the samples at equal spans of time; a span without steps shows the one before it."""
    begin_s, end_s = samples[0].time_s, samples[-1].time_s
    span_s = (end_s - begin_s) / _PICTURE_WIDTH or 1.0
    buckets: list[list[PoolSample]] = [[] for _ in range(_PICTURE_WIDTH)]
    for sample in samples:
        buckets[min(_PICTURE_WIDTH - 1, int((sample.time_s - begin_s) / span_s))].append(sample)
    for index in range(1, _PICTURE_WIDTH):
        buckets[index] = buckets[index] or buckets[index - 1]
    return buckets


def _column(bucket: list[PoolSample]) -> list[str]:
    """Return what each cell of a column shows, from the bottom up."""
    num_active = sum(sample.num_active for sample in bucket)
    num_known = num_active + sum(sample.num_cached for sample in bucket)
    num_blocks = num_known + sum(sample.num_free for sample in bucket)
    active = round(_PICTURE_HEIGHT * num_active / num_blocks)
    known = round(_PICTURE_HEIGHT * num_known / num_blocks)
    return ["active"] * active + ["cached"] * (known - active) + ["free"] * (_PICTURE_HEIGHT - known)
