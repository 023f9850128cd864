"""KeepRule: which tokens of a sequence a cache group keeps, and so which of its blocks are given back while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from pagefold.kv.table import num_blocks_for

__all__ = ["KEEP_ALL", "KeepRule"]


@dataclass(frozen=True, slots=True)
class KeepRule:
    """What the layers of a group see of a sequence, as transformers defines its attention masks.

    Attributes:
        window: how many tokens a token sees at most, itself included; None for all that are before it.
        is_chunked: it sees the tokens since the last multiple of ``window`` instead.
        num_sinks: how many of the first tokens it sees beside its window, which slides then.
    """

    window: int | None = None
    is_chunked: bool = False
    num_sinks: int = 0

    def __post_init__(self) -> None:
        assert not self.num_sinks or (self.window is not None and not self.is_chunked), "sinks beside a sliding window"

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

    def first_block(self, num_blocks: int, block_size: int) -> int:
        """Return the first of so many full blocks that whoever goes on behind them needs.

        The last one always: a path goes on in it.
        """
        if self.window is None or not num_blocks:
            return 0
        return min(self.first_seen(num_blocks * block_size) // block_size, num_blocks - 1)

    def num_blocks_for(self, num_tokens: int, num_new: int, block_size: int) -> int:
        """Return the most blocks that a sequence of ``num_tokens`` holds while steps write up to ``num_new`` of them.

        The tokens that are kept seldom begin where a block does, so they lie in one block more than they fill. And one
        more is kept: the last that is published, where the sequence goes on from in the prefix tree.
        """
        num_blocks = num_blocks_for(num_tokens, block_size)
        if self.window is None:
            return num_blocks
        return min(num_blocks, num_blocks_for(self.window - 1 + num_new, block_size) + 2)


KEEP_ALL = KeepRule()
"""The rule of full attention."""
