"""The fused decoder's kernel: a whole forward pass, which a team of threads goes through phase by phase. float32.

Every phase deals its chunks by tokens or by panels of weights. What a token gets does not depend on that: each of its
numbers is one chain of operations over its own row (see ``simd.py`` and ``attention/work.py``), so a step's results are
the same, to the bit, in any batch, in any chunks, and with any number of threads.
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

_LAYER_PHASES = ("norm", "qkv", "place", "seal", "attention", "merge", "out", "norm", "gate_up", "down")
_PHASES_A_LAYER = len(_LAYER_PHASES)


def phases(num_layers: int) -> tuple[str, ...]:
    """Return what each phase of a step does, in order."""
    return ("embed", *_LAYER_PHASES * num_layers, "norm", "head")


_FLOAT_BYTES = 4
_TOKENS_A_CHUNK = 4  # of the small phases
_MANY_TOKENS = 128  # from here on, tokens are placed by whole blocks: no two members write the same cache lines of K
_TOKENS_A_BLOCK = 16
TOKENS_A_TILE = 182  # thirteen full tiles of rows: their inputs stay in the second-level cache
_CHUNKS_A_MEMBER = 4
_MAX_K = 288  # of one pass over a panel: short sums that are added up round less than one long sum


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
        normed: float32 ``[T, E]``.
        qkv: float32 ``[1 or L, T, >= (H + 2 * Hkv) * D]``: of one layer after another, or of all of them.
        attended: float32 ``[T, H, D]``.
        inner: float32 ``[T, >= F]``.
        rows: float32 ``[R, E]``.
        logits: float32 ``[R, >= V]``.
        up: float32 ``[members, tokens a tile, W]``.
        powers: int32 ``[members, W]``.
    """

    hidden: NDArray[np.float32]
    normed: NDArray[np.float32]
    qkv: NDArray[np.float32]
    attended: NDArray[np.float32]
    inner: NDArray[np.float32]
    rows: NDArray[np.float32]
    logits: NDArray[np.float32]
    up: NDArray[np.float32]
    powers: NDArray[np.int32]


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
    """Rotary embedding of one head ``[D]``, in place: pairs are half a head apart."""
    half = len(row) // 2
    for d in range(half):
        a, b = row[d], row[d + half]
        row[d] = a * rope[0, d] - b * rope[1, d]
        row[d + half] = b * rope[0, d + half] + a * rope[1, d + half]


@part()
def _embed(sync, phase, weights, scales, step, room):
    num_tokens = len(step.token_ids)
    num_chunks = (num_tokens + _TOKENS_A_CHUNK - 1) // _TOKENS_A_CHUNK
    size, width = weights.head.shape[1], weights.head.shape[2]
    is_tied = len(weights.embedding) == 0
    while True:
        chunk = claim(sync, phase)
        if chunk >= num_chunks:
            break
        for t in range(chunk * _TOKENS_A_CHUNK, min((chunk + 1) * _TOKENS_A_CHUNK, num_tokens)):
            token_id = step.token_ids[t]
            if is_tied:
                panel, column = weights.head[token_id // width], token_id % width
                if scales is None:
                    for e in range(size):
                        room.hidden[t, e] = panel[e, column]
                else:
                    scale = scales[token_id // width, column]
                    for e in range(size):
                        room.hidden[t, e] = panel[e, column] * scale
            else:
                for e in range(size):
                    room.hidden[t, e] = weights.embedding[token_id, e]
        finish(sync, phase)
    wait(sync, phase, num_chunks)


@part()
def _norm_all(sync, phase, hidden, num_tokens, weight, epsilon, out):
    num_chunks = (num_tokens + _TOKENS_A_CHUNK - 1) // _TOKENS_A_CHUNK
    while True:
        chunk = claim(sync, phase)
        if chunk >= num_chunks:
            break
        for t in range(chunk * _TOKENS_A_CHUNK, min((chunk + 1) * _TOKENS_A_CHUNK, num_tokens)):
            _norm(hidden[t], weight, epsilon, out[t])
        finish(sync, phase)
    wait(sync, phase, num_chunks)


@part()
def _norm_rows(sync, phase, weights, step, room):
    num_rows = len(step.logit_rows)
    while True:
        row = claim(sync, phase)
        if row >= num_rows:
            break
        _norm(room.hidden[step.logit_rows[row]], weights.last_norm, weights.epsilon, room.rows[row])
        finish(sync, phase)
    wait(sync, phase, num_rows)


@part()
def _of(scales, layer):
    """Return one layer's scales, of quantized weights."""
    if scales is None:
        return None
    return scales[layer]


@part()
def _num_parts(num_panels, num_tiles, num_members):
    """Return in how many parts to deal panels, so that a phase has some chunks a member."""
    wanted = (_CHUNKS_A_MEMBER * num_members + num_tiles - 1) // num_tiles
    return min(num_panels, wanted if num_members > 1 else 1)


@part()
def _columns(tiles, x, t, num_rows, panels, scales, panel, end, y, column, adds):
    """``y[t : t + num_rows, column...] (+)= x[t : t + num_rows] @ panels[panel]``; fetch ahead of it up to ``end``."""
    num_k, width = panels.shape[1], panels.shape[2]
    base = panels.ctypes.data
    x_row, y_row = (
        x.ctypes.data + t * x.shape[1] * _FLOAT_BYTES,
        y.ctypes.data + (t * y.shape[1] + column) * _FLOAT_BYTES,
    )
    num_passes = (num_k + _MAX_K - 1) // _MAX_K
    pass_k = (num_k + num_passes - 1) // num_passes
    for k in range(0, num_k, pass_k):
        length = min(pass_k, num_k - k)
        here = base + (panel * num_k + k) * width * panels.itemsize
        following = here + length * width * panels.itemsize
        if k + length == num_k and panel + 1 == end:
            following = here
        at_x = x_row + k * _FLOAT_BYTES
        if scales is None:
            call_tile(
                tiles.panel, (at_x, x.shape[1], here, y_row, y.shape[1], length, num_rows, adds + k, following)
            )  # fmt: skip
        else:
            call_tile(tiles.panel_int8, (
                at_x, x.shape[1], here, scales[panel].ctypes.data, y_row, y.shape[1], length, num_rows, adds + k,
                following,
            ))  # fmt: skip


@part()
def _matmul(tiles, num_members, sync, phase, x, num_tokens, panels, scales, y, adds):
    """``y (+)= x @ panels``, of ``num_tokens`` rows."""
    num_panels, width = panels.shape[0], panels.shape[2]
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
            _columns(tiles, x, t, num_rows, panels, scales, panel, end, y, panel * width, adds)
        finish(sync, phase)
    wait(sync, phase, num_tiles * num_parts)


@part()
def _matmul_gate_up(tiles, num_members, sync, phase, x, num_tokens, panels, scales, y, up, powers):
    """``y = silu(x @ gate) * (x @ up)``: panels of both alternate, and meet while they are in the cache."""
    num_pairs, width = panels.shape[0] // 2, panels.shape[2]
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
            _columns(tiles, x, t, num_rows, panels, scales, 2 * pair, 2 * end, y, pair * width, 0)
            _columns(tiles, x[t:], 0, num_rows, panels, scales, 2 * pair + 1, 2 * end, up, 0, 0)
            for row in range(num_rows):
                silu_times(y[t + row, pair * width : (pair + 1) * width], up[row], powers)
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
    num_tokens = len(step.token_ids)
    head_dim = room.attended.shape[2]
    attended = room.attended.reshape((room.attended.shape[0], room.attended.shape[1] * head_dim))
    _embed(sync, 0, weights, weights.head_scales, step, room)
    for layer in range(weights.norms.shape[0]):
        phase = 1 + layer * _PHASES_A_LAYER
        qkv = room.qkv[layer % room.qkv.shape[0]]
        _norm_all(sync, phase, room.hidden, num_tokens, weights.norms[layer, 0], weights.epsilon, room.normed)
        _matmul(
            tiles,
            num_members,
            sync,
            phase + 1,
            room.normed,
            num_tokens,
            weights.qkv[layer],
            _of(weights.qkv_scales, layer),
            qkv,
            0,
        )
        _attend(sync, phase + 2, layer, weights, step, attention, room, qkv)
        _matmul(
            tiles,
            num_members,
            sync,
            phase + 6,
            attended,
            num_tokens,
            weights.out[layer],
            _of(weights.out_scales, layer),
            room.hidden,
            1,
        )
        _norm_all(sync, phase + 7, room.hidden, num_tokens, weights.norms[layer, 1], weights.epsilon, room.normed)
        _matmul_gate_up(
            tiles, num_members, sync, phase + 8, room.normed, num_tokens, weights.gate_up[layer],
            _of(weights.gate_up_scales, layer), room.inner,
            room.up[member], room.powers[member],
        )  # fmt: skip
        _matmul(
            tiles,
            num_members,
            sync,
            phase + 9,
            room.inner,
            num_tokens,
            weights.down[layer],
            _of(weights.down_scales, layer),
            room.hidden,
            1,
        )
    phase = 1 + weights.norms.shape[0] * _PHASES_A_LAYER
    _norm_rows(sync, phase, weights, step, room)
    _matmul(
        tiles,
        num_members,
        sync,
        phase + 1,
        room.rows,
        len(step.logit_rows),
        weights.head,
        weights.head_scales,
        room.logits,
        0,
    )


@kernel(parallel=True, error_model="numpy")
def run_decoder(tiles, attention_tiles, num_members, sync, weights, step, work, scoring, slab, room, scratch, partials):
    """Compute a step: K and V into their blocks, logits into the room."""
    for member in prange(num_members):
        own = member_scratch(scratch, member)
        attention = _Attention(attention_tiles, work, slab, scoring, own, partials)
        _member(tiles, num_members, member, sync, weights, step, attention, room)
