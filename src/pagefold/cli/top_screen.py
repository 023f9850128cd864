"""What ``pagefold top`` draws of the answer of ``/v1/dashboard``: with rich, in the terminal's own colours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from pagefold.cli.printable import printable
from pagefold.cli.top_curve import whatif_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

__all__ = ["screen"]

_BLOCKS = {"held": ("█", "yellow"), "pinned": ("▓", "magenta"), "cached": ("▒", "blue"), "free": ("·", "bright_black")}
_PARTS = {
    "queue_s": ("waited", "bright_black"),
    "fetch_s": ("fetched", "magenta"),
    "prefill_s": ("prompt", "yellow"),
    "decode_s": ("output", "blue"),
}
_STEPS = " ▁▂▃▄▅▆▇█"
_MARGIN, _LEAST_BAR, _MOST_BAR, _TIME_BAR = 12, 16, 120, 24
_MOST_CAUSES, _MOST_PREFIXES, _MOST_ADVICE = 5, 4, 3
_MOST_BYTES_UNIT = 1024


def screen(told: dict[str, Any], width: int, num_requests: int, away: str = "") -> RenderableType:
    """Return the picture.

    Args:
        told: the server's answer; ``advice`` and ``whatif`` beside it where they were asked for.
        width: of the terminal, in characters.
        num_requests: how many it has room for.
        away: why the picture is old; empty where it is not.
    """
    bar = max(_LEAST_BAR, min(width - _MARGIN, _MOST_BAR))
    parts: list[RenderableType] = [Text(printable(away), "bold red")] if away else []
    parts += [_head(told), *_tiers(told, bar), _found(told, bar), _causes(told)]
    parts += [
        _evictions(told, bar),
        _prefixes(told),
        *whatif_lines(told, width),
        *_advice(told),
        _requests(told, num_requests),
    ]
    return Group(*parts)


def _head(told: dict[str, Any]) -> RenderableType:
    engine = told["engine"]
    waiting = engine["waiting_for_capacity"] + engine["waiting_for_tiers"]
    line = Text.assemble(
        ("pagefold ", "bold"),
        (printable(told["model"]), "bold"),
        f"   {engine['output_tokens_per_s']:,.1f} tokens/s out, {engine['prompt_tokens_per_s']:,.1f} of prompts"
        f"   {engine['running']:,} running, {waiting:,} waiting",
    )
    if not engine["is_healthy"]:
        line.append("   the engine is not healthy", "bold red")
    return line


def _tiers(told: dict[str, Any], bar: int) -> Iterator[RenderableType]:
    for tier in told["tiers"]:
        now = tier["now"]
        yield Rule(tier["name"], align="left", style="bright_black")
        if tier["num_blocks"]:
            shown = {name: now[name] for name in _BLOCKS if name in now}
            yield _cells(shown, tier["num_blocks"], bar)
            yield Text("  ").join(
                Text.assemble((_BLOCKS[name][0], _BLOCKS[name][1]), f" {num:,} {name}") for name, num in shown.items()
            )
        if tier["is_fast"] is not None:
            pace = "sooner than computing" if tier["is_fast"] else "computing is sooner"
            yield Text(
                f"{now['read']:,} blocks read ({_bytes(now['read_bytes'])}), {now['unread']:,} in vain, "
                f"{now['written']:,} written in ten minutes; {pace}"
            )


def _cells(shown: dict[str, int], num_blocks: int, width: int) -> Text:
    """Return blocks as cells in a row, as many of each kind as its share is."""
    line, done, total = Text(), 0, 0
    for name, num in shown.items():
        total += num
        end = min(width, max(done + 1, round(width * total / num_blocks))) if num else done
        sign, style = _BLOCKS[name]
        line.append(sign * (end - done), style)
        done = end
    return line


def _found(told: dict[str, Any], bar: int) -> RenderableType:
    lookups = told["lookups"]
    sums = {name: sum(counts) for name, counts in lookups.items()}
    asked = sum(sums.values())
    hits = sums["device"] + sums["tiers"]
    share = f"{hits / asked:.1%} found" if asked else "nobody has asked"
    told_by = f"{sums['device']:,} on the device, {sums['tiers']:,} in tiers, {sums['computed']:,} computed"
    columns = [
        None if not all_ else 1 - computed / all_
        for computed, all_ in zip(lookups["computed"], map(sum, zip(*lookups.values(), strict=True)), strict=True)
    ]
    line = Text.assemble(_spark(columns[-bar:], 1.0), style="blue")
    return Group(
        Rule("prompt tokens found, ten minutes", align="left", style="bright_black"), line, Text(f"{share}: {told_by}")
    )


def _causes(told: dict[str, Any]) -> RenderableType:
    lines = [
        Text.assemble((f"{miss['tokens']:>12,}", "yellow"), f" tokens  {miss['cause']}: {miss['told']}")
        for miss in told["misses"][:_MOST_CAUSES]
    ]
    return Group(*lines)


def _evictions(told: dict[str, Any], bar: int) -> RenderableType:
    evictions = told["evictions"]
    head = Rule("blocks evicted, ten minutes", align="left", style="bright_black")
    if not evictions:
        return Group(head, Text("none"))
    columns = [sum(counts) for counts in zip(*(one["series"] for one in evictions), strict=True)]
    line = Text(_spark(columns[-bar:], max(columns)), style="yellow")
    whose = Text(", ".join(f"{one['blocks']:,}: {one['told']}" for one in evictions))
    return Group(head, line, whose)


def _prefixes(told: dict[str, Any]) -> RenderableType:
    head = Rule("hottest prefixes", align="left", style="bright_black")
    items = [
        Text(
            f"{one['name']} {one['tokens']:,} tokens x {one['finds']:,}",
            style="" if one["is_cached"] else "bright_black",
        )
        for one in told["prefixes"][:_MOST_PREFIXES]
    ]
    return Group(head, Columns(items, padding=(0, 3)) if items else Text("none yet"))


def _advice(told: dict[str, Any]) -> Iterator[RenderableType]:
    advice = (told.get("advice") or {"data": ()})["data"][:_MOST_ADVICE]
    if advice:
        yield Rule("advice", align="left", style="bright_black")
    for one in advice:
        yield Text(f"{printable(one['told'])} {printable(one['remedy'] or '')}")


def _requests(told: dict[str, Any], most: int) -> RenderableType:
    head = Rule("last requests", align="left", style="bright_black")
    if not told["explains"]:
        return Group(head, Text("This server remembers none: it was started with --no-enable-explain."))
    requests = told["requests"][:most]
    table = Table(box=None, expand=False, pad_edge=False, header_style="bright_black")
    table.add_column("request", overflow="ellipsis", no_wrap=True, max_width=24)
    table.add_column("where its time went", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("found", justify="right", no_wrap=True)
    table.add_column("of", justify="right", no_wrap=True)
    table.add_column("out", justify="right", no_wrap=True)
    table.add_column("computed, mostly since", overflow="ellipsis", no_wrap=True)
    longest = max((_total(one) for one in requests), default=0.0)
    for one in requests:
        found = one["device_tokens"] + one["tier_tokens"]
        table.add_row(
            printable(one["id"]),
            _time_bar(one, longest),
            f"{_total(one):,.2f} s",
            f"{found:,}",
            f"{one['prompt_tokens']:,}",
            f"{one['output_tokens']:,}",
            "" if one["cause"] is None else f"{one['cause']} ({one['cause_tokens']:,})",
        )
    legend = Text("  ").join(Text.assemble(("█", style), f" {name}") for name, style in _PARTS.values())
    return Group(head, legend, table)


def _total(request: dict[str, Any]) -> float:
    return sum(float(request[part]) for part in _PARTS)


def _time_bar(request: dict[str, Any], longest_s: float) -> Text:
    line, done, spent_s = Text(), 0, 0.0
    for part, (_, style) in _PARTS.items():
        spent_s += request[part]
        end = round(_TIME_BAR * spent_s / longest_s) if longest_s else 0
        line.append("█" * (end - done), style)
        done = end
    return line


def _spark(values: Sequence[float | None], most: float) -> str:
    """Return values from 0 to ``most`` as a row of bars; a dot for None."""
    top = len(_STEPS) - 1
    return "".join("·" if value is None else _STEPS[_height(value, most, top)] for value in values)


def _height(value: float, most: float, top: int) -> int:
    """Return how many eighths high a bar is: at least one for anything but 0."""
    return max(1, round(top * value / most)) if value > 0 and most > 0 else 0


def _bytes(num: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num < _MOST_BYTES_UNIT:
            return f"{num:,.3g} {unit}"
        num /= _MOST_BYTES_UNIT
    return f"{num:,.1f} GiB"
