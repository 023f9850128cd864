"""The index of what followed: beside a brute force over all texts in the tree, after evictions, resets and abandons."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from pagefold.kv import KVCore, Namespace
from pagefold.kv.continuations import MAX_COMPARED, Continuations
from pagefold.kv.gram_table import GRAM_SIZES, GramTable, num_common

NAMESPACES = [Namespace(model="m", tenant=tenant).key() for tenant in ("a", "b")]


def packed(tokens):
    return array("i", tokens).tobytes()


def tokens_of(found):
    return array("i", found.packed).tolist()


class Cached:
    """A core whose tree is watched; texts are published in it, and the brute force knows what is there."""

    def __init__(self, num_blocks, block_size):
        self.core = KVCore(num_blocks, block_size=block_size)
        self.index = Continuations(num_blocks, block_size)
        self.core.tree.watcher = self.index

    def publish(self, tokens, namespace=NAMESPACES[0], *, is_written=True):
        core = self.core
        hit = core.match(namespace, packed(tokens), len(tokens))
        cache, start = core.acquire(hit)
        assert core.extend(cache, start, len(tokens))
        promise = core.publishing.promise(cache, packed(tokens), len(tokens))
        if promise is not None:
            (core.publishing.commit if is_written else core.publishing.abandon)(promise)
        core.moves.copies_done(core.moves.take_copies())
        core.release(cache)

    def paths(self, namespace):
        """Return the tokens of every path to a leaf."""
        found = []
        for node in self.core.tree.nodes():
            if node.root.key == namespace and not node.children:
                keys, at = [], node
                while at.parent is not None:
                    keys.append(at.key)
                    at = at.parent
                found.append(array("i", b"".join(reversed(keys))).tolist())
        return found


def is_in(tokens, after, paths):
    """Whether ``tokens`` follow ``after`` somewhere in one of these paths."""
    wanted = [*after, *tokens]
    return any(path[at : at + len(wanted)] == wanted for path in paths for at in range(len(path)))


def test_what_followed_is_found_and_counted():
    cached = Cached(64, 4)
    cached.publish([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    found = cached.index.after(NAMESPACES[0], packed([90, 91, 3, 4, 5, 6]), 4)
    assert tokens_of(found) == [7, 8, 9, 10]
    assert found.num_matched == 4
    assert tokens_of(cached.index.after(NAMESPACES[0], packed([10, 11]), 5)) == [12]
    assert cached.index.after(NAMESPACES[0], packed([11, 12]), 5) is None, "nothing followed"
    assert cached.index.after(NAMESPACES[0], packed([12]), 5) is None, "one token says too little"
    assert cached.index.after(NAMESPACES[0], packed([3, 5]), 5) is None


def test_the_newest_place_counts_and_the_longest_agreement():
    cached = Cached(64, 4)
    cached.publish([1, 2, 3, 4, 5, 60, 61, 62])
    cached.publish([9, 9, 9, 4, 5, 70, 71, 72])
    assert tokens_of(cached.index.after(NAMESPACES[0], packed([8, 4, 5]), 2)) == [70, 71]
    assert tokens_of(cached.index.after(NAMESPACES[0], packed([1, 2, 3, 4, 5]), 2)) == [60, 61]


def test_another_tenant_finds_nothing():
    cached = Cached(64, 4)
    secret = list(range(100, 140))
    cached.publish(secret, NAMESPACES[0])
    for at in range(2, 36):
        for num in range(2, at):
            assert cached.index.after(NAMESPACES[1], packed(secret[at - num : at]), 8) is None
    cached.publish([*secret[:8], 1, 2, 3, 4], NAMESPACES[1])
    assert tokens_of(cached.index.after(NAMESPACES[1], packed(secret[3:8]), 8)) == [1, 2, 3, 4]


def test_what_is_forgotten_is_not_found():
    cached = Cached(64, 4)
    text = list(range(50, 90))
    cached.publish(text)
    assert cached.index.after(NAMESPACES[0], packed(text[5:10]), 4) is not None
    cached.core.forgetting.reset()
    assert cached.index.after(NAMESPACES[0], packed(text[5:10]), 4) is None
    cached.publish(text, is_written=False)
    assert cached.index.after(NAMESPACES[0], packed(text[5:10]), 4) is None, "the step failed that was to write it"


def test_a_path_is_gone_on_as_others_did():
    cached = Cached(64, 4)
    cached.publish([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    tail = cached.core.match(NAMESPACES[0], packed([1, 2, 3, 4]), 4).nodes[-1]
    found = cached.index.along(tail, packed([5, 6]), 4)
    assert (tokens_of(found), found.num_matched) == ([7, 8, 9, 10], MAX_COMPARED)
    assert cached.index.along(tail, packed([5, 7]), 4) is None


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_found_is_there(seed):
    """Small pools, so that paths come and go; all that is found follows just so in a path of the namespace."""
    random = Random(seed)
    cached = Cached(random.choice((5, 12, 40)), random.choice((1, 2, 4, 8)))
    num_found = 0
    texts = [[random.randrange(6) for _ in range(random.randrange(2, 60))] for _ in range(20)]
    for _ in range(300):
        namespace = random.choice(NAMESPACES)
        text = random.choice(texts)[: (cached.core.pool.num_blocks - 1) * cached.core.block_size]
        if random.random() < 0.6:
            cached.publish(text, namespace, is_written=random.random() < 0.9)
        elif random.random() < 0.05:
            cached.core.forgetting.reset()
        end = random.randrange(1, len(text) + 1)
        found = cached.index.after(namespace, packed(text[:end]), random.randrange(1, 9))
        if found is not None:
            num_found += 1
            assert found.num_matched >= GRAM_SIZES[-1]
            after = text[end - found.num_matched : end]
            assert is_in(tokens_of(found), after, cached.paths(namespace))
    assert num_found > 30


def test_nothing_is_found_twice_as_new_as_it_is():
    """A table is a guess, and what it misses is only missed: most of what is there is found."""
    random = Random(1)
    cached = Cached(256, 16)
    texts = [[random.randrange(10_000) for _ in range(256)] for _ in range(15)]
    for text in texts:
        cached.publish(text)
    found = sum(
        cached.index.after(NAMESPACES[0], packed(text[end - 6 : end]), 8) is not None
        for text in texts
        for end in range(6, 256)
    )
    assert found > 0.8 * len(texts) * 250


def test_it_takes_no_more_than_24_bytes_a_token():
    for num_blocks, block_size in ((100, 16), (1000, 1), (64, 256)):
        assert Continuations(num_blocks, block_size).num_bytes <= (24 + 8 / block_size) * num_blocks * block_size
    assert Continuations(1000, 16).num_bytes <= 24 * 16_000


def test_a_table_finds_what_was_noted_last():
    table = GramTable(100, (3, 2))
    text = packed([5, 6, 7, 5, 6, 8])
    table.note(text, 0, range(6))
    assert next(iter(table.find(packed([5, 6])))) == 4
    assert list(table.find(packed([9, 9, 9]))) == []
    table.clear()
    assert list(table.find(packed([5, 6]))) == []


def test_common_ends_are_counted():
    assert num_common(packed([1, 2, 3]), packed([9, 2, 3])) == 2
    assert num_common(packed([1, 2, 3]), packed([2, 3])) == 2
    assert num_common(packed([1]), b"") == 0
    assert num_common(packed([256]), packed([1])) == 0
