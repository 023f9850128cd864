"""TargetCheck: targets that this machine cannot keep, found at the start by what a step takes alone.

It is told and not refused: a machine that is busy while it is measured may keep its targets later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefold.scheduler import Targets

__all__ = ["broken_targets"]

_ROOM = 1.2
"""What can be kept is said with so much room over what was measured."""


def broken_targets(targets: Targets, step_s: float) -> list[str]:
    """Return a sentence of each target that is never kept, with what was measured and what can be kept.

    Args:
        targets: of the server.
        step_s: seconds of a step of one token, which is what a request waits at least for each of its tokens.
    """
    told = {
        "--target-ttft-ms": (targets.ttft_s, "the shortest prompt"),
        "--target-itl-ms": (targets.itl_s, "a token of one request alone"),
    }
    return [
        f"{flag} is {1e3 * target_s:g}, which cannot be kept here: {what} takes {1e3 * step_s:.3g} ms. "
        f"{1e3 * _ROOM * step_s:.3g} may be."
        for flag, (target_s, what) in told.items()
        if target_s is not None and step_s > target_s
    ]
