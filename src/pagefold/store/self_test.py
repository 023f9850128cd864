"""What a tier is found to be when the server starts: whether it works, and how fast it is."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SelfTest"]


class SelfTest(NamedTuple):
    """The verdict on a tier.

    Attributes:
        tier: which.
        is_ok: it keeps what it is given, and notices what was changed.
        latency_s: until the first byte.
        read_bytes_per_s, write_bytes_per_s: from then on.
        told: one line for people.
    """

    tier: str
    is_ok: bool
    latency_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    told: str
