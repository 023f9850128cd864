"""Intake: an engine's slow tiers, as its door gives them blocks that somebody else computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pagefold.errors import InvalidRequestError

if TYPE_CHECKING:
    from pagefold.store.prefix_intake import Taken
    from pagefold.store.prefix_layout import PrefixLayout

__all__ = ["NO_INTAKE", "ClosedIntake", "Intake"]


class Intake(Protocol):
    """Takes blocks. Any thread may call it."""

    @property
    def layout(self) -> PrefixLayout:
        """How the engine's blocks are made.

        Raises:
            InvalidRequestError: it takes none; says why.
        """

    @property
    def tiers(self) -> list[str]:
        """The names of the tiers that blocks go to."""

    def take(self, frames: bytes) -> Taken:
        """Put blocks into all slow tiers. It waits for them; nothing is written before all blocks were found right.

        Args:
            frames: whole frames of the engine's layout, one behind the other.

        Raises:
            InvalidRequestError: one of them is not right, or the engine takes none.
            TierError: a tier cannot be used.
        """


class ClosedIntake:
    """Of an engine that takes no blocks; see :class:`Intake`.

    Args:
        why: it takes none.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    @property
    def layout(self) -> PrefixLayout:
        """See :class:`Intake`."""
        raise self._refusal()

    @property
    def tiers(self) -> list[str]:
        """See :class:`Intake`."""
        return []

    def take(self, frames: bytes) -> Taken:  # noqa: ARG002 - nobody looks at them
        """See :class:`Intake`."""
        raise self._refusal()

    def _refusal(self) -> InvalidRequestError:
        msg = f"This server takes no blocks of others: {self._why}."
        return InvalidRequestError(
            msg, remedy="Use a server with --kv-disk-path or --kv-remote-url, or warm the prompt."
        )


NO_INTAKE = ClosedIntake("it keeps none on a disk or in a pool")
"""Of engines without slow tiers; it never changes, so all of them share it."""
