"""Pieces: what a model's text consists of, in the order in which it comes, whatever API tells it.

Text pieces beside each other are one text; a call has begun before its arguments come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["ArgumentsPiece", "CallBegun", "Piece", "ReasoningPiece", "TextPiece"]


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """Text of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text of the answer: neither thinking nor a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call begins.

    Attributes:
        index: counts the calls of the output, from 0.
        name: of the function.
    """

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """Some of the text of a call's arguments, as the model wrote it."""

    index: int
    text: str


Piece: TypeAlias = ReasoningPiece | TextPiece | CallBegun | ArgumentsPiece
