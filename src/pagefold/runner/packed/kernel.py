"""The kernel of packed layers: rows times the panels of their groups, dealt to a team of threads.

A layer is one group: all rows times one matrix. Experts are many: each row is multiplied with the matrix of its expert,
and rows of one expert lie side by side, so that each panel is read once for all of them.

Rows are gathered first, each turned into the format by itself. Then the panels of all *row tiles* are dealt as if they
were of one matrix: a row tile is some rows of one group, and each has the panels of its group. So experts that are
computed share out evenly, whichever they are, and no others are read. What a row gets is a chain of operations over
itself (see ``kernels/formats.py``): it does not depend on which rows are there beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import prange

from pagefold.kernels.compiled import part
from pagefold.kernels.emit import call_tile
from pagefold.kernels.kept import kernel
from pagefold.kernels.team import claim, finish, finish_all, wait
from pagefold.runner.fused.pieces import claim_piece, deal

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "NUM_PHASES",
    "Chosen",
    "ExpertPanels",
    "ExpertRoom",
    "RowTiles",
    "add_weighted",
    "read_columns",
    "run_experts",
    "run_product",
]

_GATHER, _MULTIPLY, _ACTIVATE, _MULTIPLY_AGAIN, _ADD, NUM_PHASES = range(6)
_FLOAT_BYTES = 4
_ROWS_A_CHUNK = 4
_FEW = 1  # any number of rows that is dealt by shares


class RowTiles(NamedTuple):
    """How rows are cut: each tile is some rows of one group.

    Attributes:
        groups: int64 ``[n]``: with the panels of which group a tile's rows are multiplied.
        firsts: int64 ``[n]``: its first row.
        nums: int64 ``[n]``: how many rows it has.
    """

    groups: NDArray[np.int64]
    firsts: NDArray[np.int64]
    nums: NDArray[np.int64]


class Chosen(NamedTuple):
    """Which experts T tokens have chosen, k each: S = T * k rows.

    Attributes:
        sources: int64 ``[S]``: the token of each row; rows of an expert lie side by side.
        places: int64 ``[T, k]``: the rows of each token.
        weights: float32 ``[T, k]``: what each of them counts.
    """

    sources: NDArray[np.int64]
    places: NDArray[np.int64]
    weights: NDArray[np.float32]


class ExpertPanels(NamedTuple):
    """Panels of a layer's experts, uint8 ``[experts, P, bytes of a panel]``.

    Attributes:
        gate_up: of the first product: gates, and behind them what they are multiplied with.
        down: of the second.
        num_inner: F, how many numbers are between the two.
    """

    gate_up: NDArray[np.uint8]
    down: NDArray[np.uint8]
    num_inner: int


class ExpertRoom(NamedTuple):
    """Room for S rows of F numbers inside, and T of E.

    Attributes:
        rows: uint8 ``[S, ...]``: as they are multiplied first.
        gate_up: float32 ``[S, >= 2 * F]``.
        inner: uint8 ``[S, ...]``: as they are multiplied again; it may be the memory of ``rows``.
        down: float32 ``[S, >= E]``.
        out: float32 ``[T, E]``.
    """

    rows: NDArray[np.uint8]
    gate_up: NDArray[np.float32]
    inner: NDArray[np.uint8]
    down: NDArray[np.float32]
    out: NDArray[np.float32]


class _Team(NamedTuple):
    """One member of the team, and what it has in common with the others: see ``kernels/team.py``."""

    member: int
    num_members: int
    sync: NDArray[np.int64]
    shares: NDArray[np.int64]


@part()
def _put_row(tiles, x, x_bytes, source, num_k, rows, row):
    """Put the first numbers of a row of ``x`` where they are multiplied, in the format's rows if it has some."""
    if tiles.rows:
        at_x, into = x.ctypes.data + source * x_bytes.shape[1], rows.ctypes.data + row * rows.shape[1]
        call_tile(tiles.rows, (at_x, x_bytes.shape[1], num_k, 1, into, rows.shape[1]))
    else:
        rows[row, : num_k * _FLOAT_BYTES] = x_bytes[source, : num_k * _FLOAT_BYTES]


@part()
def _gather(tiles, sync, x, sources, num_rows, rows):
    """Put rows of ``x`` where they are multiplied: those of ``sources``, or all in their order if there are none."""
    num_k = x.shape[1]
    x_bytes = x.view(np.uint8)
    num_chunks = (num_rows + _ROWS_A_CHUNK - 1) // _ROWS_A_CHUNK
    while True:
        chunk = claim(sync, _GATHER)
        if chunk >= num_chunks:
            break
        for row in range(chunk * _ROWS_A_CHUNK, min((chunk + 1) * _ROWS_A_CHUNK, num_rows)):
            source = sources[row] if len(sources) else row
            _put_row(tiles, x, x_bytes, source, num_k, rows, row)
        finish(sync, _GATHER)
    wait(sync, _GATHER, num_chunks)


@part()
def _panel_at(panels, row_tiles, column):
    """Return the address of the panel of a column, counted over all row tiles."""
    num_panels, panel_bytes = panels.shape[1], panels.shape[2]
    group = row_tiles.groups[column // num_panels]
    return panels.ctypes.data + (group * num_panels + column % num_panels) * panel_bytes


@part()
def _multiply(tiles, team, phase, num_k, rows, row_tiles, panels, y, width):
    """``y = rows @ panels``, of all row tiles."""
    num_panels, num_done = panels.shape[1], 0
    distance = y.shape[1] * _FLOAT_BYTES
    dealt = deal(_FEW, len(row_tiles.groups) * num_panels, team.num_members)
    while True:
        piece = claim_piece(team, phase, dealt)
        if piece.first == piece.end:
            break
        for column in range(piece.first, piece.end):
            here = _panel_at(panels, row_tiles, column)
            then = column + 1 if column + 1 < piece.end else piece.then
            following = here if then < 0 else _panel_at(panels, row_tiles, then)  # nobody knows the next layer
            tile, panel = column // num_panels, column % num_panels
            first, num_rows = row_tiles.firsts[tile], row_tiles.nums[tile]
            at_x = rows.ctypes.data + first * rows.shape[1]
            at_y = y.ctypes.data + first * distance + panel * width * _FLOAT_BYTES
            call_tile(tiles.product, (at_x, rows.shape[1], here, num_k, num_rows, at_y, distance, 0, following))
        num_done += 1
    finish_all(team.sync, phase, num_done)
    wait(team.sync, phase, dealt.num_pieces)


@part()
def _activate(tiles, activation, sync, y, num_k, rows):
    """``rows = activation(gate) * up``, as they are multiplied; gates are the first ``num_k`` numbers of each of y."""
    distance, y_bytes = y.shape[1] * _FLOAT_BYTES, y.view(np.uint8)
    num_chunks = (len(y) + _ROWS_A_CHUNK - 1) // _ROWS_A_CHUNK
    while True:
        chunk = claim(sync, _ACTIVATE)
        if chunk >= num_chunks:
            break
        for row in range(chunk * _ROWS_A_CHUNK, min((chunk + 1) * _ROWS_A_CHUNK, len(y))):
            gate = y.ctypes.data + row * distance
            call_tile(activation, (gate, distance, gate + num_k * _FLOAT_BYTES, distance, num_k, 1))
            _put_row(tiles, y, y_bytes, row, num_k, rows, row)
        finish(sync, _ACTIVATE)
    wait(sync, _ACTIVATE, num_chunks)


@part()
def _add(y, places, weights, t, out):
    """Add up what a token's experts came to, one after another, each times its weight."""
    row, first = out[t], y[places[t, 0]]
    for e in range(len(row)):
        row[e] = first[e] * weights[t, 0]
    for at in range(1, places.shape[1]):
        other, weight = y[places[t, at]], weights[t, at]
        for e in range(len(row)):
            row[e] += other[e] * weight


@kernel(parallel=True, error_model="numpy")
def run_product(tiles, num_members, sync, shares, x, sources, rows, row_tiles, panels, y):
    """Multiply rows with the panels of their groups.

    Args:
        tiles: of the format.
        num_members: of the team.
        sync, shares: of the team, zero.
        x: float32 ``[T, K]``.
        sources: int64 ``[S]``: which row of ``x`` each row is; ``[0]`` for all of them in their order.
        rows: uint8 ``[>= S, >= bytes of a row]``: room.
        row_tiles: how the S rows are cut.
        panels: uint8 ``[groups, P, bytes of a panel]``.
        y: float32 ``[S, P * W]``.
    """
    width = y.shape[1] // panels.shape[1]
    for index in prange(num_members):
        member = np.int64(index)  # else all is typed twice: the index of such a loop has a sign here, and none there
        team = _Team(member, num_members, sync, shares)  # type: ignore[arg-type]  # it is an int there
        _gather(tiles, sync, x, sources, len(y), rows)
        _multiply(tiles, team, _MULTIPLY, x.shape[1], rows, row_tiles, panels, y, width)


@part()
def _compute_experts(tiles, activation, team, x, chosen, row_tiles, panels, width, room):
    sync, num_inner = team.sync, panels.num_inner
    _gather(tiles, sync, x, chosen.sources, len(room.gate_up), room.rows)
    _multiply(tiles, team, _MULTIPLY, x.shape[1], room.rows, row_tiles, panels.gate_up, room.gate_up, width)
    _activate(tiles, activation, sync, room.gate_up, num_inner, room.inner)
    _multiply(tiles, team, _MULTIPLY_AGAIN, num_inner, room.inner, row_tiles, panels.down, room.down, width)
    while True:
        t = claim(sync, _ADD)
        if t >= len(room.out):
            break
        _add(room.down, chosen.places, chosen.weights, t, room.out)
        finish(sync, _ADD)


@kernel(parallel=True, error_model="numpy")
def run_experts(tiles, activation, num_members, sync, shares, x, chosen, row_tiles, panels, width, room):
    """Compute experts that are an MLP with a gate, for the tokens that chose them.

    Args:
        tiles: of the format.
        activation: of the gate: one of the tiles of rows.
        num_members: of the team.
        sync, shares: of the team, zero.
        x: float32 ``[T, E]``.
        chosen: which experts.
        row_tiles: how the rows of ``chosen`` are cut.
        panels: of the experts.
        width: of a panel, in columns.
        room: to work in; ``room.out`` is the result.
    """
    for index in prange(num_members):
        member = np.int64(index)  # as above
        team = _Team(member, num_members, sync, shares)  # type: ignore[arg-type]  # it is an int there
        _compute_experts(tiles, activation, team, x, chosen, row_tiles, panels, width, room)


@kernel(error_model="numpy")
def add_weighted(y, places, weights, out):
    """Add up what each token's experts came to, one after another, each times its weight.

    Args:
        y: float32 ``[S, >= E]``: of all tokens and experts.
        places: int64 ``[T, k]``: where those of each token are.
        weights: float32 ``[T, k]``.
        out: float32 ``[T, E]``.
    """
    for t in range(len(out)):
        _add(y, places, weights, t, out)


@kernel(error_model="numpy")
def read_columns(tile, panels, width, token_ids, out):
    """Write columns of a packed matrix.

    Args:
        tile: of the format: its ``column``.
        panels: uint8 ``[1, P, bytes of a panel]``.
        width: of a panel, in columns.
        token_ids: int64 ``[T]``: which columns.
        out: float32 ``[T, K]``.
    """
    for t in range(len(token_ids)):
        at = panels.ctypes.data + token_ids[t] // width * panels.shape[2]
        call_tile(tile, (at, token_ids[t] % width, out.shape[1], out[t].ctypes.data))
