"""The pictures of docs/, drawn from what the real core and scheduler do: when they change, so do these."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pictures.blocks import blocks, lifecycle
from pictures.packing import packing
from pictures.scheduling import preemption, walk
from pictures.sharing import promises, tree
from pictures.starts import starts

if TYPE_CHECKING:
    from collections.abc import Callable

    from svg import Drawing

__all__ = ["PICTURES"]

PICTURES: dict[str, Callable[[], Drawing]] = {
    "blocks": blocks,
    "lifecycle": lifecycle,
    "packing": packing,
    "preemption": preemption,
    "promises": promises,
    "starts": starts,
    "tree": tree,
    "walk": walk,
}
