"""What crosses between who decides about slow tiers and who moves blocks: outcomes, and the protocol of a transfer.

``scheduler/tiering.py`` decides; ``store/transfer_threads.py`` moves blocks, ``sim/tiers.py`` as if in virtual time.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pagefold.kv.fetches import Fetch
    from pagefold.kv.names import BlockName
    from pagefold.kv.ops import FetchOp, WriteOp

__all__ = ["Fetched", "Found", "MissCause", "Outcome", "StoreError", "TierUse", "Transfers", "Written"]


class StoreError(Exception):
    """A store cannot be used now: its machine does not answer, or its disk fails. Nothing of the call counts."""


class MissCause(StrEnum):
    """Why a block did not come from a tier."""

    ABSENT = "absent"
    DAMAGED = "damaged"
    OTHER_VERSION = "other_version"
    OTHER_LAYOUT = "other_layout"
    OTHER_NAMESPACE = "other_namespace"
    OTHER_BLOCK = "other_block"
    IO_ERROR = "io_error"
    LATE = "late"


class Fetched(NamedTuple):
    """Blocks were brought, or not.

    Attributes:
        tier: the tier that was asked.
        ops: which were asked for.
        found: for each of ``ops`` the block's checksum, or why it could not be had.
        seconds: how long it took, as if the tier had done nothing else meanwhile.
        notes: what came with some of the blocks, by host block: see :class:`~pagefold.kv.WriteOp`.
    """

    tier: str
    ops: Sequence[FetchOp]
    found: Sequence[bytes | MissCause]
    seconds: float
    notes: Mapping[int, bytes] = MappingProxyType({})


class Found(NamedTuple):
    """A tier has said how much of what was asked for it probably has.

    Attributes:
        tier: the tier that was asked.
        ticket: of the question.
        num_blocks: so many, from the first on.
    """

    tier: str
    ticket: int
    num_blocks: int


class Written(NamedTuple):
    """Blocks were given to the tiers.

    Attributes:
        ops: what was to be written.
        num_kept: how many of them at least one tier keeps.
        kept: how many each tier keeps.
        seconds: how long each tier took.
    """

    ops: Sequence[WriteOp]
    num_kept: int
    kept: Mapping[str, int] = MappingProxyType({})
    seconds: Mapping[str, float] = MappingProxyType({})


Outcome = Fetched | Found | Written


class TierUse(NamedTuple):
    """What a slow tier has of this model and layout now.

    Attributes:
        num_held: blocks.
        num_blocks: as many as there can be at most.
    """

    num_held: int
    num_blocks: int


class Transfers(Protocol):
    """Moves blocks between the host arena and slow tiers, and says what became of them. Nothing here decides.

    A host block belongs to a transfer from when it is handed over until its outcome is collected.

    Attributes:
        notify: called, on any thread, whenever there is something to collect.
    """

    notify: Callable[[], None]

    @property
    def tiers(self) -> Sequence[str]:
        """The names of the slow tiers, faster ones first."""

    def uses(self) -> Mapping[str, TierUse]:
        """Return what tiers have, by name: those that know without asking anybody. Plain reads, so any thread may."""

    def count(self, tier: str, names: Sequence[BlockName]) -> int:
        """Return how many of ``names``, from the first on, a tier that answers at once has."""

    def look(self, tier: str, names: Sequence[BlockName], ticket: int) -> None:
        """Ask a tier that does not answer at once how much of ``names`` it has."""

    def fetch(self, fetch: Fetch) -> None:
        """Bring what a fetch lacks. What is not begun when the fetch is over is not brought."""

    def write(self, ops: Sequence[WriteOp]) -> None:
        """Give blocks to all tiers."""

    def collect(self, timeout_s: float = 0.0) -> list[Outcome]:
        """Return what has happened, in order; wait up to ``timeout_s`` for something to happen."""

    def forget(self, digests: Sequence[bytes]) -> None:
        """Have all tiers forget these blocks, also what was handed over to be written before. Waits for nothing.

        A tier that cannot be used keeps them.
        """

    def clear(self) -> None:
        """Have all tiers forget everything, also what was handed over to be written before. Blocks.

        Raises:
            StoreError: a tier could not; what it holds may be found again.
        """

    def close(self, timeout_s: float = 0.0) -> None:
        """Close all tiers. What is not begun is left out; what is begun is waited for as long as ``timeout_s``."""
