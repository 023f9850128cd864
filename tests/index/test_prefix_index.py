"""The index beside one that looks at all it was ever told."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pagefold.index import PrefixIndex
from pagefold.index.prefix_index import TooManyPlacesError
from pagefold.index.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

SIZE = 4
WINDOW = 7
PATHS = [[path * 100 + depth + (2**64 if path else 0) for depth in range(6)] for path in range(3)]
"""Of blocks; the last 64 bits of a hash are what counts."""
REPLICAS = ("a", "b", "c")
MEDIA = ("GPU", "CPU", "STORAGE", None)


def stored(hashes, medium="GPU", group=0, window=None) -> BlockStored:
    kind = None if window is None else "sliding_window"
    hashes = [one.to_bytes(32, "big") for one in hashes]
    told = {"group_idx": group, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window}
    return BlockStored(hashes, None, [], SIZE, None, medium, None, **told)


def batch(*events, ts: float = 1.0) -> EventBatch:
    return EventBatch(ts, list(events))


class IndexMachine(RuleBasedStateMachine):
    """Replicas of one cache group, and one (``c``) that has a window beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.held: dict[str, set] = defaultdict(set)  # of (block, medium, group)
        self.known: dict[str, bool] = {}
        self.windows: set[str] = set()
        self.groups: dict[str, set] = defaultdict(set)

    @rule(
        replica=st.sampled_from(REPLICAS),
        path=st.sampled_from(PATHS),
        begin=st.integers(0, 5),
        num=st.integers(1, 6),
        medium=st.sampled_from(MEDIA),
        times=st.integers(1, 2),
        in_window=st.booleans(),
    )
    def store(self, *, replica, path, begin, num, medium, times, in_window) -> None:
        group = int(in_window and replica == "c")
        hashes = path[begin : begin + num]
        event = stored(hashes, medium, group, WINDOW if group else None)
        self.index.apply(replica, batch(*[event] * times))
        self.known.setdefault(replica, False)  # it may hold more than that
        self.held[replica] |= {(one, medium or "GPU", group) for one in hashes}
        self.groups[replica].add(group)
        if group:
            self.windows.add(replica)

    @rule(
        replica=st.sampled_from(REPLICAS),
        path=st.sampled_from(PATHS),
        begin=st.integers(0, 5),
        num=st.integers(1, 6),
        medium=st.sampled_from(MEDIA),
        group=st.integers(0, 1),
    )
    def remove(self, *, replica, path, begin, num, medium, group) -> None:
        hashes = [one.to_bytes(32, "big") for one in path[begin : begin + num]]
        self.index.apply(replica, batch(BlockRemoved(hashes, medium, group)))
        self.known.setdefault(replica, False)
        self.held[replica] -= {(one, medium or "GPU", group) for one in path[begin : begin + num]}

    @rule(replica=st.sampled_from(REPLICAS), how=st.sampled_from(("cleared", "begin", "forget", "gone")))
    def lose(self, replica, how) -> None:
        if how == "cleared":
            self.index.apply(replica, batch(AllBlocksCleared()))
        elif how == "begin":
            self.index.begin(replica)
        elif how == "forget":
            self.index.forget(replica)
        else:
            self.index.replica_gone(replica)
        self.held.pop(replica, None)
        self.windows.discard(replica)
        self.groups.pop(replica, None)
        self.known[replica] = how != "forget"
        if how == "gone":
            del self.known[replica]

    @invariant()
    def it_has_what_it_was_told(self) -> None:
        states = self.index.replicas()
        assert {name: state.is_known for name, state in states.items()} == self.known
        for replica, state in states.items():
            assert state.num_blocks == len({one for one, _, _ in self.held[replica]})
        for path in PATHS:
            for media in (None, ("GPU",), ("CPU", "STORAGE"), ("nowhere",)):
                for hashes in (path, path[1:], [*path[:2], 77]):
                    asked = [one.to_bytes(32, "big") for one in hashes]
                    assert self.index.match(asked, media) == self._longest(hashes, media)

    def _longest(self, hashes, media) -> dict[str, int]:
        found = {}
        for replica in self.known:
            held = {(one, group) for one, medium, group in self.held[replica] if media is None or medium in media}
            ends = [end for end in range(1, len(hashes) + 1) if self._is_whole(replica, held, hashes[:end])]
            if ends:
                found[replica] = ends[-1]
        return found

    def _is_whole(self, replica, held, hashes) -> bool:
        """Whether whoever goes on behind ``hashes`` finds what it needs."""
        groups = self.groups[replica]
        if not groups:
            return False
        if 0 in groups and not all((one, 0) in held for one in hashes):
            return False
        if replica not in self.windows:
            return True
        position = len(hashes) * SIZE
        seen = {at // SIZE for at in range(max(0, position - WINDOW + 1), position)} | {len(hashes) - 1}
        return all((hashes[at], 1) in held for at in seen)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=40, stateful_step_count=20)


def test_when_a_replica_made_its_last_batch_is_known():
    index = PrefixIndex()
    assert index.replicas() == {}
    index.apply("a", batch(AllBlocksCleared(), stored([1, 2]), ts=5.5))
    assert index.replicas() == {"a": (True, 2, 5.5)}
    index.doubt("a")
    assert index.replicas() == {"a": (False, 2, 5.5)}
    assert index.match([1]) == {"a": 1}
    index.trust("a")
    assert index.replicas()["a"].is_known
    index.forget("a")
    index.trust("a")
    assert index.replicas() == {"a": (False, 0, 5.5)}


def test_a_name_that_comes_again_has_nothing_of_before():
    index = PrefixIndex()
    for name in ("a", "b"):
        index.apply(name, batch(stored([1, 2])))
    index.replica_gone("a")
    index.apply("c", batch(stored([1])))
    assert index.match([1, 2]) == {"b": 2, "c": 1}
    index.apply("a", batch(stored([1, 2, 3])))
    assert index.match([1, 2, 3]) == {"a": 3, "b": 2, "c": 1}


def test_who_only_looks_up_needs_no_package():
    code = "import sys, pagefold.index; print({'torch', 'numpy', 'zmq', 'msgspec', 'cbor2'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("missing", ["zmq", "msgspec", "cbor2"])
def test_a_package_that_is_not_there_is_named_with_its_extra(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; import pagefold.index as index; index.block_hashes([1], 1); "
    code += "import pagefold.index.subscriber"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConfigError" in ended.stderr
    assert 'must be installed. pip install "pagefold[events]"' in ended.stderr


@pytest.mark.parametrize("group", [-1, 64, 2**70])
def test_nonsense_does_not_fill_the_memory(group):
    index = PrefixIndex()
    with pytest.raises(TooManyPlacesError, match="64 cache groups"):
        index.apply("a", batch(stored([1], group=group)))
    with pytest.raises(TooManyPlacesError, match="16 media"):
        index.apply("a", batch(*(stored([1], medium=f"medium {number}") for number in range(17))))


def test_nonsense_of_one_replica_takes_no_place_from_another():
    index = PrefixIndex()
    with pytest.raises(TooManyPlacesError, match="Replica bad tells of more than 16 media"):
        index.apply("bad", batch(*(stored([1], medium=f"medium {number}") for number in range(17))))
    for medium in ("GPU", "CPU", "STORAGE"):
        for replica in ("bad", "good"):
            index.apply(replica, batch(stored([2], medium)))
            assert index.match([2], [medium]) == dict.fromkeys(("bad", "good")[: 1 + (replica == "good")], 1)
            assert index.holds(replica, medium) == {2: {0}}
        index.apply("good", batch(BlockRemoved([2], medium, 0)))
        index.apply("bad", batch(BlockRemoved([2], medium, 0)))
    index.apply("good", batch(stored([3], "a new kind of medium")))
    assert index.match([3]) == {"good": 1}
    index.apply("bad", batch(AllBlocksCleared(), stored([3], "a new kind of medium")))  # it has come to its senses
    assert index.match([3], ["a new kind of medium"]) == {"bad": 1, "good": 1}


def test_a_batch_that_comes_after_its_replica_has_gone_makes_nothing_known():
    index = PrefixIndex()
    index.begin("a")
    index.apply("a", batch(stored([1, 2])))
    assert index.is_known("a")
    index.replica_gone("a")
    index.apply("a", batch(stored([3])))  # it holds 1 and 2 too, and the index does not say so
    assert index.replicas() == {"a": (False, 1, 1.0)}
    index.trust("a")
    assert not index.is_known("a")
    index.apply("a", batch(AllBlocksCleared(), stored([1])))
    assert index.replicas() == {"a": (True, 1, 1.0)}
