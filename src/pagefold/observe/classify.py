"""Classify: which tokens of a prompt were computed for which cause, by what a cache has had and what became of it.

The prompt is gone through block by block behind what was found. Each block's path was seen before or not. If it was,
what became of it is the cause. If it was not, none behind it was either: the nearest prompt before says where this one
goes on otherwise.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from pagefold.kv import TOKEN_BYTES, Namespace
from pagefold.kv.names import path_digest, root_digest
from pagefold.observe.misses import Cause, Difference, Eviction, Miss
from pagefold.observe.seen_paths import Mark, State, key_of

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Iterator

    from pagefold.observe.nearest_prompts import Nearest
    from pagefold.observe.request_record import RequestRecord
    from pagefold.observe.seen_paths import SeenPaths

__all__ = ["Lookup", "Past", "classify", "keys_of"]

_AROUND = 12
"""Tokens that are told before a difference, and behind it."""

_AS_FAR = "as far as is remembered"

_MARKED = {
    Mark.SUPERSEDED: Cause.SUPERSEDED,
    Mark.PIN_EXPIRED: Cause.PIN_EXPIRED,
    Mark.SESSION: Cause.SESSION,
}
"""Marks of what was evicted, to the cause that each makes; the first that is there tells."""

_FIELDS = {"layout": "kv_quality"}
"""What users call a field of a namespace, where that is another name."""


class Past(Protocol):
    """What is known of requests before."""

    @property
    def paths(self) -> SeenPaths:
        """Which paths the cache has had."""

    def policy_at(self, when_s: float) -> str:
        """Return the name of the eviction policy that chose at a time."""

    @property
    def publishes(self) -> bool:
        """Whether anything is ever cached."""

    def number(self, number: int) -> RequestRecord | None:
        """Return a request by its number, if it is remembered."""

    def nearest(self, namespace: bytes, text: bytes) -> Nearest | None:
        """Return the request before whose prompt shares most of a packed text, in its namespace."""

    def namespaces(self, tenant: str | None) -> Iterable[bytes]:
        """Return the last namespaces of a tenant, the last first; or of each, for None."""

    def tier_miss(self, key: int, since_s: float) -> str:
        """Return what a tier found that was asked for a path since then; empty for nothing."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """What was looked up, and what was found.

    Attributes:
        record: who asks; it may be one that will never be sent.
        tokens: of it.
        num_tokens: how many of them; the last ones may be of a block that is not full.
        num_hit_tokens: the first so many were found.
        num_lost_tokens, num_declined_tokens: of :class:`~pagefold.events.PrefixLookup`.
        planned_s: when it was looked up.
        has_tiers: whether the device has tiers behind it.
        block_size: tokens a block.
        sees: whose prompts count: those of the same ``salt`` and tenant, of the ``tenant``, or ``all`` for the admin.
    """

    record: RequestRecord
    tokens: array[int]
    num_tokens: int
    num_hit_tokens: int
    num_lost_tokens: int
    num_declined_tokens: int
    planned_s: float
    has_tiers: bool
    block_size: int
    sees: Literal["salt", "tenant", "all"] = "tenant"


def keys_of(  # noqa: PLR0913, PLR0917 - of a prompt, and from where on
    namespace: bytes, tokens: array[int], num_tokens: int, block_size: int, parent: bytes = b"", num_known: int = 0
) -> list[int]:
    """Return by what the paths of the full blocks among the first ``num_tokens`` are known, from the first on.

    Args:
        namespace: key of the prompt's namespace.
        tokens: of it.
        num_tokens: how many of them.
        block_size: tokens a block.
        parent: digest of the path of the first ``num_known`` blocks, if that is known; those have 0 then.
        num_known: so many.
    """
    packed = tokens[num_known * block_size : num_tokens // block_size * block_size].tobytes()
    keys = [0] * num_known
    keys += _keys_behind(parent or root_digest(namespace), packed, block_size * TOKEN_BYTES)
    return keys


def _keys_behind(digest: bytes, packed: bytes, stride: int) -> Iterator[int]:
    """Yield by what the paths of the blocks of ``packed`` are known, which come behind a path of that digest."""
    for offset in range(0, len(packed), stride):
        digest = path_digest(digest, packed[offset : offset + stride])
        yield key_of(digest)


def classify(lookup: Lookup, keys: list[int], past: Past) -> tuple[Miss, ...]:
    """Return why each token behind the hit is computed, as runs of one cause each, in order and without gaps.

    Args:
        lookup: what was found.
        keys: of its paths, by :func:`keys_of`.
        past: what is known.
    """
    start, end = lookup.num_hit_tokens, lookup.num_tokens
    if start >= end:
        return ()
    if not past.publishes:
        return (Miss(start, end, Cause.CACHING_OFF),)
    if lookup.record.computes_all:
        return (Miss(start, end, Cause.PROMPT_LOGPROBS),)
    return _joined(_Classifier(lookup, keys, past).misses())


class _Place(NamedTuple):
    """Tokens of one block that were computed: which block, and from where to where."""

    block: int
    low: int
    high: int

    def miss(self, cause: Cause, eviction: Eviction | None = None, detail: str = "") -> Miss:
        """Return that they were computed for ``cause``."""
        return Miss(self.low, self.high, cause, eviction=eviction, detail=detail)


class _Classifier:
    """Goes through one prompt."""

    def __init__(self, lookup: Lookup, keys: list[int], past: Past) -> None:
        self._lookup = lookup
        self._record = lookup.record
        self._size = lookup.block_size
        self._keys = keys
        self._past = past
        self._paths = past.paths
        found_until = lookup.num_hit_tokens // self._size * self._size
        self._lost_until = found_until + lookup.num_lost_tokens
        self._declined_until = found_until + lookup.num_declined_tokens

    def misses(self) -> Iterator[Miss]:
        """Yield them, block by block as long as their paths were seen before, and then all that is left."""
        start, end = self._lookup.num_hit_tokens, self._lookup.num_tokens
        failed: Miss | None = None  # what a tier could not bring cuts off what is behind it
        first = start // self._size
        for block in range(first, len(self._keys)):
            place = _Place(block, max(start, block * self._size), (block + 1) * self._size)
            miss = self._of_seen(place)
            if miss is None:
                yield from self._of_unseen(block, place.low)
                return
            if miss.cause in (Cause.TIER_FAILED, Cause.TIER_LATE):
                failed = miss
            elif miss.cause is Cause.NOT_IN_TIERS and failed is not None:
                miss = place.miss(failed.cause, miss.eviction, failed.detail)
            yield miss
        rest = max(start, len(self._keys) * self._size)
        if rest < end:
            yield from self._of_unseen(len(self._keys), rest)

    # A path that was seen before.

    def _of_seen(self, place: _Place) -> Miss | None:
        """Return why a full block was computed whose path was seen before; None if it was not."""
        entry = self._paths.find(self._keys[place.block])
        state = State.NONE if entry < 0 else self._paths.state(entry)
        if state is State.CACHED:
            return self._of_cached(place, entry)
        if entry >= 0 and self._is_computed(entry):
            return place.miss(Cause.COMPUTING)
        if state is State.NONE:
            return None
        if state is State.EVICTED:
            return self._of_evicted(place, entry)
        cause = Cause.RESET if state is State.RESET else Cause.DISTRUSTED
        return place.miss(cause, Eviction(self._ago_s(entry)))

    def _is_computed(self, entry: int) -> bool:
        """Whether somebody else is still about to compute a path."""
        owner = self._past.number(self._paths.owner(entry))
        return owner is not None and owner is not self._record and not owner.has_ended

    def _of_cached(self, place: _Place, entry: int) -> Miss:
        """Return why a block was computed that is cached on the device."""
        if self._paths.when_s(entry) > self._lookup.planned_s:
            return place.miss(Cause.COMPUTING)
        if self._paths.has(entry, Mark.PART_GONE) or place.low < self._lost_until:
            return place.miss(Cause.WINDOW_GONE, self._eviction(entry))
        return place.miss(Cause.LAST_TOKEN if place.high == self._lookup.num_tokens else Cause.NOT_KEPT)

    def _of_evicted(self, place: _Place, entry: int) -> Miss:
        """Return why a block was computed that had been evicted from the device."""
        record, eviction = self._record, self._eviction(entry)
        found = self._past.tier_miss(self._keys[place.block], record.arrival_s)
        if place.low < self._declined_until or record.fetch == "slow":
            cause = Cause.SOONER_COMPUTED
        elif record.fetch == "late" or found == "late":
            cause = Cause.TIER_LATE
        elif found:
            return place.miss(Cause.TIER_FAILED, eviction, found)
        elif record.fetch == "no_room":
            cause = Cause.TIER_FULL
        elif self._lookup.has_tiers:
            cause = Cause.NOT_IN_TIERS
        else:
            cause = next((cause for mark, cause in _MARKED.items() if self._paths.has(entry, mark)), Cause.EVICTED)
        return place.miss(cause, eviction)

    def _eviction(self, entry: int) -> Eviction:
        """Return how what is known under an entry had to go."""
        causer = self._past.number(self._paths.causer(entry))
        score = self._paths.score(entry)
        policy = self._past.policy_at(self._paths.when_s(entry)) if score is not None else ""
        return Eviction(self._ago_s(entry), policy, score, "" if causer is None else causer.request_id)

    def _ago_s(self, entry: int) -> float:
        return max(0.0, self._lookup.planned_s - self._paths.when_s(entry))

    # A path that nobody has had.

    def _of_unseen(self, block: int, low: int) -> Iterator[Miss]:
        """Yield why tokens were computed from ``low`` on, which is in the first block whose path nobody has had."""
        end = self._lookup.num_tokens
        elsewhere = None if block else self._of_other_namespace()
        if elsewhere is not None:
            yield elsewhere
            low = elsewhere.end
        if low == end:
            return
        near = self._past.nearest(self._record.namespace, self._lookup.tokens[:end].tobytes())
        num_common = 0 if near is None else near.num_common
        if low < num_common and near is not None:
            yield Miss(low, num_common, self._of_shared(block, low, near))
            low = num_common
        if low == end:
            return
        if num_common < block * self._size:  # blocks before were seen, and whose they were is forgotten
            yield Miss(low, end, Cause.NEVER_SEEN, detail=_AS_FAR)
        elif num_common < low and low % self._size:  # as before, of a part of a block
            yield Miss(low, end, Cause.DIFFERS)
        elif near is not None and near.goes_on:
            yield Miss(low, end, Cause.DIFFERS, self._difference(near))
        else:
            yield Miss(low, end, Cause.NEVER_SEEN)

    def _of_shared(self, block: int, low: int, near: Nearest) -> Cause:
        """Return why tokens were computed that another prompt has too, in a path that was never published."""
        if low == self._lookup.num_tokens - 1 and near.num_common == self._lookup.num_tokens:
            return Cause.LAST_TOKEN
        if near.num_common < (block + 1) * self._size:
            return Cause.PARTIAL_BLOCK
        if not near.record.has_ended:
            return Cause.COMPUTING
        return Cause.NOT_KEPT if self._paths.lost_until_s is None else Cause.EVICTED  # and how is forgotten

    def _of_other_namespace(self) -> Miss | None:
        """Return how far a prompt of which nothing was seen is, or was, cached under other terms; None if it was not.

        Of the last few namespaces the first that has anything is told.
        """
        own = Namespace.from_key(self._record.namespace)
        for key in self._past.namespaces(None if self._lookup.sees == "all" else own.tenant):
            if key == self._record.namespace:
                continue
            other = Namespace.from_key(key)
            if self._lookup.sees == "salt" and own.cache_salt != other.cache_salt:
                continue
            end = self._num_seen(key) * self._size
            low = self._lookup.num_hit_tokens
            if end > low:
                fields = tuple(
                    _FIELDS.get(one.name, one.name)
                    for one in dataclasses.fields(own)
                    if getattr(own, one.name) != getattr(other, one.name)
                )
                return Miss(low, end, Cause.OTHER_NAMESPACE, fields=fields)
        return None

    def _num_seen(self, namespace: bytes) -> int:
        """Return how many full blocks of the prompt another namespace has had in a row."""
        packed = self._lookup.tokens[: len(self._keys) * self._size].tobytes()
        for block, key in enumerate(_keys_behind(root_digest(namespace), packed, self._size * TOKEN_BYTES)):
            entry = self._paths.find(key)
            if entry < 0 or self._paths.state(entry) is State.NONE:
                return block
        return len(self._keys)

    def _difference(self, near: Nearest) -> Difference:
        """Return where the prompt goes on otherwise than its nearest."""
        at = near.num_common
        first = max(0, at - _AROUND)
        own = self._lookup.tokens[first : min(at + _AROUND, self._lookup.num_tokens)].tobytes()
        other = near.record.text[first * TOKEN_BYTES : (at + _AROUND) * TOKEN_BYTES]
        return Difference(near.record.request_id, at, own, other, at - first)


def _joined(misses: Iterable[Miss]) -> tuple[Miss, ...]:
    """Return the same with neighbours of one cause as one; of evictions the first is told."""
    joined: list[Miss] = []
    for miss in misses:
        last = joined[-1] if joined else None
        if last is not None and (last.cause, last.detail, last.fields) == (miss.cause, miss.detail, miss.fields):
            difference = last.difference or miss.difference
            joined[-1] = Miss(last.start, miss.end, last.cause, difference, last.eviction, last.fields, last.detail)
        else:
            joined.append(miss)
    return tuple(joined)
