"""AskedTools: what a request says of tools, whichever API it came by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.server.tools.schemas import Tool, WhichTool

__all__ = ["AskedTools"]


@dataclass(frozen=True, slots=True)
class AskedTools:
    """What a request says of tools.

    Attributes:
        tools: all that the model hears of.
        which: whether it must call, and what it may.
        is_parallel: whether one answer may have several calls.
    """

    tools: Sequence[Tool]
    which: WhichTool
    is_parallel: bool
