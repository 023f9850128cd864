"""OwnText: where in a request's own tokens its last ones came before."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from pagefold.kv.continuations import MAX_COMPARED, Continuation
from pagefold.kv.gram_table import GRAM_SIZES, GramTable, num_common
from pagefold.kv.tree import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["OwnText"]

_MAX_NOTED = 1024
"""How many tokens are noted at once, so that nobody waits for a long text: what is left follows with the next calls."""
_ROOM = 64
"""There is one for each request that runs: with room to grow it takes up to 15 bytes a token and length."""


class OwnText:
    """An index over the tokens of one request, which grow.

    Args:
        sizes: how many tokens must agree, the most first.
        predicted: tokens that somebody expects in the output: searched as what came before the prompt.
    """

    def __init__(self, sizes: tuple[int, ...] = GRAM_SIZES, predicted: Sequence[int] = ()) -> None:
        self._sizes = sizes
        self._predicted = array("i", predicted).tobytes()
        self._grams = GramTable(0, sizes)
        self._num_noted = self._num_room = 0

    def after(self, token_ids: array[int], num_tokens: int) -> Continuation | None:
        """Return what followed the last of ``token_ids`` where these came last before, by the longest gram of them.

        Args:
            token_ids: of the request: those of the last call, and more.
            num_tokens: how many to return at most.
        """
        packed = self._predicted + token_ids.tobytes()
        num_all = len(packed) // TOKEN_BYTES
        self._note(packed, num_all - 1)  # the last one is followed by nothing
        least = self._sizes[-1]
        for place in self._grams.find(packed):
            end = (place + 1) * TOKEN_BYTES
            before = packed[max(0, end - MAX_COMPARED * TOKEN_BYTES) : end]
            num_matched = num_common(packed[-MAX_COMPARED * TOKEN_BYTES :], before)
            if num_matched >= least and place + 1 < num_all:
                return Continuation(packed[end : end + num_tokens * TOKEN_BYTES], num_matched)
        return None

    def _note(self, packed: bytes, num_tokens: int) -> None:
        """Note the tokens behind those that were noted, up to ``num_tokens`` in all."""
        if num_tokens > self._num_room:
            self._num_room = num_tokens + num_tokens // 2 + _ROOM
            self._grams = GramTable(self._num_room, self._sizes)
            self._num_noted = 0
        first = self._num_noted
        self._num_noted = max(first, min(num_tokens, first + _MAX_NOTED))
        self._grams.note(packed, first, range(first, self._num_noted))
