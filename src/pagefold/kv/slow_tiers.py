"""SlowTiers: what is behind the host arena: what is brought from there (``fetches.py``) and written (``writes.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.arbiter import Arbiter
from pagefold.kv.fetches import Fetches
from pagefold.kv.host_tier import NO_HOST
from pagefold.kv.writes import Writes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.kv.host_tier import HostTier
    from pagefold.kv.writes import WritePolicy

__all__ = ["NO_SLOW_TIERS", "SlowTiers"]


class SlowTiers:
    """What moves between the host arena and slower tiers.

    Args:
        host: the arena's blocks.
        policy: when what the arena holds is written.
        arbiter: whether loading pays.

    Attributes:
        is_on: whether there are any.
        host, arbiter: as given.
        fetches: what is brought.
        writes: what is written.
    """

    is_on = True

    def __init__(self, host: HostTier, policy: WritePolicy, arbiter: Arbiter) -> None:
        self.host = host
        self.arbiter = arbiter
        self.fetches = Fetches(host.blocks, arbiter, host.notes)
        self.writes = Writes(host.blocks, policy)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is on its way, in or out."""
        return self.fetches.is_quiet and self.writes.is_quiet

    def pins(self) -> Iterator[int]:
        """Yield the host block of every pin that transfers and waiting requests have."""
        yield from self.fetches.pins()
        yield from self.writes.pins()


class _NoSlowTiers(SlowTiers):
    """No slow tiers: nothing moves, and nobody waits."""

    is_on = False


NO_SLOW_TIERS: SlowTiers = _NoSlowTiers(NO_HOST, "write_back", Arbiter(1, 1, compute_s_per_token=0.0))
"""No slow tiers; it never changes, so all cores without some share it."""
