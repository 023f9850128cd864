"""The team: whoever claims, every chunk is done once, and nobody goes on before all are."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numba
import numpy as np
import pytest

from pagefold.kernels.team import SYNC_WIDTH, claim, claim_near, ends, finish_all, share_of, wait


class Run(NamedTuple):
    """What a team shares, and what is noted of it, by phases.

    Attributes:
        sync, shares: its counters.
        done: how often each chunk was done.
        order: which chunks each member did; -1 behind them.
        seen: how many were done when each member went on.
    """

    sync: np.ndarray
    shares: np.ndarray
    done: np.ndarray
    order: np.ndarray
    seen: np.ndarray


@numba.njit(nogil=True)
def go_through(run, member, num_chunks):
    """Do the chunks of each phase: those near, and in odd phases the next of all."""
    for phase in range(len(run.sync)):
        num_done = 0
        while True:
            chunk = claim(run.sync, phase) if phase % 2 else claim_near(run.shares, phase, member, num_chunks)
            if chunk >= num_chunks:
                break
            run.done[phase, chunk] += 1
            run.order[phase, member, num_done] = chunk
            num_done += 1
        finish_all(run.sync, phase, num_done)
        wait(run.sync, phase, num_chunks)
        run.seen[phase, member] = run.done[phase].sum()


@pytest.mark.parametrize("num_chunks", [0, 1, 2, 7, 64, 500])
@pytest.mark.parametrize("num_members", [1, 2, 5])
def test_every_chunk_is_done_once_before_anybody_goes_on(num_members, num_chunks):
    num_phases = 40
    run = Run(
        sync=np.zeros((num_phases, SYNC_WIDTH), np.int64),
        shares=np.zeros((num_phases, num_members), np.int64),
        done=np.zeros((num_phases, num_chunks), np.int64),
        order=np.full((num_phases, num_members, num_chunks), -1),
        seen=np.zeros((num_phases, num_members), np.int64),
    )
    present = range(max(1, num_members - 1))  # one never comes: the others do its share
    threads = [threading.Thread(target=go_through, args=(run, member, num_chunks)) for member in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert (run.done == 1).all()
    assert (run.seen[:, list(present)] == num_chunks).all(), "somebody went on before all was done"
    assert (np.diff(ends(run.sync)) >= 0).all()
    for phase in range(0, num_phases, 2):
        for member in present:
            first, end = share_of.py_func(num_chunks, member, num_members)
            mine = [chunk for chunk in run.order[phase, member] if first <= chunk < end]
            assert mine == sorted(mine), "a share is gone through in order"
            assert list(run.order[phase, member][: len(mine)]) == mine, "and before anything else"


def test_shares_are_all_there_is_and_as_even_as_can_be():
    for num_chunks in range(40):
        for num_members in (1, 2, 3, 8):
            shares = [share_of.py_func(num_chunks, member, num_members) for member in range(num_members)]
            assert [chunk for first, end in shares for chunk in range(first, end)] == list(range(num_chunks))
            sizes = [end - first for first, end in shares]
            assert max(sizes) - min(sizes) <= 1
