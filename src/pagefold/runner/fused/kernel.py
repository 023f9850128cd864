"""The fused decoder's kernel: a whole forward pass, which a team of threads goes through phase by phase.

Every phase deals its chunks by tokens or by panels of weights. What a token gets does not depend on that: each of its
numbers is one chain of operations over its own row (see ``kernels/formats.py`` and ``attention/work.py``), so a step's
results are the same, to the bit, in any batch, in any chunks, and with any number of threads.

Products are computed in whatever format the weights have; all else is float32. Where a format has rows of its own,
those that are multiplied are turned into it once, before they meet the first panel.

In the last layer only the rows whose logits are wanted go on behind attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import prange

from pagefold.kernels.compiled import part
from pagefold.kernels.emit import call_tile
from pagefold.kernels.exponential import silu_times
from pagefold.kernels.kept import kernel
from pagefold.kernels.team import claim, finish, wait
from pagefold.runner.attention.cpu import member_scratch
from pagefold.runner.attention.kernel import Scoring, attend, merge, seal, write
from pagefold.runner.attention.work import work_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefold.runner.attention.kernel_slab import KernelSlab
    from pagefold.runner.attention.scratch import Scratch
    from pagefold.runner.attention.tiles import AttentionTiles
    from pagefold.runner.attention.work import AttentionWork

__all__ = ["TOKENS_A_TILE", "DecoderRoom", "DecoderStep", "phases", "rotate", "run_decoder"]

_LAYER_PHASES = (
    "norm", "qkv", "place", "seal", "attention", "merge", "rows", "out", "norm", "gate_up", "rows", "down",
)  # fmt: skip
_PHASES_A_LAYER = len(_LAYER_PHASES)


def phases(num_layers: int) -> tuple[str, ...]:
    """Return what each phase of a step does, in order."""
    return ("embed", *_LAYER_PHASES * num_layers, "norm", "head")


_FLOAT_BYTES = 4
_TOKENS_A_CHUNK = 4  # of the small phases
_MANY_TOKENS = 128  # from here on, tokens are placed by whole blocks: no two members write the same cache lines of K
_TOKENS_A_BLOCK = 16
TOKENS_A_TILE = 182  # thirteen full tiles of 14 rows: their inputs stay in the second-level cache
_CHUNKS_A_MEMBER = 4


class DecoderStep(NamedTuple):
    """What a step computes: T tokens, R rows of logits.

    Attributes:
        token_ids, positions: int64 ``[T]``.
        logit_rows: int64 ``[R]``: tokens whose logits are wanted.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    logit_rows: NDArray[np.int64]


class DecoderRoom(NamedTuple):
    """Room for a step's T tokens and R rows. Rows are filled up to whole panels.

    Attributes:
        hidden: float32 ``[T, >= E]``: the residual stream.
        normed: float32 ``[max(T, R), E]``.
        qkv: float32 ``[1 or L, T, >= (H + 2 * Hkv) * D]``: of one layer after another, or of all of them.
        attended: float32 ``[T, H, D]``.
        inner: float32 ``[max(T, R), >= F]``.
        last_hidden: float32 ``[R, >= E]``: the residual stream of the rows that go on in the last layer.
        last_attended: float32 ``[R, H, D]``: likewise.
        rows: uint8 ``[max(T, R), bytes of the longest row]``: rows in the format of the weights; ``[0, ...]`` if it has
            none.
        logits: float32 ``[R, >= V]``.
        up: float32 ``[members, tokens a tile, W]``.
    """

    hidden: NDArray[np.float32]
    normed: NDArray[np.float32]
    qkv: NDArray[np.float32]
    attended: NDArray[np.float32]
    inner: NDArray[np.float32]
    last_hidden: NDArray[np.float32]
    last_attended: NDArray[np.float32]
    rows: NDArray[np.uint8]
    logits: NDArray[np.float32]
    up: NDArray[np.float32]


class _Rows(NamedTuple):
    """Rows that are multiplied with panels.

    Attributes:
        address: of the first.
        distance: bytes between them.
        num_k: numbers of each.
    """

    address: int
    distance: int
    num_k: int


class _Attention(NamedTuple):
    """What attention takes beside queries, keys and values. It is made by each member for itself.

    Attributes:
        tiles: its matrix products.
        work: of the step, of all cache groups.
        slab: the blocks.
        scoring: how queries and keys make scores.
        scratch: the member's own.
        partials: ``[num_slots, H, D + 2]``, of the team.
    """

    tiles: AttentionTiles
    work: AttentionWork
    slab: KernelSlab
    scoring: Scoring
    scratch: Scratch
    partials: NDArray[np.float32]


@part(fastmath={"reassoc", "nsz"})
def _sum_of_squares(row):
    total = np.float32(0.0)
    for e in range(len(row)):
        total += row[e] * row[e]
    return total


@part()
def _norm(row, weight, epsilon, out):
    """RMS norm of one row; ``out`` may be ``row``."""
    size = np.float32(len(weight))
    factor = np.float32(1.0) / np.sqrt(_sum_of_squares(row[: len(weight)]) / size + epsilon)
    for e in range(len(weight)):
        out[e] = row[e] * factor * weight[e]


@part()
def rotate(row, rope):
    """Rotary embedding of one head ``[D]``, in place: pairs are half a head apart, and have one cosine and sine."""
    half = len(row) // 2
    first, second = row[:half], row[half:]
    cosines, sines = rope[0, :half], rope[1, :half]
    for d in range(half):
        a, b = first[d], second[d]
        first[d] = a * cosines[d] - b * sines[d]
        second[d] = b * cosines[d] + a * sines[d]


@part()
def _embed(tiles, sync, phase, weights, step, room):
    num_tokens = len(step.token_ids)
    num_chunks = (num_tokens + _TOKENS_A_CHUNK - 1) // _TOKENS_A_CHUNK
    size, width = len(weights.last_norm), room.up.shape[2]
    while True:
        chunk = claim(sync, phase)
        if chunk >= num_chunks:
            break
        for t in range(chunk * _TOKENS_A_CHUNK, min((chunk + 1) * _TOKENS_A_CHUNK, num_tokens)):
            token_id = step.token_ids[t]
            panel = weights.embedding[token_id // width].ctypes.data
            call_tile(tiles.column, (panel, token_id % width, size, room.hidden[t].ctypes.data))
        finish(sync, phase)
    wait(sync, phase, num_chunks)


@part()
def _rows_of(tiles, x, num_k, room):
    """Return where rows of ``x`` are as they are multiplied: as they are, or in the format's rows, still to be made."""
    if tiles.rows == 0:
        return _Rows(x.ctypes.data, x.shape[1] * _FLOAT_BYTES, num_k)
    return _Rows(room.rows.ctypes.data, room.rows.shape[1], num_k)


@part()
def _convert(tiles, x, first, num, rows):
    """Turn rows of ``x`` into the format's, if it has some."""
    if tiles.rows:
        distance = x.shape[1] * _FLOAT_BYTES
        into = rows.address + first * rows.distance
        call_tile(tiles.rows, (x.ctypes.data + first * distance, distance, rows.num_k, num, into, rows.distance))


@part()
def _norm_all(tiles, sync, phase, hidden, num_tokens, weight, epsilon, out, rows):
    num_chunks = (num_tokens + _TOKENS_A_CHUNK - 1) // _TOKENS_A_CHUNK
    while True:
        chunk = claim(sync, phase)
        if chunk >= num_chunks:
            break
        first, end = chunk * _TOKENS_A_CHUNK, min((chunk + 1) * _TOKENS_A_CHUNK, num_tokens)
        for t in range(first, end):
            _norm(hidden[t], weight, epsilon, out[t])
        _convert(tiles, out, first, end - first, rows)
        finish(sync, phase)
    wait(sync, phase, num_chunks)


@part()
def _convert_all(tiles, sync, phase, x, num_tokens, rows):
    """Turn all rows of ``x`` into the format's; nothing is to be done if it has none."""
    if tiles.rows == 0:
        return
    num_chunks = (num_tokens + _TOKENS_A_CHUNK - 1) // _TOKENS_A_CHUNK
    while True:
        chunk = claim(sync, phase)
        if chunk >= num_chunks:
            break
        first = chunk * _TOKENS_A_CHUNK
        _convert(tiles, x, first, min(_TOKENS_A_CHUNK, num_tokens - first), rows)
        finish(sync, phase)
    wait(sync, phase, num_chunks)


@part()
def _pick(tiles, sync, phase, step, room, attended, last_attended, rows):
    """Take the rows whose logits are wanted along, of the last layer's attention and of the residual stream."""
    num_rows = len(step.logit_rows)
    while True:
        row = claim(sync, phase)
        if row >= num_rows:
            break
        t = step.logit_rows[row]
        room.last_hidden[row] = room.hidden[t]
        last_attended[row] = attended[t]
        _convert(tiles, last_attended, row, 1, rows)
        finish(sync, phase)
    wait(sync, phase, num_rows)


@part()
def _num_parts(num_panels, num_tiles, num_members):
    """Return in how many parts to deal panels, so that a phase has some chunks a member."""
    wanted = (_CHUNKS_A_MEMBER * num_members + num_tiles - 1) // num_tiles
    return min(num_panels, wanted if num_members > 1 else 1)


@part()
def _columns(tiles, x, t, num_rows, panels, panel, end, y, row, column, adds):
    """``y[row : row + num_rows, column...] (+)= x[t : t + num_rows] @ panels[panel]``; fetch ahead up to ``end``."""
    here = panels.ctypes.data + panel * panels.shape[1]
    following = here if panel + 1 == end else here + panels.shape[1]
    at_y = y.ctypes.data + (row * y.shape[1] + column) * _FLOAT_BYTES
    at_x, distance = x.address + t * x.distance, y.shape[1] * _FLOAT_BYTES
    call_tile(tiles.product, (at_x, x.distance, here, x.num_k, num_rows, at_y, distance, adds, following))


@part()
def _matmul(tiles, num_members, sync, phase, x, num_tokens, panels, y, width, adds):
    """``y (+)= x @ panels``, of ``num_tokens`` rows."""
    num_panels = panels.shape[0]
    num_tiles = (num_tokens + TOKENS_A_TILE - 1) // TOKENS_A_TILE
    num_parts = _num_parts(num_panels, num_tiles, num_members)
    while True:
        chunk = claim(sync, phase)
        if chunk >= num_tiles * num_parts:
            break
        tile, part = chunk // num_parts, chunk % num_parts
        t = tile * TOKENS_A_TILE
        num_rows = min(TOKENS_A_TILE, num_tokens - t)
        end = num_panels * (part + 1) // num_parts
        for panel in range(num_panels * part // num_parts, end):
            _columns(tiles, x, t, num_rows, panels, panel, end, y, t, panel * width, adds)
        finish(sync, phase)
    wait(sync, phase, num_tiles * num_parts)


@part()
def _matmul_gate_up(tiles, num_members, sync, phase, x, num_tokens, panels, y, up):
    """``y = silu(x @ gate) * (x @ up)``: panels of both alternate, and meet while they are in the cache."""
    num_pairs, width = panels.shape[0] // 2, up.shape[1]
    num_tiles = (num_tokens + TOKENS_A_TILE - 1) // TOKENS_A_TILE
    num_parts = _num_parts(num_pairs, num_tiles, num_members)
    while True:
        chunk = claim(sync, phase)
        if chunk >= num_tiles * num_parts:
            break
        tile, part = chunk // num_parts, chunk % num_parts
        t = tile * TOKENS_A_TILE
        num_rows = min(TOKENS_A_TILE, num_tokens - t)
        end = num_pairs * (part + 1) // num_parts
        for pair in range(num_pairs * part // num_parts, end):
            _columns(tiles, x, t, num_rows, panels, 2 * pair, 2 * end, y, t, pair * width, 0)
            _columns(tiles, x, t, num_rows, panels, 2 * pair + 1, 2 * end, up, 0, 0, 0)
            for row in range(num_rows):
                silu_times(y[t + row, pair * width : (pair + 1) * width], up[row])
        finish(sync, phase)
    wait(sync, phase, num_tiles * num_parts)


@part()
def _place(sync, phase, weights, step, work, layer, room, qkv, slab, scratch):
    """Biases, norms and rope of q and k; K and V go into their blocks."""
    num_tokens = len(step.token_ids)
    num_heads, head_dim = room.attended.shape[1], room.attended.shape[2]
    num_kv_heads = work.cells.shape[2]
    size = _TOKENS_A_CHUNK if num_tokens < _MANY_TOKENS else _TOKENS_A_BLOCK
    num_chunks = (num_tokens + size - 1) // size
    num_columns = (num_heads + 2 * num_kv_heads) * head_dim
    while True:
        chunk = claim(sync, phase)
        if chunk >= num_chunks:
            break
        for t in range(chunk * size, min((chunk + 1) * size, num_tokens)):
            row = qkv[t]
            rope = weights.rope[step.positions[t]]
            if len(weights.bias):
                for e in range(num_columns):
                    row[e] += weights.bias[layer, e]
            for h in range(num_heads + num_kv_heads):
                head = row[h * head_dim : (h + 1) * head_dim]
                if len(weights.head_norms):
                    _norm(head, weights.head_norms[layer, 0 if h < num_heads else 1], weights.epsilon, head)
                rotate(head, rope)
            for h in range(num_kv_heads):
                key = (num_heads + h) * head_dim
                value = key + num_kv_heads * head_dim
                write(slab, work, layer, t, h, row[key : key + head_dim], row[value : value + head_dim], scratch)
        finish(sync, phase)
    wait(sync, phase, num_chunks)


@part()
def _attend(sync, phase, layer, weights, step, attention, room, qkv):
    """The phases from placing K and V to merging what was attended to, of one layer."""
    head_dim = room.attended.shape[2]
    slab, scratch, partials = attention.slab, attention.scratch, attention.partials
    work = work_of(attention.work, layer)
    query = qkv.reshape((qkv.shape[0], qkv.shape[1] // head_dim, head_dim))
    out = room.attended[: len(step.token_ids)]
    _place(sync, phase, weights, step, work, layer, room, qkv, slab, scratch)
    if len(work.seals):
        seal(sync, phase + 1, work, slab, layer, scratch)
    attend(
        attention.tiles, sync, phase + 2, work, query, slab, layer, attention.scoring, scratch, partials, out
    )  # fmt: skip
    if attention.work.num_slots:
        merge(sync, phase + 3, work, slab, layer, scratch, partials, out)


@part()
def _member(tiles, num_members, member, sync, weights, step, attention, room):
    num_tokens, num_rows, num_layers = len(step.token_ids), len(step.logit_rows), weights.norms.shape[0]
    size, width = len(weights.last_norm), room.up.shape[2]
    num_out = room.attended.shape[1] * room.attended.shape[2]
    attended = room.attended.reshape((room.attended.shape[0], num_out))
    last_attended = room.last_attended.reshape((room.last_attended.shape[0], num_out))
    normed = _rows_of(tiles, room.normed, size, room)
    inner = _rows_of(tiles, room.inner, weights.intermediate, room)
    _embed(tiles, sync, 0, weights, step, room)
    for layer in range(num_layers):
        phase = 1 + layer * _PHASES_A_LAYER
        qkv, norms = room.qkv[layer % room.qkv.shape[0]], weights.norms[layer]
        _norm_all(tiles, sync, phase, room.hidden, num_tokens, norms[0], weights.epsilon, room.normed, normed)
        _matmul(tiles, num_members, sync, phase + 1, normed, num_tokens, weights.qkv[layer], qkv, width, 0)
        _attend(sync, phase + 2, layer, weights, step, attention, room, qkv)
        hidden, num = room.hidden, num_tokens
        rows = _rows_of(tiles, attended, num_out, room)
        if layer < num_layers - 1:
            _convert_all(tiles, sync, phase + 6, attended, num, rows)
        else:
            hidden, num = room.last_hidden, num_rows
            rows = _rows_of(tiles, last_attended, num_out, room)
            _pick(tiles, sync, phase + 6, step, room, attended, last_attended, rows)
        _matmul(tiles, num_members, sync, phase + 7, rows, num, weights.out[layer], hidden, width, 1)
        _norm_all(tiles, sync, phase + 8, hidden, num, norms[1], weights.epsilon, room.normed, normed)
        _matmul_gate_up(
            tiles, num_members, sync, phase + 9, normed, num, weights.gate_up[layer], room.inner,
            room.up[member],
        )  # fmt: skip
        _convert_all(tiles, sync, phase + 10, room.inner, num, inner)
        _matmul(tiles, num_members, sync, phase + 11, inner, num, weights.down[layer], hidden, width, 1)
    phase = 1 + num_layers * _PHASES_A_LAYER
    last = room.last_hidden
    _norm_all(tiles, sync, phase, last, num_rows, weights.last_norm, weights.epsilon, room.normed, normed)
    _matmul(tiles, num_members, sync, phase + 1, normed, num_rows, weights.head, room.logits, width, 0)


@kernel(parallel=True, error_model="numpy")
def run_decoder(tiles, attention_tiles, num_members, sync, weights, step, work, scoring, slab, room, scratch, partials):
    """Compute a step: K and V into their blocks, logits into the room."""
    for member in prange(num_members):
        own = member_scratch(scratch, member)
        attention = _Attention(attention_tiles, work, slab, scoring, own, partials)
        _member(tiles, num_members, member, sync, weights, step, attention, room)
