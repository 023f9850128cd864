"""What ``pagefold top`` draws of ``/v1/cache/whatif``: bars of what other sizes and policies would find."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from pagefold.cli.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import RenderableType

__all__ = ["whatif_lines"]

_TIMES = (0.5, 1.0, 2.0, 4.0)
"""Sizes that are drawn, in caches of today: those at which every policy is known."""
_USED_STYLE, _OTHER_STYLE, _REST_STYLE = "blue", "yellow", "bright_black"
_BESIDE_BARS, _LEAST_BAR, _MOST_BAR = 40, 8, 40


def whatif_lines(told: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """Yield what is drawn of the curve; or why there is none; nothing where nobody has asked yet.

    Args:
        told: ``whatif`` is the server's answer or None, and ``whatif_why`` says why.
        width: of the terminal, in characters.
    """
    if "whatif" not in told:
        return
    yield Rule("what if the cache were larger", align="left", style=_REST_STYLE)
    curve = told["whatif"]
    if curve is None:
        yield Text(printable(told["whatif_why"]))
        return
    policies = curve["policies"]
    if policies:
        yield _bars(curve, width)
    yield Text(printable(curve["told"]))


def _bars(curve: Mapping[str, Any], width: int) -> RenderableType:
    """Return a row a size, with a bar for the policy in use, and one for the best other one at today's size."""
    num_blocks = curve["num_blocks"]
    policies = curve["policies"]
    used = next((one for one in policies if one["is_used"]), policies[0])
    others = [one for one in policies if one is not used]
    best = max(others, key=lambda one: _ratios(one).get(num_blocks, 0.0), default=None)
    bar = max(_LEAST_BAR, min(_MOST_BAR, (width - _BESIDE_BARS) // 2))
    table = Table(box=None, pad_edge=False, header_style=_REST_STYLE)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("blocks", justify="right", no_wrap=True)
    table.add_column(f"{used['policy']}{', in use' if used['is_used'] else ''}", no_wrap=True)
    if best is not None:
        table.add_column(f"{best['policy']}, the best other", no_wrap=True)
    for times in _TIMES:
        size = max(1, round(times * num_blocks))
        row = [Text(f"x {times:g}"), Text(f"{size:,}"), _bar(_ratios(used).get(size), bar, _USED_STYLE)]
        if best is not None:
            row.append(_bar(_ratios(best).get(size), bar, _OTHER_STYLE))
        table.add_row(*row, style="bold" if times == 1 else "")
    return table


def _ratios(policy: Mapping[str, Any]) -> dict[int, float]:
    """Return what a policy would find, 0 to 1, by blocks."""
    return {point["num_blocks"]: point["hit_ratio"] for point in policy["points"]}


def _bar(ratio: float | None, width: int, style: str) -> Text:
    """Return a bar of so many characters for all, and the share beside it; of what is not known, only that."""
    if ratio is None:
        return Text("not known", _REST_STYLE)
    full = max(1, round(width * ratio)) if ratio > 0 else 0
    return Text.assemble(("█" * full, style), ("·" * (width - full), _REST_STYLE), f" {ratio:6.1%}")
