"""NearestPrompts: of many texts, the one that a text shares its longest beginning with.

In lexicographic order, whatever the order of single tokens, that is a neighbour of where the text would stand. So texts
are kept sorted, as packed bytes, and one search finds it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

from pagefold.kv import TOKEN_BYTES

if TYPE_CHECKING:
    from pagefold.observe.request_record import RequestRecord

__all__ = ["Nearest", "NearestPrompts", "common_prefix"]

_MOST_LOOKED_AT = 16
"""So many neighbours to either side are looked at, of those that share equally much."""


class Nearest(NamedTuple):
    """The nearest text.

    Attributes:
        record: whose text it is.
        num_common: how many first tokens are equal.
        goes_on: whether its prompt goes on behind those, in another way; else it has ended there, or an answer of the
            model begins.
    """

    record: RequestRecord
    num_common: int
    goes_on: bool


def common_prefix(one: bytes, other: bytes) -> int:
    """Return how many first tokens of two packed texts are equal."""
    end = min(len(one), len(other))
    low, step = 0, 256
    while low < end:  # in growing pieces, and in halves where one differs
        high = min(low + step, end)
        if one[low:high] == other[low:high]:
            low, step = high, step * 4
        elif high - low == 1:
            break
        else:
            step, end = (high - low) // 2, high
    return low // TOKEN_BYTES


class NearestPrompts:
    """Texts of requests, each with its request. Of equal texts each is one."""

    def __init__(self) -> None:
        self._texts: list[bytes] = []
        self._records: list[RequestRecord] = []

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, record: RequestRecord) -> None:
        """Take a request's text up."""
        at = bisect_left(self._texts, record.text)
        self._texts.insert(at, record.text)
        self._records.insert(at, record)

    def remove(self, record: RequestRecord) -> None:
        """Let go of a request's text, which is as it was taken up."""
        at = bisect_left(self._texts, record.text)
        while self._records[at] is not record:  # equal texts stand side by side
            at += 1
        del self._texts[at], self._records[at]

    def nearest(self, text: bytes) -> Nearest | None:
        """Return the nearest one; None where no text begins with the same token. Of equals one that goes on."""
        at = bisect_left(self._texts, text)
        best: Nearest | None = None
        for places in (range(at - 1, -1, -1), range(at, len(self._texts))):
            for place in places[:_MOST_LOOKED_AT]:
                num_common = common_prefix(text, self._texts[place])
                if num_common < (1 if best is None else best.num_common):
                    break
                record = self._records[place]
                goes_on = record.goes_on_at(num_common)
                if best is None or (num_common, goes_on) > (best.num_common, best.goes_on):
                    best = Nearest(record, num_common, goes_on)
        return best
