"""HostBlocks: the blocks of a host arena, what each of them holds, and which of them makes room.

What is superseded makes room first, then what was used longest ago. Of one path the tail was always used before the
head, as on the device, so that what is left of a path can be used. Where a model has several cache groups, each one's
block of a path is a block of its own here, with a name of its own (``names.py``).

A host block is pinned while something reads or writes it, from when that is planned until it is over.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from pagefold.kv.held_block import HOST, HeldBlock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagefold.kv.names import BlockName

__all__ = ["HostBlocks"]


class HostBlocks:
    """Who has which block of the arena, by name and by place.

    Args:
        num_blocks: of the arena.
        notes_unsaved: whether ``unsaved`` and ``fresh`` are kept, for slower tiers.

    Attributes:
        num_blocks: of the arena.
        num_dropped: blocks since the start that were lost for want of room.
        unsaved: what was stored here and nobody has taken for a slower tier yet; used longest ago first.
        fresh: the part of ``unsaved`` that nobody has looked at yet.
    """

    def __init__(self, num_blocks: int, *, notes_unsaved: bool = False) -> None:
        self.num_blocks = num_blocks
        self.num_dropped = 0
        self.unsaved: OrderedDict[bytes, HeldBlock] = OrderedDict()
        self.fresh: deque[HeldBlock] = deque()
        self._notes_unsaved = notes_unsaved
        self._held: dict[bytes, HeldBlock] = {}
        self._behind: dict[bytes, dict[bytes, None]] = {}  # path -> digests of what is found right behind it
        self._by_id: dict[int, HeldBlock] = {}
        # Those that nothing pins, or only who writes them to a slower tier; superseded first, then used longest ago.
        self._idle: OrderedDict[bytes, HeldBlock] = OrderedDict()
        self._free = list(reversed(range(num_blocks)))

    # What there is.

    @property
    def num_held(self) -> int:
        """How many blocks are found here."""
        return len(self._held)

    @property
    def num_spare(self) -> int:
        """How many host blocks could be given out without losing what no slower tier was given."""
        return len(self._free) + len(self._idle) - len(self.unsaved)

    def num_ready(self, at_most: int) -> int:
        """Return how many host blocks will be given out next without losing what no slower tier was given.

        Counted up to ``at_most``, what is being written included.
        """
        num = len(self._free)
        for digest in self._idle:
            if num >= at_most or digest in self.unsaved:
                break
            num += 1
        return num

    def has_room(self, num_blocks: int, *, besides: set[bytes]) -> bool:
        """Whether so many blocks could be reserved, and those ``besides`` be found all the same."""
        num = len(self._free)
        for digest, held in self._idle.items():
            if num >= num_blocks:
                break
            num += not held.num_pins and digest not in besides
        return num >= num_blocks

    def get(self, digest: bytes) -> HeldBlock | None:
        """Return the block of that name, if it is found here."""
        return self._held.get(digest)

    def at(self, host_id: int) -> HeldBlock | None:
        """Return the block in that place of the arena, found or not; None if the place is free."""
        return self._by_id.get(host_id)

    def is_found(self, held: HeldBlock) -> bool:
        """Whether a block is what is found here under its name."""
        return self._held.get(held.name.digest) is held

    def found(self) -> Iterator[HeldBlock]:
        """Yield all that are found here."""
        return iter(self._held.values())

    def idle(self) -> Iterator[HeldBlock]:
        """Yield those that make room, in order; of those that are being written none yet."""
        return iter(self._idle.values())

    def behind(self, path: bytes) -> Iterator[HeldBlock]:
        """Yield those that are found here right behind the path of that digest, of every cache group."""
        return (self._held[digest] for digest in self._behind.get(path, ()))

    def all(self) -> Iterator[HeldBlock]:
        """Yield all that have a place, those included that are found no more, or not yet."""
        return iter(self._by_id.values())

    def free_ids(self) -> list[int]:
        """Return the places that hold nothing."""
        return list(self._free)

    # Blocks come and go.

    def reserve(self, name: BlockName, *, num_hits: int = 0, origin: str = HOST) -> HeldBlock | None:
        """Return a place for a block that is to come, pinned; None when all are in use. Nobody finds it yet.

        Args:
            name: names what it will hold.
            num_hits: how often it was found on the device.
            origin: the tier that it comes from.
        """
        if not self._free:
            oldest = next((held for held in self._idle.values() if not held.num_pins), None)
            if oldest is None:
                return None
            self.forget(oldest)
            self.num_dropped += 1
        held = HeldBlock(name, self._free.pop(), num_hits=num_hits, origin=origin)
        self._by_id[held.host_id] = held
        held.num_pins = 1
        return held

    def arrived(self, held: HeldBlock) -> None:
        """Let a reserved block be found from now on, unless another one of its name is."""
        if self._held.setdefault(held.name.digest, held) is held:
            self._behind.setdefault(held.name.parent, {})[held.name.digest] = None

    def stored(self, held: HeldBlock) -> None:
        """A block's bytes came from the device and are here: if it is found, no slower tier was given it."""
        if self._notes_unsaved and self.is_found(held) and not held.is_superseded:
            self.unsaved[held.name.digest] = held
            self.fresh.append(held)

    def forget(self, held: HeldBlock) -> None:
        """Let a block not be found any more; its place is free once nothing pins it."""
        digest = held.name.digest
        self._idle.pop(digest, None)
        if self._held.get(digest) is held:
            del self._held[digest]
            behind = self._behind[held.name.parent]
            del behind[digest]
            if not behind:
                del self._behind[held.name.parent]
            self.unsaved.pop(digest, None)
        if not held.num_pins:
            self._free_up(held)

    def supersede(self, held: HeldBlock) -> None:
        """Let a block that is found be the first to make room, and be written to no slower tier, until it is used."""
        held.is_superseded = True
        digest = held.name.digest
        self.unsaved.pop(digest, None)
        if digest in self._idle:
            self._idle.move_to_end(digest, last=False)

    # Pins and use.

    def touch(self, held: HeldBlock) -> None:
        """Let a block be the one used last."""
        held.is_superseded = False
        for order in (self._idle, self.unsaved):
            if held.name.digest in order:
                order.move_to_end(held.name.digest)

    def pin(self, held: Sequence[HeldBlock]) -> list[HeldBlock]:
        """Pin the blocks of a match that are still found, up to the first that is not, and return them."""
        pinned: list[HeldBlock] = []
        for one in held:
            if self._held.get(one.name.digest) is not one:
                break
            one.num_pins += 1
            one.is_superseded = False
            self._idle.pop(one.name.digest, None)
            pinned.append(one)
        return pinned

    def unpin(self, held: Sequence[HeldBlock]) -> None:
        """Let go of pinned blocks. The first becomes the one used last: tails leave before heads."""
        for one in reversed(held):
            one.num_pins -= 1
            if one.num_pins:
                continue
            if self._held.get(one.name.digest) is one:
                self._idle[one.name.digest] = one
                if one.is_superseded:  # meanwhile
                    self._idle.move_to_end(one.name.digest, last=False)
                else:
                    self.touch(one)
            else:  # forgotten while it was pinned
                self._free_up(one)

    def pin_to_write(self, held: HeldBlock) -> None:
        """Pin a block whose bytes go to a slower tier. It is not used by that: it stays as old as it is."""
        self.unsaved.pop(held.name.digest, None)
        held.num_pins += 1

    def unpin_written(self, held: HeldBlock) -> None:
        """A slower tier has let go of a block."""
        held.num_pins -= 1
        if held.num_pins:
            return
        if self._held.get(held.name.digest) is held:
            self._idle.setdefault(held.name.digest, held)
            if held.is_superseded:
                self._idle.move_to_end(held.name.digest, last=False)
        else:  # forgotten meanwhile
            self._free_up(held)

    def _free_up(self, held: HeldBlock) -> None:
        del self._by_id[held.host_id]
        self._free.append(held.host_id)
        held.host_id = -1
