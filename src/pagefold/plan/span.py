"""Span: bytes that are known to lie between two ends, and what is likeliest of them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GIB", "NOTHING", "Span"]

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Span:
    """A number of bytes as far as it is known.

    Attributes:
        low: at least.
        likely: what is planned with.
        high: at most.
    """

    low: int
    likely: int
    high: int

    @classmethod
    def exactly(cls, num_bytes: int) -> Span:
        """Return the span of what is known to the byte."""
        return cls(num_bytes, num_bytes, num_bytes)

    @classmethod
    def of_gib(cls, low: float, likely: float, high: float) -> Span:
        """Return the span of so many GiB."""
        return cls(*(round(each * GIB) for each in (low, likely, high)))

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.likely + other.likely, self.high + other.high)

    @property
    def is_exact(self) -> bool:
        """Whether both ends are one."""
        return self.low == self.high


NOTHING = Span(0, 0, 0)
