"""KeepRule: which tokens of a sequence a cache group keeps, and so which of its blocks are given back while it runs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KEEP_ALL", "KeepRule"]


@dataclass(frozen=True, slots=True)
class KeepRule:
    """What the layers of a group see of a sequence, as transformers defines its attention masks.

    Attributes:
        window: how many tokens a token sees at most, itself included; None for all that are before it.
        is_chunked: it sees the tokens since the last multiple of ``window`` instead.
    """

    window: int | None = None
    is_chunked: bool = False

    @property
    def trims(self) -> bool:
        """Whether tokens are left behind for good, when a sequence has grown beyond them."""
        return self.window is not None

    def first_seen(self, position: int) -> int:
        """Return the first position that the token at ``position`` sees; what lies before nobody behind it sees."""
        if self.window is None:
            return 0
        if self.is_chunked:
            return position - position % self.window
        return max(0, position + 1 - self.window)


KEEP_ALL = KeepRule()
"""The rule of full attention."""
