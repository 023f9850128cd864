"""PrefixTree: matches are the longest there are (against brute force), bounded as asked, exact, and write nothing."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.kv.block import Block, BlockId, Node
from pagefold.kv.tree import PrefixHit, PrefixTree

if TYPE_CHECKING:
    from collections.abc import Sequence

NS = b"namespace"


def pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


class Tree:
    """A PrefixTree that can be told whole texts."""

    def __init__(self, block_size: int = 4) -> None:
        self.tree = PrefixTree(block_size)
        self.block_size = block_size
        self.num_blocks = 0

    def publish(self, tokens: Sequence[int], namespace: bytes = NS, *, committed: bool = True) -> list[Node]:
        """Insert every whole block of ``tokens`` that is not there yet; return the path."""
        node = self.tree.root(namespace)
        path = []
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            key = pack(tokens[start : start + self.block_size])
            child = node.children.get(key)
            if child is None:
                child = self.tree.insert(node, key, (Block(BlockId(self.num_blocks)),), 0)
                child.committed = committed
                self.num_blocks += 1
            node = child
            path.append(node)
        return path

    def match(self, tokens: Sequence[int], max_tokens: int | None = None, namespace: bytes = NS) -> PrefixHit:
        return self.tree.match(namespace, pack(tokens), len(tokens) if max_tokens is None else max_tokens)


def test_nothing_is_known_at_first() -> None:
    assert Tree().match([1, 2, 3, 4]) == PrefixHit(NS, [], None, 0)


def test_whole_blocks_match() -> None:
    tree = Tree()
    path = tree.publish(range(12))
    assert tree.match(range(12)) == PrefixHit(NS, path, None, 0)
    assert tree.match([*range(8), 99, 99, 99, 99]) == PrefixHit(NS, path[:2], None, 0)
    assert tree.match(range(100)) == PrefixHit(NS, path, None, 0)


def test_a_part_of_a_block_matches_too() -> None:
    tree = Tree()
    path = tree.publish(range(12))
    assert tree.match([*range(6), 99, 99]) == PrefixHit(NS, path[:1], path[1], 2)
    assert tree.match(range(3)) == PrefixHit(NS, [], path[0], 3)


@pytest.mark.parametrize("max_tokens", range(14))
def test_a_match_is_never_longer_than_asked(max_tokens: int) -> None:
    tree = Tree()
    path = tree.publish(range(12))
    hit = tree.match(range(12), max_tokens)
    bound = min(max_tokens, 12)
    assert hit.nodes == path[: bound // 4]
    assert hit.num_partial_tokens == bound % 4
    assert hit.partial is (path[bound // 4] if bound % 4 else None)


def test_an_empty_prompt_matches_nothing() -> None:
    tree = Tree()
    tree.publish(range(4))
    assert tree.match([], 0) == PrefixHit(NS, [], None, 0)
    assert tree.match([], -1) == PrefixHit(NS, [], None, 0)


def test_the_middle_of_a_text_is_no_prefix() -> None:
    tree = Tree()
    tree.publish(range(12))
    assert tree.match(range(4, 12)) == PrefixHit(NS, [], None, 0)


def test_bytes_that_agree_across_tokens_do_not_match() -> None:
    """Tokens are compared whole: 0x01020304 and 0x01020305 share three bytes of four, whichever way they lie."""
    tree = Tree()
    tree.publish([0x01020304, 1, 1, 1])
    for other in (0x01020305, 0x02020304, 0x01030304, 0x01020404):
        assert tree.match([other, 1, 1, 1]) == PrefixHit(NS, [], None, 0)
    assert tree.match([0x01020304, 0x01, 0x01, 0x100]).num_partial_tokens == 3


def test_negative_and_large_tokens_are_tokens() -> None:
    tree = Tree()
    path = tree.publish([-1, 2**31 - 1, -(2**31), 0])
    assert tree.match([-1, 2**31 - 1, -(2**31), 0]).nodes == path


def test_a_partial_match_takes_the_child_that_agrees_longest() -> None:
    tree = Tree()
    tree.publish([1, 0, 0, 0])
    (best,) = tree.publish([1, 2, 3, 0])
    tree.publish([1, 2, 0, 0])
    tree.publish([2, 2, 3, 4])
    assert tree.match([1, 2, 3, 4]) == PrefixHit(NS, [], best, 3)


def test_of_equal_partial_matches_the_newest_wins() -> None:
    tree = Tree()
    tree.publish([1, 2, 0, 0])
    (newest,) = tree.publish([1, 2, 0, 1])
    assert tree.match([1, 2, 3, 4]) == PrefixHit(NS, [], newest, 2)


def test_a_partial_match_looks_at_the_newest_32_siblings() -> None:
    tree = Tree()
    tree.publish([7, 7, 7, 0])
    for token in range(100, 131):
        tree.publish([token, 0, 0, 0])
    assert tree.match([7, 7, 7, 7]).num_partial_tokens == 3
    tree.publish([131, 0, 0, 0])
    assert tree.match([7, 7, 7, 7]).num_partial_tokens == 0
    assert len(tree.match([7, 7, 7, 0]).nodes) == 1  # whole blocks are looked up, however many siblings


def test_a_promised_block_matches_whole_but_not_in_part() -> None:
    """Whoever leans on it reads it after it is written; a copy would be made before."""
    tree = Tree()
    path = tree.publish(range(8), committed=False)
    assert tree.match(range(8)).nodes == path
    assert tree.match([0, 1, 2, 99]).partial is None
    path[0].committed = True
    assert tree.match([0, 1, 2, 99]).partial is path[0]


def test_namespaces_do_not_see_each_other() -> None:
    tree = Tree()
    path = tree.publish(range(8))
    other = tree.publish(range(8), namespace=b"other")
    assert tree.match(range(8)).nodes == path
    assert tree.match(range(8), namespace=b"other").nodes == other
    assert tree.match(range(8), namespace=b"") == PrefixHit(b"", [], None, 0)


def test_match_writes_nothing() -> None:
    tree = Tree()
    tree.publish(range(12))
    tree.publish([0, 1, 2, 3, 9, 9, 9, 9])

    def state() -> list[tuple[object, ...]]:
        return [tuple(getattr(node, name) for name in Node.__slots__ if name != "children") for node in nodes]

    nodes = list(tree.tree.nodes())
    before = state()
    for tokens in (range(12), range(7), [0, 1, 2, 3, 9, 9, 0, 0], [5], []):
        for max_tokens in range(13):
            tree.match(tokens, max_tokens)
    tree.match(range(4), namespace=b"unknown")
    assert list(tree.tree.nodes()) == nodes
    assert state() == before
    assert list(tree.tree.roots) == [NS]


def test_nodes_come_parents_first_and_know_their_depth() -> None:
    tree = Tree()
    for tokens in (range(12), [0, 1, 2, 3, 9, 9, 9, 9], range(50, 58)):
        tree.publish(tokens)
    tree.publish(range(4), namespace=b"other")
    nodes = list(tree.tree.nodes())
    assert len(nodes) == tree.num_blocks == 7
    seen: set[Node] = set(tree.tree.roots.values())
    for node in nodes:
        assert node.parent in seen
        assert node.depth == node.parent.depth + 1
        seen.add(node)
    assert all(one.depth == 0 for one in (root.children[pack(range(4))] for root in tree.tree.roots.values()))


def test_only_leaves_leave() -> None:
    tree = Tree()
    first, second = tree.publish(range(8))
    with pytest.raises(AssertionError, match="only leaves leave"):
        tree.tree.remove(first)
    tree.tree.remove(second)
    assert (first.attached, second.attached) == (True, False)
    assert tree.match(range(8)).nodes == [first]


def test_a_root_leaves_with_its_last_child_and_may_come_back() -> None:
    tree = Tree()
    (node,) = tree.publish(range(4))
    root = node.parent
    assert root is not None
    with pytest.raises(AssertionError, match="a root leaves with its last child"):
        tree.tree.remove(Node(NS, None, (), 0))
    tree.tree.remove(node)
    assert not tree.tree.roots
    assert not root.attached
    (again,) = tree.publish(range(4))
    assert tree.tree.roots == {NS: again.parent}
    assert tree.match(range(4)).nodes == [again]


def test_asking_for_a_root_puts_nothing_into_the_tree() -> None:
    tree = PrefixTree(4)
    assert tree.root(NS) is not tree.root(NS)
    assert not tree.roots


def brute_force(published: list[list[int]], block_size: int, tokens: list[int], max_tokens: int) -> tuple[int, int]:
    """Return the most whole blocks, then the most tokens of one more block, by looking at everything."""
    wanted = tokens[:max_tokens]
    whole = {tuple(text[:end]) for text in published for end in range(block_size, len(text) + 1, block_size)}
    num_blocks = 0
    while (num_blocks + 1) * block_size <= len(wanted) and tuple(wanted[: (num_blocks + 1) * block_size]) in whole:
        num_blocks += 1
    covered = num_blocks * block_size
    best = 0
    for text in whole:
        if len(text) == covered + block_size and list(text[:covered]) == wanted[:covered]:
            num = 0
            while num < block_size and covered + num < len(wanted) and text[covered + num] == wanted[covered + num]:
                num += 1
            best = max(best, num)
    return num_blocks, best


texts = st.lists(st.integers(0, 1), max_size=14)


@given(
    published=st.lists(texts, max_size=8),
    tokens=texts,
    max_tokens=st.integers(0, 16),
    block_size=st.sampled_from((1, 2, 3, 4)),
)
def test_match_is_the_longest_there_is(
    published: list[list[int]], tokens: list[int], max_tokens: int, block_size: int
) -> None:
    tree = Tree(block_size)
    for text in published:
        tree.publish(text)
    hit = tree.match(tokens, max_tokens)
    assert (len(hit.nodes), hit.num_partial_tokens) == brute_force(published, block_size, tokens, max_tokens)
    assert b"".join(node.key for node in hit.nodes) == pack(tokens[: len(hit.nodes) * block_size])
    for parent, child in pairwise(hit.nodes):
        assert child.parent is parent
    if hit.partial is not None:
        agreed = hit.num_partial_tokens * 4
        start = len(hit.nodes) * block_size * 4
        assert hit.partial.key[:agreed] == pack(tokens)[start : start + agreed]
        assert hit.partial.parent is (hit.nodes[-1] if hit.nodes else tree.tree.roots[NS])


def test_a_partial_match_takes_every_token_that_it_may() -> None:
    """As many as are asked about, up to a block less one; a prompt may end with the last of them."""
    tree = Tree()
    (node,) = tree.publish([1, 2, 3, 4])
    for num_tokens in (1, 2, 3):
        for text, most in (([1, 2, 3, 4, 5][:num_tokens], 9), ([1, 2, 3, 4, 5], num_tokens)):
            hit = tree.tree.match(NS, pack(text), most)
            assert (hit.partial, hit.num_partial_tokens) == (node, num_tokens)
