"""PrefixIndex: which replica holds which blocks, by what their events tell, and how much of a path each one has.

A block goes by the last 64 bits of its hash, since events may tell no more. The hashes of a path follow from all that
is before them, tenant and adapter included, so none is looked up for another's.

Of a model with several cache groups a path is of use as far as every group has what it needs behind it: of groups that
keep all every block, of those that keep a window the blocks that it reaches back to (``kv/keep.py`` has the rule).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pagefold.errors import PagefoldError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

__all__ = ["Batch", "Holdings", "IndexEvent", "PrefixIndex", "ReplicaState", "TooManyPlacesError"]

_HASH_BITS = 64
_HASH_BYTES = _HASH_BITS // 8
_ALL_ONES = (1 << _HASH_BITS) - 1

_MAX_GROUPS = 64
_KNOWN_MEDIA = ("GPU", "CPU", "STORAGE")
"""Those that there are: they have a place whatever else a replica tells of."""
_MAX_MEDIA = 16
"""Of one replica. A publisher of nonsense must not fill the memory, nor take places from others."""


class TooManyPlacesError(PagefoldError):
    """A replica tells of a cache group or a medium beyond all that there can be."""


class ReplicaState(NamedTuple):
    """What is known of a replica.

    Attributes:
        is_known: whether the index has all that the replica told since it began, or since it held nothing. Else it may
            hold more than the index says, and never less but for what it dropped meanwhile.
        num_blocks: how many blocks of paths it holds, in whatever medium.
        last_event_s: when it made the last batch that came, in seconds since 1970 by its own clock; None for none.
    """

    is_known: bool
    num_blocks: int
    last_event_s: float | None


class Holdings(Protocol):
    """One replica's blocks, as its events tell of them."""

    def stored(self, block_hashes: Iterable[bytes | int], medium: str, group: int) -> None:
        """Blocks of a cache group can be found in a medium."""

    def removed(self, block_hashes: Iterable[bytes | int], medium: str, group: int) -> None:
        """They cannot any more."""

    def cleared(self) -> None:
        """Nothing is found any more, anywhere."""

    def learn_window(self, group: int, window: int, block_size: int, *, is_chunked: bool) -> None:
        """A cache group keeps the last ``window`` tokens, or those of the last chunk of as many."""


class IndexEvent(Protocol):
    """An event; those of :mod:`pagefold.index.wire` are."""

    def tell(self, holdings: Holdings) -> None:
        """Tell a replica's holdings what has happened."""


class Batch(Protocol):
    """What one step has done to blocks.

    Attributes:
        ts: seconds since 1970, by the replica's clock.
        events: in their order.
    """

    @property
    def ts(self) -> float: ...  # noqa: D102 - as above

    @property
    def events(self) -> Sequence[IndexEvent]: ...  # noqa: D102 - as above


class _Window(NamedTuple):
    """What a cache group keeps that keeps no more than some last tokens."""

    num_tokens: int
    block_size: int
    is_chunked: bool

    def first_block(self, num_blocks: int) -> int:
        """Return from which of so many blocks on whoever goes on behind them needs all."""
        position = num_blocks * self.block_size
        back = position % self.num_tokens if self.is_chunked else self.num_tokens - 1
        return min(max(0, position - back) // self.block_size, num_blocks - 1)


class PrefixIndex:
    """Who holds what. Any thread may ask, and any may tell."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replicas: dict[str, _Replica] = {}
        self._by_number: dict[int, _Replica] = {}
        self._holders: dict[int, int] = {}  # block -> one bit for each replica that holds it in all its whole groups

    # What is asked.

    def match(self, block_hashes: Sequence[bytes | int], media: Collection[str] | None = None) -> dict[str, int]:
        """Return how many blocks of a path each replica could go on behind; those that have none are left out.

        Args:
            block_hashes: of the path, from its first block on.
            media: where blocks count; None for wherever they are.
        """
        keys = [_key(block_hash) for block_hash in block_hashes]
        with self._lock:
            if media is None:
                found = self._walk(keys)
            else:
                found = {
                    replica: replica.num_whole(keys, replica.mask_of(media)) for replica in self._replicas.values()
                }
            return {replica.name: num_blocks for replica, num_blocks in found.items() if num_blocks}

    def is_known(self, replica: str) -> bool:
        """Whether it is known what a replica holds; see :class:`ReplicaState`."""
        with self._lock:
            known = self._replicas.get(replica)
            return known is not None and known.is_known and not known.is_doubted

    def replicas(self) -> dict[str, ReplicaState]:
        """Return what is known of each replica."""
        with self._lock:
            return {
                name: ReplicaState(replica.is_known and not replica.is_doubted, len(replica.held), replica.last_event_s)
                for name, replica in self._replicas.items()
            }

    def holds(self, replica: str, medium: str | None = None) -> dict[int, set[int]]:
        """Return which blocks a replica holds, by their last 64 bits, and of which cache groups: for tests and people.

        Args:
            replica: its name; one that nobody knows holds nothing.
            medium: where; None for wherever they are.
        """
        with self._lock:
            known = self._replicas.get(replica)
            if known is None:
                return {}
            mask = -1 if medium is None else known.mask_of([medium])
            groups = {
                key: {place % _MAX_GROUPS for place in _bits(places & mask)} for key, places in known.held.items()
            }
            return {key: found for key, found in groups.items() if found}

    # What is told.

    def apply(self, replica: str, batch: Batch) -> None:
        """Note what a batch of a replica tells. Batches come in their order, and none is left out.

        A replica that nobody has heard of may hold more than the batch tells: it is not known until it tells that it
        holds nothing, as the first batch of Pagefold's publishers does, or until :meth:`begin`.

        Raises:
            TooManyPlacesError: it tells of what cannot be. What came before it in the batch is noted.
        """
        with self._lock:
            known = self._replicas.get(replica) or self._add(replica)
            known.last_event_s = batch.ts
            for event in batch.events:
                event.tell(known)

    def begin(self, replica: str) -> None:
        """A replica has begun: it holds nothing, and what it tells from now on is all."""
        with self._lock:
            known = self._replicas.get(replica) or self._add(replica)
            known.cleared()

    def forget(self, replica: str) -> None:
        """Forget what a replica holds: batches were lost. It is not known until it has told that it holds nothing."""
        with self._lock:
            known = self._replicas.get(replica) or self._add(replica)
            known.cleared()
            known.is_known = False

    def doubt(self, replica: str) -> None:
        """A replica does not answer: what it holds stays noted, and is not known."""
        with self._lock:
            (self._replicas.get(replica) or self._add(replica)).is_doubted = True

    def trust(self, replica: str) -> None:
        """A replica that was doubted answers, and is known if it was before."""
        with self._lock:
            known = self._replicas.get(replica)
            if known is not None:
                known.is_doubted = False

    def replica_gone(self, replica: str) -> None:
        """A replica is no more: nothing of it is kept. A batch that comes late adds its name again, not known."""
        with self._lock:
            known = self._replicas.pop(replica, None)
            if known is not None:
                known.cleared()
                del self._by_number[known.number]

    # Inside.

    def _add(self, name: str) -> _Replica:
        """Add a replica of which nothing is known."""
        number = next(number for number in range(len(self._by_number) + 1) if number not in self._by_number)
        replica = _Replica(name, number, self._holders)
        self._replicas[name] = self._by_number[number] = replica
        return replica

    def _walk(self, keys: list[int]) -> dict[_Replica, int]:
        """Return how far each replica has a path: all at once, one bit for each."""
        found: dict[_Replica, int] = {}
        left = 0
        for replica in self._replicas.values():
            if replica.has_whole_groups:
                left |= replica.bit
            else:
                found[replica] = replica.num_whole(keys, -1)
        for depth, key in enumerate(keys):
            holding = left & self._holders.get(key, 0)
            if depth:
                for number in _bits(left & ~holding):
                    found[self._by_number[number]] = depth
            left = holding
            if not left:
                break
        for number in _bits(left):
            found[self._by_number[number]] = len(keys)
        for replica, num_blocks in found.items():
            if replica.windows and replica.has_whole_groups:
                found[replica] = replica.num_whole(keys[:num_blocks], -1)
        return found


class _Replica:
    """One replica's blocks. Whoever calls holds the index's lock.

    Args:
        name: of the replica.
        number: of its bit.
        holders: of the index.

    Attributes:
        held: each block's places, as bits: a medium and a cache group are one place.
        windows: the cache groups that keep no more than some last tokens.
        is_known: whether it has told all that it holds.
        is_doubted: it does not answer.
        last_event_s: as of :class:`ReplicaState`.
    """

    def __init__(self, name: str, number: int, holders: dict[int, int]) -> None:
        self.name = name
        self.number = number
        self.bit = 1 << number
        self.held: dict[int, int] = {}
        self.windows: dict[int, _Window] = {}
        self.is_known = self.is_doubted = False
        self.last_event_s: float | None = None
        self._holders = holders
        self._media = _known_media()
        self._groups: set[int] = set()
        self._whole = _Needs(())

    @property
    def has_whole_groups(self) -> bool:
        """Whether any cache group keeps all, so that who has a path has all of it."""
        return bool(self._whole.groups)

    def stored(self, block_hashes: Iterable[bytes | int], medium: str, group: int) -> None:
        """See :class:`Holdings`."""
        self._learn_group(group)
        place = self._place(medium, group)
        held = self.held
        for key in map(_key, block_hashes):
            places = held.get(key, 0)
            if not places & place:
                held[key] = places | place
                if self._whole.are_met(places | place):
                    self._holders[key] = self._holders.get(key, 0) | self.bit

    def removed(self, block_hashes: Iterable[bytes | int], medium: str, group: int) -> None:
        """See :class:`Holdings`."""
        place = self._place(medium, group)
        held = self.held
        for key in map(_key, block_hashes):
            places = held.get(key, 0)
            if not places & place:
                continue
            places &= ~place
            if places:
                held[key] = places
            else:
                del held[key]
            if not self._whole.are_met(places):
                self._let_go(key)

    def cleared(self) -> None:
        """See :class:`Holdings`."""
        for key in self.held:
            self._let_go(key)
        self.held.clear()
        self.windows.clear()
        self._groups.clear()
        self._media = _known_media()
        self._whole = _Needs(())
        self.is_known = True

    def learn_window(self, group: int, window: int, block_size: int, *, is_chunked: bool) -> None:
        """See :class:`Holdings`."""
        if window > 0 and self.windows.get(group) != (rule := _Window(window, block_size, is_chunked)):
            self._check(group, _MAX_GROUPS, "cache groups")
            self.windows[group] = rule
            self._note_groups()

    def mask_of(self, media: Iterable[str]) -> int:
        """Return the places that are in any of ``media``, as bits."""
        numbers = (self._media.get(medium) for medium in media)
        ones = (1 << _MAX_GROUPS) - 1
        return sum(ones << number * _MAX_GROUPS for number in set(numbers) if number is not None)

    def num_whole(self, keys: list[int], mask: int) -> int:
        """Return how many of a path's first blocks the replica could go on behind.

        Args:
            keys: of the path.
            mask: of the places that count.
        """
        best = 0
        runs = dict.fromkeys(self.windows, 0)  # how many blocks each has in a row, up to here
        needs = {group: _Needs((group,)) for group in self.windows}
        for depth, key in enumerate(keys, 1):
            places = self.held.get(key, 0) & mask
            if self.has_whole_groups and not self._whole.are_met(places):
                break
            for group, need in needs.items():
                runs[group] = runs[group] + 1 if need.are_met(places) else 0
            if all(runs[group] >= depth - rule.first_block(depth) for group, rule in self.windows.items()):
                best = depth
        return best if self._groups else 0

    # Inside.

    def _learn_group(self, group: int) -> None:
        if group not in self._groups:
            self._check(group, _MAX_GROUPS, "cache groups")
            self._groups.add(group)
            self._note_groups()

    def _note_groups(self) -> None:
        """The groups are others than before: who holds a block in all that keep all is found anew."""
        self._whole = _Needs(tuple(sorted(self._groups - self.windows.keys())))
        for key, places in self.held.items():
            if self._whole.are_met(places):
                self._holders[key] = self._holders.get(key, 0) | self.bit
            else:
                self._let_go(key)

    def _let_go(self, key: int) -> None:
        holders = self._holders.get(key, 0) & ~self.bit
        if holders:
            self._holders[key] = holders
        else:
            self._holders.pop(key, None)

    def _place(self, medium: str, group: int) -> int:
        number = self._media.get(medium)
        if number is None:
            self._check(len(self._media), _MAX_MEDIA, "media")
            number = self._media[medium] = len(self._media)
        self._check(group, _MAX_GROUPS, "cache groups")
        return 1 << (number * _MAX_GROUPS + group)

    def _check(self, number: int, end: int, what: str) -> None:
        if not 0 <= number < end:
            msg = f"Replica {self.name} tells of more than {end} {what}."
            raise TooManyPlacesError(msg)


class _Needs:
    """Cache groups of each of which a block must be somewhere.

    Args:
        groups: their numbers.
    """

    __slots__ = ("_masks", "groups")

    def __init__(self, groups: tuple[int, ...]) -> None:
        self.groups = groups
        self._masks = [sum(1 << (number * _MAX_GROUPS + group) for number in range(_MAX_MEDIA)) for group in groups]

    def are_met(self, places: int) -> bool:
        """Whether a block at these places is of use to all of them; never where there are none."""
        for mask in self._masks:
            if not places & mask:
                return False
        return bool(self._masks)


def _known_media() -> dict[str, int]:
    """Return the numbers of the media that there are."""
    return {medium: number for number, medium in enumerate(_KNOWN_MEDIA)}


def _key(block_hash: bytes | int) -> int:
    """Return the last 64 bits of a hash, as vLLM's events have them."""
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-_HASH_BYTES:], "big")
    return block_hash & _ALL_ONES


def _bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
