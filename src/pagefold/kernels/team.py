"""A team of threads that goes through phases together, and never waits for a member that is not there.

The work of a phase is chunks. A member claims the next chunk, does it, counts it done; when none is left to claim it
waits until all are *done*. What counts is chunks, not members: a thread that the system has put aside, for another
process or because there is no second core, is missed only for the chunk that it has in hand, and for those that it has
done and not counted yet, where it counts several at once. One that comes late finds everything claimed and done, and
catches up. With one member the same code is a plain loop.

That is what a barrier of an OpenMP region cannot do: it waits for every thread, a scheduler's slice long if need be,
and a decoder has hundreds of them a step.

Where it matters that a member does chunks that lie side by side, each has a share of them: it claims from its own until
that is empty, and then from those of others.

The counters of a phase are used once a run, so nothing is ever reset while somebody may look: ``sync`` and ``shares``
are zeroed between runs. In ``sync`` a phase has 128 bytes, and what is claimed is 64 bytes from what is done: members
that wait do not read the line that others claim from. In ``shares`` those of a phase lie side by side, mostly in one
cache line, which members take from each other at each claim: some dozen times each, which is nothing beside the chunks.
``sync`` also says when a phase was over: two dozen nanoseconds a phase, and where a step's time went is always known.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pagefold.kernels.compiled import part

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SYNC_WIDTH", "claim", "claim_near", "ends", "finish", "finish_all", "share_of", "wait"]

SYNC_WIDTH = 16
"""int64 numbers a phase: ``sync`` is ``[num_phases, SYNC_WIDTH]``; [0] counts claims, [8] what is done; [12]
and [13] are when the first member went on from it, in seconds and nanoseconds of the monotonic clock."""

_DONE = 8
_END = 12
_WORD = 8
_SPINS = 2000  # some microseconds: longer than a phase is uneven, far shorter than a scheduler's slice

_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_MONOTONIC = time.CLOCK_MONOTONIC  # what time.monotonic reads


@intrinsic
def _fetch_add(typing, address, number):
    """Add ``number`` to the int64 at ``address``, and return what it was."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> ir.Value:
        where = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", where, args[1], "seq_cst")

    return types.int64(types.intp, types.int64), generate


@intrinsic
def _load(typing, address):
    """Return the int64 at ``address``, and see all that was written before it was."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> ir.Value:
        where = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(where, "acquire", align=_WORD)

    return types.int64(types.intp), generate


@part()
def claim(sync, phase):
    """Return the next chunk of ``phase``; there are no more when it is their number or above."""
    return _fetch_add(sync.ctypes.data + phase * SYNC_WIDTH * _WORD, 1)


@part()
def share_of(num_chunks, member, num_members):
    """Return the first chunk of a member's share, and the one behind its last."""
    return num_chunks * member // num_members, num_chunks * (member + 1) // num_members


@part()
def claim_near(shares, phase, member, num_chunks):
    """Return the next chunk of the member's own share of ``phase``, else another's; ``num_chunks`` if none is left.

    Args:
        shares: int64 ``[num_phases, members]``: how many were claimed of each share.
        phase: which one.
        member: who asks.
        num_chunks: of the phase.
    """
    num_members = shares.shape[1]
    for turn in range(num_members):
        owner = (member + turn) % num_members
        first, end = share_of(num_chunks, owner, num_members)
        address = shares.ctypes.data + (phase * num_members + owner) * _WORD
        if first + _load(address) < end:
            chunk = first + _fetch_add(address, 1)
            if chunk < end:
                return chunk
    return num_chunks


@part()
def finish(sync, phase):
    """Count one chunk of ``phase`` done: what it wrote is there for whoever has waited."""
    finish_all(sync, phase, 1)


@part()
def finish_all(sync, phase, num_chunks):
    """Count so many chunks done."""
    _fetch_add(sync.ctypes.data + (phase * SYNC_WIDTH + _DONE) * _WORD, num_chunks)


@part()
def wait(sync, phase, num_chunks):
    """Wait until all chunks of ``phase`` are done: at first eagerly, then letting others run."""
    address = sync.ctypes.data + (phase * SYNC_WIDTH + _DONE) * _WORD
    spins = 0
    while _load(address) < num_chunks:
        spins += 1
        if spins > _SPINS:
            _sched_yield()
    if sync[phase, _END] == 0:
        _clock_gettime(_MONOTONIC, sync.ctypes.data + (phase * SYNC_WIDTH + _END) * _WORD)


def ends(sync: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return when each phase of the last run was over, in seconds of ``time.monotonic``, ``[num_phases]``.

    A phase that had nothing to do ended with the one before it.
    """
    seconds: NDArray[np.float64] = np.maximum.accumulate(sync[:, _END] + sync[:, _END + 1] * 1e-9)
    return seconds
