"""DiskStore against a dictionary: whatever is done to it, it holds at most what was put, as it was put."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from disk_blocks import bytes_of, count, frame_format, get, least_limit, path_of, put
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pagefold.kv.transfers import MissCause
from pagefold.store.disk import DiskStore

FORMATS = (frame_format(), frame_format(5000))
PATHS = [[path_of(8, of=of, block_bytes=made.block_bytes) for of in range(6)] for made in FORMATS]
LIMITS = (least_limit(12), least_limit(20, 5000), least_limit(60, 5000))
FRAME_BYTES = 8192

which_path = st.integers(0, 5)
part = st.slices(8).filter(lambda cut: cut.step in (None, 1))


class DiskMachine(RuleBasedStateMachine):
    """A folder with two layouts and three limits; the model is what may be there."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.layout = 0
        self.limit = LIMITS[-1]
        self.may_hold = [set(), set()]
        self.open()

    def open(self):
        self.store = DiskStore(self.folder / "cache", self.limit, FORMATS[self.layout])

    @rule(path=which_path, cut=part)
    def put(self, path, cut):
        blocks = PATHS[self.layout][path][cut]
        kept = put(self.store, blocks)
        assert kept <= len(blocks)
        assert count(self.store, blocks) >= min(kept, len(blocks))
        self.may_hold[self.layout].update(block.name.digest for block in blocks)

    @rule(path=which_path, cut=part)
    def get(self, path, cut):
        blocks = PATHS[self.layout][path][cut]
        there = count(self.store, blocks)
        results = get(self.store, blocks)  # compares bytes
        hits = [isinstance(result, bytes) for result in results]
        assert hits == sorted(hits, reverse=True)
        assert sum(hits) <= there
        for block, result in zip(blocks, results, strict=True):
            if not isinstance(result, MissCause):
                assert block.name.digest in self.may_hold[self.layout]
        assert count(self.store, blocks) == sum(hits), "what was wrong is dropped"

    @rule(path=which_path, cut=part)
    def delete(self, path, cut):
        blocks = PATHS[self.layout][path][cut]
        self.store.delete([block.name.digest for block in blocks])
        assert not any(count(self.store, [block]) for block in blocks)
        self.may_hold[self.layout].difference_update(block.name.digest for block in blocks)

    @rule()
    def clear(self):
        there = self.store.use().num_blocks
        assert self.store.clear() == there
        assert self.store.use().num_blocks == 0
        self.may_hold[self.layout].clear()

    @rule(layout=st.integers(0, 1), limit=st.sampled_from(LIMITS))
    def reopen(self, layout, limit):
        before = self.store.use().num_blocks
        self.store.close()
        same = (layout, limit) == (self.layout, self.limit)
        self.layout, self.limit = layout, limit
        self.open()
        assert not same or self.store.use().num_blocks == before

    @rule(at=st.integers(0, 60 * 12_288), bit=st.integers(0, 7))
    def corrupt(self, at, bit):
        for file in self.folder.glob("cache/*/segment-*.frames"):
            fd = os.open(file, os.O_RDWR)
            raw = os.pread(fd, 1, at)
            if raw:
                os.pwrite(fd, bytes((raw[0] ^ 1 << bit,)), at)
            os.close(fd)

    @rule()
    def self_test(self):
        assert self.store.self_test().ok

    @invariant()
    def never_over_the_limit(self):
        assert bytes_of(self.folder / "cache") <= self.limit
        known = self.store.known_use()
        assert known.num_held == self.store.use().num_blocks <= len(self.may_hold[self.layout])
        assert known.num_held <= known.num_blocks

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.folder)


def test_any_order_of_operations():
    run_state_machine_as_test(DiskMachine, settings=settings(max_examples=8, stateful_step_count=30, deadline=None))


@pytest.mark.long
def test_any_order_of_operations_for_long():
    run_state_machine_as_test(DiskMachine, settings=settings(max_examples=300, stateful_step_count=60, deadline=None))
