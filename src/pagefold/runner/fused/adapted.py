"""What the fused decoder's kernel does with LoRA adapters, beside its products.

An adapter adds ``B (s * (A x))`` to what a matrix makes of x, in float32, so it goes with any format of weights.
*Shrink* is A's half: of rows that are normed anyway it is computed where they are, before they are turned into a
format; of what attention or the MLP came to, where the product of that is added or normed. *Expand* is B's half, right
behind the product (see ``kernels/low_rank.py``). A token's numbers are chains over its own row, so they are the same to
the bit beside any others.

Whose adapter a token has is a slot, 0 for none. Parts of the kernel are there only for :class:`StepAdapters`: without
adapters nothing of them is compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagefold.adapters import MODULES, STAGES
from pagefold.kernels.compiled import part, part_with
from pagefold.kernels.emit import FLOAT_BYTES, call_tile
from pagefold.kernels.low_rank import FLOAT32

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "DOWN",
    "GATE_UP",
    "NO_ADAPTERS",
    "NO_STAGE",
    "OUT",
    "QKV",
    "NoAdapters",
    "StepAdapters",
    "add_product",
    "expand_gate_up",
    "expand_qkv",
    "shrink",
]

QKV, OUT, GATE_UP, DOWN = range(len(STAGES))
"""What is multiplied with the same rows: see :data:`~pagefold.adapters.STAGES`."""
NO_STAGE = -1
_Q, _K, _V, _O, _GATE, _UP, _DOWN = range(len(MODULES))
_WEIGHTS, _SCALES, _NUM_K, _NUM_LOW = range(4)
_ADDRESS, _RANK, _NUM, _FIRST_LOW = range(4)


class NoAdapters(NamedTuple):
    """Of a decoder that takes no adapters. It is told from :class:`StepAdapters` by its class."""

    nothing: int = 0


NO_ADAPTERS = NoAdapters()


class StepAdapters(NamedTuple):
    """The adapters of a step of T tokens and R rows of logits; S slots, the first of which is that of no adapter.

    Attributes:
        of_tokens: int64 ``[T]``: the slot of each token.
        of_rows: int64 ``[R]``: of each row that goes on behind the last layer's attention.
        dtypes: int64 ``[S]``: of weights (see ``kernels/low_rank.py``).
        shrinks: int64 ``[S, L, 4, 4]``: of each stage the addresses of A ``[K, r]``, of all its modules side by side,
            and of as many scales; K; and r, 0 for nothing.
        expands: int64 ``[S, L, 7, 4]``: of each module the address of B ``[r, N]``; r; N; and the first of its numbers
            of ``low``.
        low: float32 ``[max(T, R), 3 * the largest rank]``: what rows came to behind A.
        shrink, expand: addresses of what computes them.
    """

    of_tokens: NDArray[np.int64]
    of_rows: NDArray[np.int64]
    dtypes: NDArray[np.int64]
    shrinks: NDArray[np.int64]
    expands: NDArray[np.int64]
    low: NDArray[np.float32]
    shrink: int
    expand: int


@part()
def _shrink_row(adapters, slot, layer, stage, x, row, t):
    """``adapters.low[t]``: what a row of ``x`` comes to behind the A of a stage."""
    weights, scales = adapters.shrinks[slot, layer, stage, _WEIGHTS], adapters.shrinks[slot, layer, stage, _SCALES]
    num_k, num_low = adapters.shrinks[slot, layer, stage, _NUM_K], adapters.shrinks[slot, layer, stage, _NUM_LOW]
    if num_low:
        at_x = x.ctypes.data + row * x.shape[1] * FLOAT_BYTES
        into = adapters.low.ctypes.data + t * adapters.low.shape[1] * FLOAT_BYTES
        call_tile(adapters.shrink, (at_x, weights, scales, num_k, num_low, adapters.dtypes[slot], into))


@part()
def _expand_row(adapters, slot, layer, module, t, y, row, column, first, most):
    """Add what row ``t`` comes to behind a module's B to ``y[row, column...]``: ``most`` numbers from ``first`` on."""
    address, rank = adapters.expands[slot, layer, module, _ADDRESS], adapters.expands[slot, layer, module, _RANK]
    num_all, low = adapters.expands[slot, layer, module, _NUM], adapters.expands[slot, layer, module, _FIRST_LOW]
    num = min(most, num_all - first)
    if rank and num > 0:
        dtype = adapters.dtypes[slot]
        at_low = adapters.low.ctypes.data + (t * adapters.low.shape[1] + low) * FLOAT_BYTES
        here = address + first * (4 if dtype == FLOAT32 else 2)
        at_y = y.ctypes.data + (row * y.shape[1] + column) * FLOAT_BYTES
        call_tile(adapters.expand, (at_low, here, rank, num_all, dtype, at_y, num))


@part()
def _slot_of(adapters, t, of_rows):
    return adapters.of_rows[t] if of_rows else adapters.of_tokens[t]


@part_with(StepAdapters)
def shrink(adapters, layer, stage, x, source, num, first, of_rows):
    """Shrink ``num`` rows of ``x`` from ``source`` on, which are those of tokens, or of rows, from ``first`` on."""
    for index in range(num if stage != NO_STAGE else 0):
        slot = _slot_of(adapters, first + index, of_rows)
        if slot:
            _shrink_row(adapters, slot, layer, stage, x, source + index, first + index)


@part_with(StepAdapters)
def add_product(adapters, layer, stage, x, first, num, products, hidden, behind, of_rows):
    """Add what adapters make of rows of ``x`` to the product of a stage; nothing for :data:`NO_STAGE`.

    That is in ``products`` where it is normed by ``behind`` first, and else in the residual stream.
    """
    if stage == NO_STAGE:
        return
    module = _O if stage == OUT else _DOWN
    for t in range(first, first + num):
        slot = _slot_of(adapters, t, of_rows)
        if slot:
            num_all = adapters.expands[slot, layer, module, _NUM]
            _shrink_row(adapters, slot, layer, stage, x, t, t)
            if len(behind):
                _expand_row(adapters, slot, layer, module, t, products, t, 0, 0, num_all)
            else:
                _expand_row(adapters, slot, layer, module, t, hidden, t, 0, 0, num_all)


@part_with(StepAdapters)
def expand_qkv(adapters, layer, t, qkv, num_q, num_kv):
    """Add to a token's q, k and v, which have so many numbers, what its adapter comes to."""
    slot = adapters.of_tokens[t]
    if slot:
        _expand_row(adapters, slot, layer, _Q, t, qkv, t, 0, 0, num_q)
        _expand_row(adapters, slot, layer, _K, t, qkv, t, num_q, 0, num_kv)
        _expand_row(adapters, slot, layer, _V, t, qkv, t, num_q + num_kv, 0, num_kv)


@part_with(StepAdapters)
def expand_gate_up(adapters, layer, t, num_rows, y, up, column, width, of_rows):
    """Add to columns of gate, in ``y``, and of up, what adapters come to, before both meet."""
    for index in range(num_rows):
        slot = _slot_of(adapters, t + index, of_rows)
        if slot:
            _expand_row(adapters, slot, layer, _GATE, t + index, y, t + index, column, column, width)
            _expand_row(adapters, slot, layer, _UP, t + index, up, index, 0, column, width)
