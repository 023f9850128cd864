"""Room that attention works in: made once, grown when a step needs more, never made in a step that fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Scratch", "make_scratch"]


class Scratch(NamedTuple):
    """Room for one item of each member of the team: M members, R rows, W entries of a split, D of head_dim.

    Attributes:
        query, acc, state: float32 ``[M, R, D]``: scaled queries, one split's sum, what is folded so far.
        scores: float32 ``[M, R, W]``.
        tops, totals, state_tops, state_totals: float32 ``[M, R]``.
        sums: float32 ``[M, R]``: what zero points of V add.
        first_weights: float32 ``[M, R]``: of a split's first entry.
        shifts, first_shifts: float32 ``[M, R]``: what centring took off a row's scores, off that of entry 0.
        scales, zeros: float32 ``[M, W]``: of a split's entries.
        scaled: float32 ``[M, 2, R, D]``: queries times K's scales of channels, for two blocks.
        constants: float32 ``[M, 2, R]``: what K's zero points of channels add to the scores of each.
        own: float32 ``[M, R, D]``: what rows sum of their unsealed blocks.
        vector, spare: float32 ``[M, D]``: one K or V that is being encoded, and room to rotate it.
        limits, ends: int32 ``[M, R]``: with how many entries of the split, and of all, what a row sees is over.
        hidden, begins: int32 ``[M, R]``: how many entries of the split, and of all, are before what a row sees.
        blocks: int64 ``[M, W]``: addresses of a split's blocks.
        ahead: int64 ``[M, W]``: addresses of what is fetched meanwhile.
    """

    query: NDArray[np.float32]
    acc: NDArray[np.float32]
    state: NDArray[np.float32]
    scores: NDArray[np.float32]
    tops: NDArray[np.float32]
    totals: NDArray[np.float32]
    state_tops: NDArray[np.float32]
    state_totals: NDArray[np.float32]
    sums: NDArray[np.float32]
    first_weights: NDArray[np.float32]
    shifts: NDArray[np.float32]
    first_shifts: NDArray[np.float32]
    scales: NDArray[np.float32]
    zeros: NDArray[np.float32]
    scaled: NDArray[np.float32]
    constants: NDArray[np.float32]
    own: NDArray[np.float32]
    vector: NDArray[np.float32]
    spare: NDArray[np.float32]
    limits: NDArray[np.int32]
    ends: NDArray[np.int32]
    hidden: NDArray[np.int32]
    begins: NDArray[np.int32]
    blocks: NDArray[np.int64]
    ahead: NDArray[np.int64]


def make_scratch(num_members: int, num_rows: int, split_size: int, head_dim: int, lanes: int) -> Scratch:
    """Make room for items of ``num_rows`` rows. A row of scores ends with room for an odd column's partner."""
    rows = (num_members, num_rows)
    width = split_size + 2 * lanes

    def floats(*shape: int) -> NDArray[np.float32]:
        return np.zeros(shape, np.float32)

    return Scratch(
        query=floats(*rows, head_dim),
        acc=floats(*rows, head_dim),
        state=floats(*rows, head_dim),
        scores=floats(*rows, width),
        tops=floats(*rows),
        totals=floats(*rows),
        state_tops=floats(*rows),
        state_totals=floats(*rows),
        sums=floats(*rows),
        first_weights=floats(*rows),
        shifts=floats(*rows),
        first_shifts=floats(*rows),
        scales=floats(num_members, width),
        zeros=floats(num_members, width),
        scaled=floats(num_members, 2, num_rows, head_dim),
        constants=floats(num_members, 2, num_rows),
        own=floats(*rows, head_dim),
        vector=floats(num_members, head_dim),
        spare=floats(num_members, head_dim),
        limits=np.zeros(rows, np.int32),
        ends=np.zeros(rows, np.int32),
        hidden=np.zeros(rows, np.int32),
        begins=np.zeros(rows, np.int32),
        blocks=np.zeros((num_members, width), np.int64),
        ahead=np.zeros((num_members, width), np.int64),
    )
