"""TransferThreads: whose blocks are brought, what a clear reaches, and how long a close takes."""

from __future__ import annotations

import threading
import time

import pytest
from memory_store import MemoryStore

from pagefold.kv import Arbiter, BlockName, FetchOp, HostTier, LinkModel, SlowTiers, WriteOp
from pagefold.kv.missing import NOTHING_MISSING
from pagefold.store import FrameFormat, HostArena, StoreError, TransferThreads
from pagefold.store.frame import checksum_of

FORM = FrameFormat(b"L" * 32, 2**20, 8)


def name(number):
    return BlockName(bytes([number]) * 32, b"P" * 32, b"N" * 32, bytes([number]) * 8)


def filled(arena, num):
    """Fill host blocks and return the writes of them."""
    ops = []
    for number in range(num):
        arena.blocks[number] = number
        arena.arrived(number, checksum_of(arena.payload(number)))
        ops.append(WriteOp(number, name(number)))
    return ops


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class GatedStore(MemoryStore):
    """One whose calls wait for a gate."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.gate = threading.Event()

    def put(self, puts):
        self.gate.wait()
        return super().put(puts)

    def get(self, gets):
        self.gate.wait()
        return super().get(gets)


def test_a_clear_reaches_what_is_on_its_way_to_the_next_tier():
    arena = HostArena(4, FORM.block_bytes)
    disk, remote = GatedStore(FORM), MemoryStore(FORM, tier="remote")
    transfer = TransferThreads(arena, [disk, remote])
    transfer.write(filled(arena, 4))
    clearing = threading.Thread(target=transfer.clear)
    clearing.start()
    disk.gate.set()
    clearing.join(30)
    assert not disk.kept
    assert not remote.kept
    transfer.close()


def test_a_clear_that_fails_says_so_and_clears_the_others():
    class Stubborn(MemoryStore):
        def clear(self):
            msg = "out"
            raise StoreError(msg)

    arena = HostArena(2, FORM.block_bytes)
    disk, remote = Stubborn(FORM), MemoryStore(FORM, tier="remote")
    transfer = TransferThreads(arena, [disk, remote])
    transfer.write(filled(arena, 2))
    with pytest.raises(StoreError, match="disk: out"):
        transfer.clear()
    assert not remote.kept
    transfer.close()


def test_who_follows_gets_what_was_begun_for_one_that_has_gone():
    """Cancelled, and asked again: the second waits for the blocks of the first."""
    arena = HostArena(64, FORM.block_bytes)
    store = GatedStore(FORM)
    store.gate.set()
    transfer = TransferThreads(arena, [store])
    transfer.write(filled(arena, 20))
    until(lambda: len(store.kept) == 20)
    transfer.collect(1.0)
    store.gate.clear()
    arbiter = Arbiter(1, 16, compute_s_per_token=1.0)
    arbiter.links["disk"] = LinkModel(0.0, 1e9)
    slow = SlowTiers(HostTier(64, notes_unsaved=True), "write_back", arbiter)
    found = [("disk", name(number)) for number in range(20)]
    first = slow.fetches.begin(found, 100.0, 0.0, NOTHING_MISSING)
    transfer.fetch(first)
    second = slow.fetches.begin(found, 100.0, 0.0, NOTHING_MISSING)
    assert not second.ops
    slow.fetches.end(first)
    store.gate.set()
    num_good = 0
    while not second.is_over:
        for outcome in transfer.collect(1.0):
            for op, checksum in zip(outcome.ops, outcome.found, strict=True):
                is_good = len(checksum) == 16 and isinstance(checksum, bytes)
                num_good += is_good
                slow.fetches.arrived(op.host_id, 0.0, is_good=is_good)
    assert num_good == second.num_arrived == 20
    slow.fetches.end(second)
    transfer.close()


def test_a_close_does_not_wait_for_what_never_ends():
    arena = HostArena(2, FORM.block_bytes)
    store = GatedStore(FORM)
    transfer = TransferThreads(arena, [store])
    for _ in range(5):
        transfer.write(filled(arena, 2))
    transfer.close()  # else this test would not end
    assert not store.is_closed, "it is in use"
    store.gate.set()


def test_what_is_read_for_nobody_is_not_read():
    arena = HostArena(2, FORM.block_bytes)
    transfer = TransferThreads(arena, [MemoryStore(FORM)])
    slow = SlowTiers(HostTier(2), "write_back", Arbiter(1, 16, compute_s_per_token=1.0))
    fetch = slow.fetches.begin([("disk", name(1))], 1.0, 0.0, NOTHING_MISSING)
    fetch.is_over = True
    transfer.fetch(fetch)
    (outcome,) = transfer.collect(10.0)
    assert list(outcome.ops) == [FetchOp(fetch.blocks[0].host_id, name(1))]
    assert [str(found) for found in outcome.found] == ["late"]
    transfer.close()
