"""Batches of KV events made of what was noted: hashes, tokens and extra keys, in vLLM's form."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagefold.index.block_hash import DEFAULT_SEED, ExtraKeys, block_hash, first_parent, tenant_salt
from pagefold.index.wire import DEVICE, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from pagefold.kv import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagefold.index.wire import KVEvent
    from pagefold.kv import KeepRule
    from pagefold.observe.kv_events import Change, NotedBatch, Place

__all__ = ["BatchMaker", "extra_keys_of"]

_HASH_MASK = (1 << 64) - 1


class _Group(NamedTuple):
    """What a cache group keeps, as events tell it."""

    kind: str | None = None
    window: int | None = None


def extra_keys_of(namespace: Namespace) -> ExtraKeys:
    """Return what is hashed with the blocks of a namespace: its tenant, as a digest, its salt and its adapter."""
    return ExtraKeys(cache_salt=tenant_salt(namespace.tenant, namespace.cache_salt), lora_name=namespace.adapter)


class BatchMaker:
    """Makes batches. One thread calls it.

    Args:
        block_size: tokens a block.
        rules: what each cache group keeps.
        seed: what chains of hashes begin with.
        uses_int_hashes: whether events tell the last 64 bits of hashes, and else all 32 bytes.
    """

    def __init__(
        self,
        block_size: int,
        rules: Sequence[KeepRule],
        *,
        seed: str = DEFAULT_SEED,
        uses_int_hashes: bool = True,
    ) -> None:
        self._block_size = block_size
        self._first_parent = first_parent(seed)
        self._uses_int_hashes = uses_int_hashes
        self._groups = [_told_of(rule) for rule in rules] if len(rules) > 1 or rules[0].trims else [_Group()]
        self._extra_keys: dict[bytes, ExtraKeys] = {}

    def make(self, noted: NotedBatch) -> EventBatch:
        """Return the batch of what was noted."""
        return EventBatch(noted.at_s, list(self._events(noted.changes)), 0)

    def _events(self, changes: Sequence[Change]) -> Iterator[KVEvent]:
        begin = 0
        while begin < len(changes):
            first = changes[begin]
            end = begin + 1
            if first.place is None:
                yield AllBlocksCleared()
            else:
                while end < len(changes) and _goes_on(changes[end - 1], changes[end]):
                    end += 1
                yield from self._run(changes[begin:end])
            begin = end

    def _run(self, changes: Sequence[Change]) -> Iterator[KVEvent]:
        """Yield the events of changes that say the same of one place after another."""
        places = [change.place for change in changes if change.place is not None]
        hashes = [self._told(self._hash(place)) for place in places]
        for number, group in enumerate(self._groups):
            if changes[0].removed >> number & 1:
                yield BlockRemoved(block_hashes=hashes, medium=DEVICE, group_idx=number)
            if changes[0].stored >> number & 1:
                before = places[0].parent
                keys = self._keys(places[0].namespace)
                yield BlockStored(
                    block_hashes=hashes,
                    parent_block_hash=None if before is None else self._told(self._hash(before)),
                    token_ids=[token for place in places for token in _tokens(place)],
                    block_size=self._block_size,
                    lora_id=None,
                    medium=DEVICE,
                    lora_name=keys.lora_name or None,
                    extra_keys=[keys.told_of_block(place.depth) for place in places],
                    group_idx=number,
                    kv_cache_spec_kind=group.kind,
                    kv_cache_spec_sliding_window=group.window,
                )

    def _hash(self, place: Place) -> bytes:
        """Return the hash of a place's block. Each is computed once."""
        path: list[Place] = []
        at: Place | None = place
        while at is not None and not at.block_hash:
            path.append(at)
            at = at.parent
        found = self._first_parent if at is None else at.block_hash
        for one in reversed(path):
            keys = self._keys(one.namespace).of_block(one.depth)
            found = one.block_hash = block_hash(found, tuple(_tokens(one)), keys)
        return found

    def _keys(self, namespace: bytes) -> ExtraKeys:
        keys = self._extra_keys.get(namespace)
        if keys is None:
            if len(self._extra_keys) >= _MOST_NAMESPACES:
                self._extra_keys.clear()
            keys = self._extra_keys[namespace] = extra_keys_of(Namespace.from_key(namespace))
        return keys

    def _told(self, found: bytes) -> bytes | int:
        return int.from_bytes(found, "big") & _HASH_MASK if self._uses_int_hashes else found


_MOST_NAMESPACES = 4096
"""Clients choose salts: what is known of namespaces is found anew beyond so many."""


def _goes_on(before: Change, change: Change) -> bool:
    """Whether two changes are told in one event: they say the same of neighbours, or of any where blocks go."""
    if change.place is None or (change.stored, change.removed) != (before.stored, before.removed):
        return False
    return not change.stored or change.place.parent is before.place


def _tokens(place: Place) -> list[int]:
    return memoryview(place.key).cast("i").tolist()


def _told_of(rule: KeepRule) -> _Group:
    """Return what a rule is in vLLM's words. Sinks have none there: who has a window is taken to have them."""
    if rule.window is None:
        return _Group("full_attention")
    return _Group("chunked_local_attention" if rule.is_chunked else "sliding_window", rule.window)
