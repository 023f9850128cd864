"""PrefixIntake: the slow tiers of an engine that runs, as they take blocks that somebody else computed.

What is in a slow tier, nothing else in an engine has written down: a request that arrives asks the tiers. So blocks can
be put there at any time, beside whatever runs; the next request that begins so finds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import InvalidRequestError, TierError
from pagefold.kv.names import path_digest
from pagefold.kv.transfers import MissCause, StoreError
from pagefold.store.cache_folder import check_frame
from pagefold.store.frame import checksum_of
from pagefold.store.protocol import Put

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagefold.store.prefix_layout import PrefixLayout
    from pagefold.store.protocol import BlockStore

__all__ = ["PrefixIntake", "Taken"]


class Taken(NamedTuple):
    """What became of blocks.

    Attributes:
        num_blocks: that were sent, each found right.
        num_kept: how many of them each tier has now, by its name.
    """

    num_blocks: int
    num_kept: Mapping[str, int]


class PrefixIntake:
    """Puts blocks into slow tiers. Any thread may call it.

    Args:
        layout: of the engine's blocks.
        stores: its slow tiers.
    """

    def __init__(self, layout: PrefixLayout, stores: Sequence[BlockStore]) -> None:
        self._layout = layout
        self._stores = list(stores)

    @property
    def layout(self) -> PrefixLayout:
        """How the engine's blocks are made."""
        return self._layout

    @property
    def tiers(self) -> list[str]:
        """The names of the tiers that blocks go to."""
        return [store.tier for store in self._stores]

    def take(self, frames: bytes) -> Taken:
        """Put blocks into all slow tiers. It waits for them; nothing is written before all blocks were found right.

        Args:
            frames: whole frames of the layout, one behind the other.

        Raises:
            InvalidRequestError: one of them is not right.
            TierError: a tier cannot be used.
        """
        puts = self._checked(frames)
        num_kept: dict[str, int] = {}
        for store in self._stores:
            try:
                num_kept[store.tier] = store.put(puts)
            except StoreError as error:
                msg = f"The {store.tier} tier cannot be written: {error}."
                raise TierError(msg, remedy="What was taken before stays. Try again later.") from None
        return Taken(len(puts), num_kept)

    def _checked(self, raw: bytes) -> list[Put]:
        """Return the blocks of frames.

        Raises:
            InvalidRequestError: one is not right.
        """
        frames, body = self._layout.frames, memoryview(raw)
        size = frames.frame_bytes
        if not raw or len(raw) % size:
            msg = f"The body has {len(raw):,} bytes, and a frame of a block has {size:,} here."
            raise InvalidRequestError(msg, remedy="Send whole frames of the layout that /v1/cache/layout tells.")
        puts: list[Put] = []
        for at in range(0, len(raw), size):
            header, payload = raw[at : at + frames.header_bytes], body[at + frames.header_bytes : at + size]
            name = check_frame(frames, header, payload)
            if not isinstance(name, MissCause) and name.digest != path_digest(name.parent, name.key):
                name = MissCause.OTHER_BLOCK  # of a cache group, of which there is one
            if isinstance(name, MissCause) or frames.note_of(header):
                what = name.value if isinstance(name, MissCause) else MissCause.OTHER_BLOCK.value
                msg = f"Block {at // size} of the body is not right ({what.replace('_', ' ')}): nothing was taken."
                raise InvalidRequestError(msg, remedy="Send frames of the layout that /v1/cache/layout tells.")
            puts.append(Put(name, payload, checksum_of(payload)))
        return puts
