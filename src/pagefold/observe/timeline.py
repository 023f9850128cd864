"""Timeline: the last ten minutes, counted in pieces of five seconds.

Whoever calls holds a lock. Labels are words of ours, never what clients choose: so it is bounded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["NUM_PIECES", "PIECE_S", "BlockUse", "Timeline"]

PIECE_S = 5.0
NUM_PIECES = 120
_NUM_RECENT = 2
"""Whole pieces beside the one that has begun, by which it is told how fast something goes now."""


class BlockUse(NamedTuple):
    """Who has the blocks of the device and the tiers behind it at a moment.

    Attributes:
        num_held: of the device, that requests hold.
        num_pinned: that no request holds and a pin keeps.
        num_cached: that neither has, and a later request can use.
        num_host: of the host's memory, that are found there.
        num_slow: of each slow tier that knows it, that are found there.
    """

    num_held: int
    num_pinned: int
    num_cached: int
    num_host: int
    num_slow: Mapping[str, int] = MappingProxyType({})


@dataclass(slots=True)
class _Piece:
    """Five seconds.

    Attributes:
        number: of pieces, since the clock's zero.
        counts: by series and label.
        use: at its end, as far as it is known.
    """

    number: int
    counts: dict[tuple[str, str], float] = field(default_factory=dict)
    use: BlockUse | None = None


class Timeline:
    """Counts what happens, and remembers who had the blocks.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pieces: deque[_Piece] = deque()  # those in which something happened; the first first
        self._use_before: BlockUse | None = None  # of the last piece that is forgotten

    def count(self, series: str, label: str, num: float = 1) -> None:
        """Count so many of something now."""
        if num:
            counts = self._now().counts
            key = series, label
            counts[key] = counts.get(key, 0) + num

    def sample(self, use: BlockUse) -> None:
        """Remember who has the blocks now. It holds until the next sample."""
        self._now().use = use

    def series(self, name: str) -> dict[str, list[float]]:
        """Return what was counted in each piece, by label, the newest last; what never happened has no label."""
        first = self._first()
        found: dict[str, list[float]] = {}
        for piece in self._pieces:
            if piece.number < first:
                continue
            for (series, label), num in piece.counts.items():
                if series == name:
                    found.setdefault(label, [0] * NUM_PIECES)[piece.number - first] += num
        return found

    def uses(self) -> list[BlockUse | None]:
        """Return who had the blocks at the end of each piece, the newest last; None before anything is known."""
        first = self._first()
        known, uses = self._use_before, []
        by_number = {piece.number: piece.use for piece in self._pieces if piece.use is not None}
        for number, use in by_number.items():
            if number < first:
                known = use
        for number in range(first, first + NUM_PIECES):
            known = by_number.get(number, known)
            uses.append(known)
        return uses

    def rate(self, series: str, label: str) -> float:
        """Return how many of something a second there were lately: in the last ten to fifteen seconds."""
        now_s = self._clock()
        first = int(now_s // PIECE_S) - _NUM_RECENT
        num = sum(piece.counts.get((series, label), 0) for piece in self._pieces if piece.number >= first)
        return num / (now_s - first * PIECE_S)

    def _first(self) -> int:
        return int(self._clock() // PIECE_S) - NUM_PIECES + 1

    def _now(self) -> _Piece:
        """Return the piece that has begun, and forget what is too long ago."""
        number = int(self._clock() // PIECE_S)
        if self._pieces and self._pieces[-1].number >= number:
            return self._pieces[-1]
        piece = _Piece(number)
        self._pieces.append(piece)
        while self._pieces[0].number <= number - NUM_PIECES:
            self._use_before = self._pieces.popleft().use or self._use_before
        return piece
