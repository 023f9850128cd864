"""Limit: up to how many tokens a model is computed, and what ends that."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MAX_ROPE_POSITIONS", "Limit"]

MAX_ROPE_POSITIONS = 2**20
"""The last position that a rope is asked for where a model's own do not end it. Angles are float32, as models have
them: from here on they are rounded by more than a sixteenth of a radian, and a text says something else than before."""


class Limit(NamedTuple):
    """Up to ``length`` tokens a model is computed rightly; ``what`` of it ends that, as half a sentence.

    Attributes:
        length: in tokens.
        what: empty where nothing ends it before the positions that the model was made for, or what was asked.
        setting: what of the config ends it there, and would not if it were left out; empty where nothing would.
    """

    length: int
    what: str = ""
    setting: str = ""

    @property
    def why(self) -> str:
        """What is not computed behind it, as a sentence without an end; empty where nothing is amiss."""
        if not self.what:
            return ""
        return f"{self.what} is not computed {f'while {self.setting} is set' if self.setting else 'yet'}"

    def or_without(self, remedy: str) -> str:
        """Return what to do, a sentence; where that helps also to leave the setting out."""
        return f"{remedy}, or start without {self.setting}." if self.setting else f"{remedy}."
