"""ChunkTree: vLLM's contract of a cache policy, against a plain model of it; and what our policies see of requests."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagefold.integrations.vllm.chunk_policies import DEFAULT, POLICY_CLASSES
from pagefold.integrations.vllm.chunk_tree import ChunkTree
from pagefold.kv import make_policy

CAPACITY = 12


class Chunk:
    def __init__(self, chunk_id):
        self.ref_cnt = -1
        self.chunk_id = chunk_id


def nobody_knows(key):
    return None


def key_of(path):
    return repr(path).encode()


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(
    lambda steps: [key_of(steps[: index + 1]) for index in range(len(steps))]
)
KEYS = PATHS.map(lambda path: path[-1])


class Contract(RuleBasedStateMachine):
    """What vLLM's manager may do with a policy, in any order; keys may even contradict each other."""

    @initialize(name=st.sampled_from(sorted(set(POLICY_CLASSES.values()))))
    def begin(self, name):
        self.tree = ChunkTree(lambda: make_policy(name, CAPACITY))
        self.chunks = {}

    @rule(key=KEYS)
    def insert(self, key):
        if key not in self.chunks and len(self.chunks) < CAPACITY:
            self.chunks[key] = Chunk(len(self.chunks))
            self.tree.insert(key, self.chunks[key])

    @rule(path=PATHS, success=st.booleans())
    def written(self, path, success):
        for key in path:
            chunk = self.chunks.get(key)
            if chunk is not None and chunk.ref_cnt == -1:
                if success:
                    chunk.ref_cnt = 0
                    self.tree.mark_evictable(key)
                else:
                    self.tree.remove(key)
                    del self.chunks[key]

    @rule(path=PATHS)
    def read(self, path):
        for key in path:
            chunk = self.chunks.get(key)
            if chunk is not None and chunk.ref_cnt >= 0:
                if not chunk.ref_cnt:
                    self.tree.mark_non_evictable(key)
                chunk.ref_cnt += 1

    @rule(path=PATHS)
    def was_read(self, path):
        for key in path:
            chunk = self.chunks.get(key)
            if chunk is not None and chunk.ref_cnt > 0:
                chunk.ref_cnt -= 1
                if not chunk.ref_cnt:
                    self.tree.mark_evictable(key)

    @rule(path=PATHS, is_told=st.booleans(), num_reused=st.integers(0, 6))
    def end(self, path, is_told, num_reused):
        positions = {key: 16 * index for index, key in enumerate(path, start=1)}
        self.tree.use(path, set(path[:num_reused]), positions.get if is_told else nobody_knows)

    @rule(path=PATHS)
    def end_in_a_wrong_order(self, path):
        self.tree.use(reversed(path), set(), nobody_knows)

    @rule(num=st.integers(0, 6), protected=st.frozensets(KEYS, max_size=5))
    def evict(self, num, protected):
        free = {key for key, chunk in self.chunks.items() if chunk.ref_cnt == 0} - protected
        evicted = self.tree.evict(num, protected)
        if len(free) < num:
            assert evicted is None
        else:
            assert len(evicted) == num == len({key for key, _ in evicted})
            for key, chunk in evicted:
                assert key in free
                assert self.chunks.pop(key) is chunk

    @rule()
    def clear(self):
        self.tree.clear()
        self.chunks.clear()

    @invariant()
    def holds_what_it_should(self):
        if not hasattr(self, "tree"):
            return
        assert len(self.tree) == len(self.chunks)
        assert all(self.tree.get(key) is chunk for key, chunk in self.chunks.items())
        assert self.tree.get(b"nobody") is None
        shown = {node.key for node in self.tree._policy.candidates()} | {node.key for node in self.tree._rest}
        assert shown == {key for key, chunk in self.chunks.items() if chunk.ref_cnt == 0}


TestContract = Contract.TestCase
TestContract.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def filled(name, *paths):
    """A tree with paths of requests that have ended, one after another."""
    tree = ChunkTree(lambda: make_policy(name, CAPACITY))
    for path in paths:
        serve(tree, path)
    return tree


def serve(tree, path):
    found = {key for key in path if tree.get(key) is not None}
    for key in path:
        if key not in found:
            tree.insert(key, chunk := Chunk(0))
            chunk.ref_cnt = 0
            tree.mark_evictable(key)
    tree.use(path, found, nobody_knows)


def path_of(*steps):
    return [key_of(list(steps[: index + 1])) for index in range(len(steps))]


def evicted(tree, num, protected=()):
    return [key for key, _ in tree.evict(num, set(protected))]


def test_leaves_go_first_whatever_the_policy():
    for name in set(POLICY_CLASSES.values()):
        path = path_of(1, 2, 3, 4)
        assert evicted(filled(name, path), 4) == path[::-1], name


def test_of_two_conversations_lru_evicts_the_older_one_and_keeps_what_both_begin_with():
    one, other = path_of(0, 1, 2), path_of(0, 5, 6)
    tree = filled("lru", one, other)
    assert evicted(tree, 2) == [one[2], one[1]]
    serve(tree, other)
    assert evicted(tree, 3) == other[::-1]


def test_a_conversation_that_goes_on_is_known_by_its_chunks():
    one, other = path_of(0, 1), path_of(0, 5)
    tree = filled("lfu", one, path_of(0, 1, 2), one, other)
    assert evicted(tree, 3) == [key_of([0, 1, 2]), other[1], one[1]], "of those used once the older one"


def test_what_a_running_request_has_goes_last():
    tree = filled("lru", path_of(1, 2))
    for key in path_of(7, 8):
        tree.insert(key, chunk := Chunk(0))
        chunk.ref_cnt = 0
        tree.mark_evictable(key)
    assert evicted(tree, 3) == [*path_of(1, 2)[::-1], path_of(7, 8)[1]]


def test_a_parent_goes_where_all_else_is_held():
    path = path_of(1, 2, 3)
    tree = filled("lru", path)
    tree.mark_non_evictable(path[2])
    tree.get(path[2]).ref_cnt = 1
    assert tree.evict(3, set()) is None
    assert tree.evict(2, {path[1]}) is None
    assert evicted(tree, 1, [path[1]]) == [path[0]]
    assert evicted(tree, 1) == [path[1]]
    assert len(tree) == 1


def test_what_was_learned_is_forgotten_when_all_is_cleared():
    tree = filled(DEFAULT, path_of(1, 2))
    tree.clear()
    assert len(tree) == 0
    assert tree.evict(1, set()) is None
    serve(tree, path_of(1, 2))
    assert len(tree) == 2
