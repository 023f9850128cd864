"""A team of threads that goes through phases together, and never waits for a member that is not there.

The work of a phase is chunks. A member claims the next chunk, does it, counts it done; when none is left to claim it
waits until all are *done*. What counts is chunks, not members: a thread that the system has put aside, for another
process or because there is no second core, is missed only for the chunk that it has in hand. One that comes late finds
everything claimed and done, and catches up. With one member the same code is a plain loop.

That is what a barrier of an OpenMP region cannot do: it waits for every thread, a scheduler's slice long if need be,
and a decoder has hundreds of them a step.

The counters of a phase are used once a run, so nothing is ever reset while somebody may look: ``sync`` is zeroed
between runs. Each phase has a cache line of its own.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pagefold.runner.kernels.compiled import part

__all__ = ["SYNC_WIDTH", "claim", "finish", "wait"]

SYNC_WIDTH = 16
"""int64 numbers a phase: ``sync`` is ``[num_phases, SYNC_WIDTH]``; [0] counts claims, [8] what is done."""

_DONE = 8
_WORD = 8
_SPINS = 2000  # some microseconds: longer than a phase is uneven, far shorter than a scheduler's slice

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def _fetch_add(typing, address):
    """Add 1 to the int64 at ``address``, and return what it was."""

    def generate(_context: Any, builder: ir.IRBuilder, _signature: Any, args: list[ir.Value]) -> ir.Value:
        where = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", where, ir.IntType(64)(1), "seq_cst")

    return types.int64(types.intp), generate


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
    return _fetch_add(sync.ctypes.data + phase * SYNC_WIDTH * _WORD)


@part()
def finish(sync, phase):
    """Count one chunk of ``phase`` done: what it wrote is there for whoever has waited."""
    _fetch_add(sync.ctypes.data + (phase * SYNC_WIDTH + _DONE) * _WORD)


@part()
def wait(sync, phase, num_chunks):
    """Wait until all chunks of ``phase`` are done: at first eagerly, then letting others run."""
    address = sync.ctypes.data + (phase * SYNC_WIDTH + _DONE) * _WORD
    spins = 0
    while _load(address) < num_chunks:
        spins += 1
        if spins > _SPINS:
            _sched_yield()
