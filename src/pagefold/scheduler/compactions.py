"""Compactions: after how many turns clients put something shorter in the place of a history, by tenant.

A history that will be compacted before the next prompt is of no use to it, but for its beginning. Clients compact by a
rule (every so many turns, or when a context is full, which takes about as many), so how often histories of as many
turns were compacted tells how likely it is.
"""

from __future__ import annotations

__all__ = ["Compactions"]

_MOST_TURNS = 1024
_ENOUGH = 64.0
"""Histories of as many turns that are remembered, about: where there are more, older ones count less."""

_DOUBT = 1.0
"""Histories that were not compacted, of any number of turns, that nobody has seen: so one compaction proves little."""


class Compactions:
    """How often histories were compacted, by how many turns they had."""

    __slots__ = ("_num_cut", "_num_seen")

    def __init__(self) -> None:
        self._num_seen: dict[int, float] = {}
        self._num_cut: dict[int, float] = {}

    def see(self, num_turns: int, *, is_cut: bool) -> None:
        """Note what became of a history of so many turns: whether the next prompt was shorter than its last one."""
        if num_turns > _MOST_TURNS:
            return
        num_seen = self._num_seen.get(num_turns, 0.0)
        num_cut = self._num_cut.get(num_turns, 0.0)
        if num_seen >= _ENOUGH:
            num_seen, num_cut = 0.5 * num_seen, 0.5 * num_cut
        self._num_seen[num_turns] = num_seen + 1.0
        self._num_cut[num_turns] = num_cut + is_cut

    def risk(self, num_turns: int) -> float:
        """Return how likely a history of so many turns is compacted before the next prompt: at least 0, below 1."""
        return self._num_cut.get(num_turns, 0.0) / (self._num_seen.get(num_turns, 0.0) + _DOUBT)
