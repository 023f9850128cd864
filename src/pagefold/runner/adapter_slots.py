"""AdapterSlots: where a decoder has the weights of adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pagefold.adapters import AdapterWeights

__all__ = ["AdapterSlots", "PackedWeights"]


class PackedWeights(Protocol):
    """An adapter as a decoder has it."""

    @property
    def num_bytes(self) -> int:
        """That it takes."""


class AdapterSlots(Protocol):
    """The adapters of a decoder, by slot, from 1 on."""

    def pack(self, weights: AdapterWeights) -> PackedWeights:
        """Return an adapter as the decoder has it. Any thread may call it."""

    def put(self, slot: int, packed: Any) -> None:  # noqa: ANN401 - what its own pack returned
        """Put an adapter into a free slot, between steps."""

    def drop(self, slot: int) -> None:
        """Let go of the adapter in a slot, between steps; no request has it any more."""
