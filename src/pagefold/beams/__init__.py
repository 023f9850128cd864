"""Beams: the likeliest outputs of a prompt, searched side by side on shared blocks."""

from pagefold.beams.group import BeamGroup
from pagefold.beams.search import BeamSearch, EarlyStopping, Hypothesis, Move

__all__ = ["BeamGroup", "BeamSearch", "EarlyStopping", "Hypothesis", "Move"]
