"""How long blocks live, lie idle and wait for their next use: what events tell, beside a slow twin that notes all."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from typing import TYPE_CHECKING, TypeAlias

import pytest

from pagefold.events import BlockEvicted, BlocksReused
from pagefold.kv import KVCore, audit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.events import Event
    from pagefold.kv.block import Node
    from pagefold.kv.sequence_cache import Promise, SequenceCache

BLOCK_SIZE = 4
NAMESPACES = (b"one", b"two")

Path: TypeAlias = tuple[bytes, ...]
"""A namespace, and the tokens of each block from the first one on: what a published block is known by."""


class Twin:
    """Does what a core does to its tables, and notes of every published block when it was published and last used."""

    def __init__(self, num_blocks: int) -> None:
        self.events: list[Event] = []
        self.core = KVCore(num_blocks, block_size=BLOCK_SIZE, emit=self.events.append)
        self.born: dict[Path, float] = {}
        self.used: dict[Path, float] = {}
        self.num_compared: Counter[str] = Counter()

    def admit(self, namespace: bytes, tokens: list[int]) -> tuple[SequenceCache, int]:
        packed = pack(tokens)
        hit = self.core.match(namespace, packed, len(tokens) - 1)
        cache, num_tokens = self.core.acquire(hit)
        found = [path_of(namespace, packed, num) for num in range(1, len(hit.nodes) + 1)]
        if num_tokens > len(hit.nodes) * BLOCK_SIZE:
            assert hit.partial is not None
            found.append((*path_of(namespace, packed, len(hit.nodes)), hit.partial.key))
        self._compare([self.core.now_s - self.used[path] for path in found])
        self.used |= dict.fromkeys(found, self.core.now_s)
        return cache, num_tokens

    def extend(self, cache: SequenceCache, start: int, end: int) -> bool:
        done = self.core.extend(cache, start, end)
        self._compare()
        return done

    def promise(self, cache: SequenceCache, tokens: list[int]) -> Promise | None:
        promise = self.core.publishing.promise(cache, pack(tokens), len(tokens))
        self._compare()
        return promise

    def commit(self, promise: Promise, namespace: bytes) -> None:
        cache, first = promise.cache, promise.cache.num_published
        self.core.moves.copies_done(self.core.moves.take_copies())
        self.core.publishing.commit(promise)
        self._compare()
        joined = [path_of(namespace, promise.packed, num) for num in range(first + 1, cache.num_published + 1)]
        self.used |= dict.fromkeys(joined, self.core.now_s)
        self.num_compared["joined"] += len(joined)

    def release(self, cache: SequenceCache, namespace: bytes, tokens: list[int]) -> None:
        held = [path_of(namespace, pack(tokens), num) for num in range(1, cache.num_published + 1)]
        self.core.release(cache)
        self.used |= dict.fromkeys(held, self.core.now_s)
        self._compare()

    def fail(self, step: list[tuple[SequenceCache, bytes, list[int], Promise | None]]) -> None:
        """The step fails: its promises are taken back, and all that it admitted is let go of."""
        self.core.moves.copies_failed(self.core.moves.take_copies())
        for *_, promise in reversed(step):
            if promise is not None:
                self.core.publishing.abandon(promise)
        published = self._published()
        for path in self.born.keys() - published:  # never cached, so never evicted
            del self.born[path], self.used[path]
        for cache, namespace, tokens, _ in step:
            held = {path_of(namespace, pack(tokens), num) for num in range(1, cache.num_published + 1)}
            self.core.release(cache)
            self.used |= dict.fromkeys(held & published, self.core.now_s)  # of what was leant on nothing is left
        self._compare()

    def _published(self) -> set[Path]:
        paths: set[Path] = set()
        for published in self.core.tree.nodes():
            keys: list[bytes] = []
            node: Node | None = published
            while node is not None:
                keys.append(node.key)
                node = node.parent
            paths.add(tuple(reversed(keys)))
        return paths

    def _compare(self, found: Sequence[float] = ()) -> None:
        """What was told since the last time is what the twin knows; what is new was published now."""
        audit(self.core)
        now, published = self.core.now_s, self._published()
        gone = self.born.keys() - published
        evicted = Counter((now - self.born[path], now - self.used[path]) for path in gone)
        told = [event for event in self.events if isinstance(event, BlockEvicted)]
        assert Counter((event.lifetime_s, event.idle_s) for event in told) == evicted
        gaps: Counter[float] = Counter()
        for event in self.events:
            if isinstance(event, BlocksReused):
                gaps.update(event.gaps)
        assert gaps == Counter(found)
        assert all(gaps.values())
        for path in gone:
            del self.born[path], self.used[path]
        for path in published - self.born.keys():
            self.born[path] = self.used[path] = now
        self.num_compared["evicted"] += len(told)
        self.num_compared["found"] += gaps.total()
        self.events.clear()


def pack(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def path_of(namespace: bytes, packed: bytes, num_blocks: int) -> Path:
    stride = 4 * BLOCK_SIZE
    return (namespace, *(packed[at * stride : (at + 1) * stride] for at in range(num_blocks)))


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("seed", range(3))
def test_what_events_tell_is_what_the_twin_knows(seed):
    """Prompts that share, steps of several at once that compute the same, steps that fail, memory that is short."""
    rng = random.Random(seed)
    twin = Twin(num_blocks=24)
    running: list[tuple[SequenceCache, bytes, list[int]]] = []
    for _ in range(250):
        twin.core.now_s += rng.choice((0, 0, 1, 2, 50))
        step = []
        for _ in range(rng.randrange(3)):
            namespace, length = rng.choice(NAMESPACES), rng.randrange(1, 30)
            tokens = [rng.randrange(2) if rng.random() < 0.05 else 7 for _ in range(length)]
            cache, start = twin.admit(namespace, tokens)
            if not twin.extend(cache, start, length):
                twin.release(cache, namespace, tokens)
                continue
            step.append((cache, namespace, tokens, twin.promise(cache, tokens)))
        if step and rng.random() < 0.15:
            twin.fail(step)
            continue
        twin.core.now_s += rng.choice((0, 1))
        for cache, namespace, tokens, promise in step:
            if promise is not None:
                twin.commit(promise, namespace)
            running.append((cache, namespace, tokens))
        rng.shuffle(running)
        for _ in range(rng.randrange(4)):
            if running:
                twin.release(*running.pop())
    assert twin.num_compared["evicted"] > 30
    assert twin.num_compared["found"] > 200
    assert twin.num_compared["joined"] > 3


def test_a_prefix_that_was_used_together_is_told_in_one_number():
    twin = Twin(num_blocks=24)
    tokens = list(range(40))
    cache, start = twin.admit(b"one", tokens)
    assert twin.extend(cache, start, 40)
    promise = twin.promise(cache, tokens)
    assert promise is not None
    twin.commit(promise, b"one")
    twin.core.now_s = 3.0
    twin.release(cache, b"one", tokens)
    twin.core.now_s = 10.0
    hit = twin.core.match(b"one", pack(tokens), 39)
    twin.core.acquire(hit)
    whole, partial = twin.events
    assert whole == BlocksReused({7.0: 9})
    assert partial == BlocksReused({7.0: 1})
