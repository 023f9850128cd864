"""The fused decoder's kernel: a whole forward pass, which a team of threads goes through phase by phase.

Every phase deals its chunks by tokens or by panels of weights. What a token gets does not depend on that: each of its
numbers is one chain of operations over its own row (see ``kernels/formats.py``, ``attention/dealing.py``), so a step's
results are the same, to the bit, in any batch, in any chunks, and with any number of threads.

Products are computed in whatever format the weights have; all else is float32. Where a format has rows of its own,
those that are multiplied are turned into it once, before they meet the first panel.

In the last layer only the rows whose logits are wanted go on behind attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import prange

from pagefold.kernels.bits import bits_of
from pagefold.kernels.compiled import part
from pagefold.kernels.emit import call_tile
from pagefold.kernels.kept import kernel
from pagefold.kernels.team import claim, finish, finish_all, wait
from pagefold.runner.attention.cpu import member_scratch
from pagefold.runner.attention.kept_chunks import mark
from pagefold.runner.attention.kernel import Scoring, attend, merge, pack, seal, write
from pagefold.runner.attention.work import work_of
from pagefold.runner.fused.adapted import (
    DOWN,
    GATE_UP,
    NO_STAGE,
    OUT,
    QKV,
    add_product,
    expand_gate_up,
    expand_qkv,
    shrink,
)
from pagefold.runner.fused.pieces import ahead_of, claim_piece, deal, following_in

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefold.runner.attention.kernel_slab import KernelSlab
    from pagefold.runner.attention.scratch import Scratch
    from pagefold.runner.attention.tiles import AttentionTiles
    from pagefold.runner.attention.work import AttentionWork

__all__ = [
    "TOKENS_A_CHUNK",
    "DecoderRoom",
    "DecoderStep",
    "DecoderTiles",
    "phases",
    "rotate",
    "run_decoder",
]

_LAYER_PHASES = (
    "norm", "qkv", "place", "seal", "attention", "merge", "rows", "out", "norm", "gate_up", "rows", "down",
)  # fmt: skip
_PHASES_A_LAYER = len(_LAYER_PHASES)


def phases(num_layers: int, *, caps: bool = False) -> tuple[str, ...]:
    """Return what each phase of a step does, in order; ``caps`` says whether logits have a softcap."""
    return ("embed", *_LAYER_PHASES * num_layers, "norm", "head", *["cap"] * caps)


_FLOAT_BYTES = 4
TOKENS_A_CHUNK = 4  # of the small phases
# From here on, so many tokens are placed at once. A cache line of K has numbers of several of a block's tokens, so
# fewer members write the same ones: two of a block still may, since chunks are counted from the step's first token.
_MANY_TOKENS, _TOKENS_A_LARGE_CHUNK = 128, 16
_LOGITS_A_CHUNK = 4096


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
        products: float32 ``[max(T, R), >= E]``: what attention or the MLP came to, until it is normed and added to the
            residual stream; ``[0, ...]`` in models that norm no products.
        normed: float32 ``[max(T, R, members * TOKENS_A_CHUNK), >= E]``: norms of all rows; where the format has rows of
            its own, each member has a chunk's norms here until it has turned them into these.
        qkv: float32 ``[1 or L, T, >= (H + 2 * Hkv) * D + S]``, with the scores of entries last: of one layer after
            another, or of all of them.
        turned: float32 ``[T, H, D]``: queries as they look at sink tokens; of no tokens in models that keep none.
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
    products: NDArray[np.float32]
    normed: NDArray[np.float32]
    qkv: NDArray[np.float32]
    turned: NDArray[np.float32]
    attended: NDArray[np.float32]
    inner: NDArray[np.float32]
    last_hidden: NDArray[np.float32]
    last_attended: NDArray[np.float32]
    rows: NDArray[np.uint8]
    logits: NDArray[np.float32]
    up: NDArray[np.float32]


class DecoderTiles(NamedTuple):
    """Addresses of what the kernel calls beside attention, compiled apart from it.

    Attributes:
        norm, cap: see :class:`~pagefold.kernels.rows.RowTiles`.
        activation: of the MLP, one of these.
    """

    norm: int
    cap: int
    activation: int


class _Team(NamedTuple):
    """One member of the team, and what it has in common with the others: see ``kernels/team.py``.

    Attributes:
        member, num_members: which one, of how many.
        sync: counters of each phase.
        shares: claims of each phase by members.
    """

    member: int
    num_members: int
    sync: NDArray[np.int64]
    shares: NDArray[np.int64]


class _Rows(NamedTuple):
    """Rows that are multiplied with panels.

    Attributes:
        form: the address of what turns float32 rows into them; 0 where rows stay as they are.
        address: of the first.
        distance: bytes between them.
        num_k: numbers of each.
    """

    form: int
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


@part()
def _norm(tiles, x, first, num, weight, epsilon, out, into):
    """RMS norms of ``num`` rows from ``first`` on, in rows of ``out``, which may be ``x``, from ``into`` on."""
    distance, out_distance = x.shape[1] * _FLOAT_BYTES, out.shape[1] * _FLOAT_BYTES
    call_tile(tiles.norm, (
        x.ctypes.data + first * distance, distance, weight.ctypes.data, len(weight), bits_of(epsilon), num,
        out.ctypes.data + into * out_distance, out_distance,
    ))  # fmt: skip


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
def _embed(sync, phase, weights, step, room):
    num_tokens = len(step.token_ids)
    num_chunks = (num_tokens + TOKENS_A_CHUNK - 1) // TOKENS_A_CHUNK
    size, width = len(weights.last_norm), room.up.shape[2]
    while True:
        chunk = claim(sync, phase)
        if chunk >= num_chunks:
            break
        for t in range(chunk * TOKENS_A_CHUNK, min((chunk + 1) * TOKENS_A_CHUNK, num_tokens)):
            token_id = step.token_ids[t]
            panel, column = weights.embedding[token_id // width, 0], weights.embedding[token_id // width, 1]
            call_tile(column, (panel, token_id % width, size, room.hidden[t].ctypes.data))
            if weights.embedding_factor != 1:
                for e in range(size):
                    room.hidden[t, e] *= weights.embedding_factor
        finish(sync, phase)
    wait(sync, phase, num_chunks)


@part()
def _rows_of(form, x, num_k, room):
    """Return where rows of ``x`` are as they are multiplied: as they are, or in a format's rows, still to be made."""
    if form == 0:
        return _Rows(form, x.ctypes.data, x.shape[1] * _FLOAT_BYTES, num_k)
    return _Rows(form, room.rows.ctypes.data, room.rows.shape[1], num_k)


@part()
def _convert(x, source, num, rows, first):
    """Turn rows of ``x`` from ``source`` on into the format's, if it has some, from ``first`` on."""
    if rows.form:
        distance = x.shape[1] * _FLOAT_BYTES
        into = rows.address + first * rows.distance
        call_tile(rows.form, (x.ctypes.data + source * distance, distance, rows.num_k, num, into, rows.distance))


@part()
def _add_normed(tiles, products, first, num, norm, epsilon, hidden):
    """Norm ``num`` rows of products from ``first`` on, where they are, and add them to the residual stream."""
    _norm(tiles, products, first, num, norm, epsilon, products, first)
    for t in range(first, first + num):
        for e in range(len(norm)):
            hidden[t, e] += products[t, e]


class _Adapted(NamedTuple):
    """Where adapters come in, in a phase of norms.

    Attributes:
        layer: of the product before, to which they add something.
        before: its stage; ``NO_STAGE`` for none.
        stage: the one behind the norms, in layer ``next_layer``; ``NO_STAGE`` for none.
        next_layer: of that.
        of_rows: whether rows are those that go on in the last layer, rather than tokens.
    """

    layer: int
    before: int
    stage: int
    next_layer: int
    of_rows: int


@part()
def _norm_all(tiles, team, phase, weights, hidden, num_tokens, norm, behind, room, rows, adapters, x, adapted):
    """Norms of all rows, as they are multiplied; ``room.normed`` has them if the format has no rows of its own.

    Before that, products are added to the rows that are normed by ``behind`` first; nothing is if that is empty.
    Adapters add theirs to products of rows of ``x``.
    """
    sync, epsilon = team.sync, weights.epsilon
    num_chunks = (num_tokens + TOKENS_A_CHUNK - 1) // TOKENS_A_CHUNK
    while True:
        chunk = claim(sync, phase)
        if chunk >= num_chunks:
            break
        first, end = chunk * TOKENS_A_CHUNK, min((chunk + 1) * TOKENS_A_CHUNK, num_tokens)
        add_product(
            adapters, adapted.layer, adapted.before, x, first, end - first, room.products, hidden, behind,
            adapted.of_rows,
        )  # fmt: skip
        if len(behind):
            _add_normed(tiles, room.products, first, end - first, behind, epsilon, hidden)
        into = team.member * TOKENS_A_CHUNK if rows.form else first  # what nobody else reads stays in the cache
        _norm(tiles, hidden, first, end - first, norm, epsilon, room.normed, into)
        shrink(
            adapters, adapted.next_layer, adapted.stage, room.normed, into, end - first, first, adapted.of_rows
        )  # fmt: skip
        _convert(room.normed, into, end - first, rows, first)
        finish(sync, phase)
    wait(sync, phase, num_chunks)


@part()
def _convert_all(sync, phase, x, num_tokens, rows):
    """Turn all rows of ``x`` into the format's; nothing is to be done if it has none."""
    if rows.form == 0:
        return
    num_chunks = (num_tokens + TOKENS_A_CHUNK - 1) // TOKENS_A_CHUNK
    while True:
        chunk = claim(sync, phase)
        if chunk >= num_chunks:
            break
        first = chunk * TOKENS_A_CHUNK
        _convert(x, first, min(TOKENS_A_CHUNK, num_tokens - first), rows, first)
        finish(sync, phase)
    wait(sync, phase, num_chunks)


@part()
def _pick(sync, phase, step, room, attended, last_attended, rows):
    """Take the rows whose logits are wanted along, of the last layer's attention and of the residual stream."""
    num_rows = len(step.logit_rows)
    while True:
        row = claim(sync, phase)
        if row >= num_rows:
            break
        t = step.logit_rows[row]
        room.last_hidden[row] = room.hidden[t]
        last_attended[row] = attended[t]
        _convert(last_attended, row, 1, rows, row)
        finish(sync, phase)
    wait(sync, phase, num_rows)


@part()
def _columns(x, t, num_rows, panels, panel, following, y, row, column, adds):
    """``y[row : row + num_rows, column...] (+)= x[t : t + num_rows] @ panels[panel]``; fetch ``following`` ahead."""
    here, product = panels[panel, 0], panels[panel, 1]
    at_y = y.ctypes.data + (row * y.shape[1] + column) * _FLOAT_BYTES
    at_x, distance = x.address + t * x.distance, y.shape[1] * _FLOAT_BYTES
    call_tile(product, (at_x, x.distance, here, x.num_k, num_rows, at_y, distance, adds, following))


@part()
def _matmul(team, phase, x, num_tokens, panels, y, width, adds, ahead):
    """``y (+)= x @ panels``, of ``num_tokens`` rows; ``ahead`` is what the member will read then."""
    num_done = 0
    dealt = deal(num_tokens, panels.shape[0], team.num_members)
    while True:
        piece = claim_piece(team, phase, dealt)
        if piece.first == piece.end:
            break
        for panel in range(piece.first, piece.end):
            following = following_in(piece, panel, panels, 1, ahead)
            _columns(x, piece.t, piece.num_rows, panels, panel, following, y, piece.t, panel * width, adds)
        num_done += 1
    finish_all(team.sync, phase, num_done)
    wait(team.sync, phase, dealt.num_pieces)


@part()
def _matmul_gate_up(tiles, team, phase, x, num_tokens, panels, y, up, ahead, adapters, layer, of_rows):
    """``y = activation(x @ gate) * (x @ up)``: panels of both alternate, and meet while they are in the cache."""
    num_done, width = 0, up.shape[1]
    dealt = deal(num_tokens, panels.shape[0] // 2, team.num_members)
    distances = y.shape[1] * _FLOAT_BYTES, width * _FLOAT_BYTES
    while True:
        piece = claim_piece(team, phase, dealt)
        if piece.first == piece.end:
            break
        t, num_rows = piece.t, piece.num_rows
        for pair in range(piece.first, piece.end):
            following = following_in(piece, pair, panels, 2, ahead)
            _columns(x, t, num_rows, panels, 2 * pair, panels[2 * pair + 1, 0], y, t, pair * width, 0)
            _columns(x, t, num_rows, panels, 2 * pair + 1, following, up, 0, 0, 0)
            expand_gate_up(adapters, layer, t, num_rows, y, up, pair * width, width, of_rows)
            gate = y.ctypes.data + (t * y.shape[1] + pair * width) * _FLOAT_BYTES
            call_tile(tiles.activation, (gate, distances[0], up.ctypes.data, distances[1], width, num_rows))
        num_done += 1
    finish_all(team.sync, phase, num_done)
    wait(team.sync, phase, dealt.num_pieces)


@part()
def _turn(heads, ropes, keeps, position, turned):
    """Rotate queries ``[H, D]`` as they look at sink tokens, into ``turned``.

    There the window follows the sink tokens at once, and the query is its last.
    """
    place = min(position, keeps.num_sinks + keeps.window - 1)
    for h in range(len(heads)):
        turned[h] = heads[h]
        rotate(turned[h], ropes[place])


@part()
def _place(tiles, sync, phase, weights, step, work, layer, room, qkv, attention, adapters):
    """What adapters add, biases, norms and rope of q and k; K and V go into their blocks, and marks of what is kept."""
    num_tokens = len(step.token_ids)
    num_heads, head_dim = room.attended.shape[1], room.attended.shape[2]
    num_kv_heads = work.cells.shape[2]
    size = TOKENS_A_CHUNK if num_tokens < _MANY_TOKENS else _TOKENS_A_LARGE_CHUNK
    num_chunks = (num_tokens + size - 1) // size
    num_columns = (num_heads + 2 * num_kv_heads) * head_dim
    while True:
        chunk = claim(sync, phase)
        if chunk >= num_chunks:
            break
        for t in range(chunk * size, min((chunk + 1) * size, num_tokens)):
            row = qkv[t]
            rope = weights.rope[weights.rope_of_layer[layer], step.positions[t]]
            expand_qkv(adapters, layer, t, qkv, num_heads * head_dim, num_kv_heads * head_dim)
            if len(weights.bias):
                for e in range(num_columns):
                    row[e] += weights.bias[layer, e]
            heads = row[: (num_heads + num_kv_heads) * head_dim].reshape((num_heads + num_kv_heads, head_dim))
            if len(weights.head_norms):
                _norm(tiles, heads, 0, num_heads, weights.head_norms[layer, 0], weights.epsilon, heads, 0)
                _norm(
                    tiles,
                    heads,
                    num_heads,
                    num_kv_heads,
                    weights.head_norms[layer, 1],
                    weights.epsilon,
                    heads,
                    num_heads,
                )
            if work.keeps.num_sinks > 0:
                ropes = weights.rope[weights.rope_of_layer[layer]]
                _turn(heads[:num_heads], ropes, work.keeps, step.positions[t], room.turned[t])
            for h in range(num_heads + num_kv_heads):
                rotate(heads[h], rope)
            for h in range(num_kv_heads):
                key = (num_heads + h) * head_dim
                value = key + num_kv_heads * head_dim
                vectors = row[key : key + head_dim], row[value : value + head_dim]
                write(attention.slab, work, layer, t, h, vectors[0], vectors[1], attention.scratch)
            if work.keeps.packs:
                mark(attention.slab, work, layer, t, row[num_columns:], weights.thresholds, weights.num_sinks)
        finish(sync, phase)
    wait(sync, phase, num_chunks)


@part()
def _attend(tiles, team, phase, layer, weights, step, attention, room, qkv, adapters):
    """The phases from placing K and V to merging what was attended to, of one layer."""
    head_dim, sync = room.attended.shape[2], team.sync
    slab, scratch, partials = attention.slab, attention.scratch, attention.partials
    work = work_of(attention.work, layer)
    query = qkv.reshape((qkv.shape[0], qkv.shape[1] // head_dim, head_dim))
    out = room.attended[: len(step.token_ids)]
    _place(tiles, sync, phase, weights, step, work, layer, room, qkv, attention, adapters)
    if len(work.seals):
        seal(sync, phase + 1, work, slab, layer, scratch)
    pack(sync, phase + 1, work, slab, layer)
    attend(
        attention.tiles, sync, phase + 2, team.num_members, work, query, room.turned, slab, layer, attention.scoring,
        scratch, partials, out,
    )  # fmt: skip
    if attention.work.num_slots:
        merge(sync, phase + 3, work, slab, layer, attention.scoring.sinks, scratch, partials, out)


@part()
def _cap(tiles, team, phase, weights, logits, num_rows):
    """Softcap of all logits, in place: of parts of each row."""
    sync, num = team.sync, logits.shape[1]
    chunks_a_row = (num + _LOGITS_A_CHUNK - 1) // _LOGITS_A_CHUNK
    num_chunks = num_rows * chunks_a_row
    while True:
        chunk = claim(sync, phase)
        if chunk >= num_chunks:
            break
        row, first = chunk // chunks_a_row, chunk % chunks_a_row * _LOGITS_A_CHUNK
        here = logits[row].ctypes.data + first * _FLOAT_BYTES
        call_tile(tiles.cap, (here, 0, min(_LOGITS_A_CHUNK, num - first), 1, bits_of(weights.logit_softcap)))
        finish(sync, phase)
    wait(sync, phase, num_chunks)


@part()
def _member(tiles, team, weights, step, attention, room, adapters):
    num_tokens, num_rows, num_layers = len(step.token_ids), len(step.logit_rows), weights.norms.shape[0]
    size, width, sync = len(weights.last_norm), room.up.shape[2], team.sync
    num_out = room.attended.shape[1] * room.attended.shape[2]
    attended = room.attended.reshape((room.attended.shape[0], num_out))
    last_attended = room.last_attended.reshape((room.last_attended.shape[0], num_out))
    adds = int(weights.product_norms.shape[2] == 0)  # products that are normed first are added in the norms' phases
    behind = weights.product_norms[0, 1][:0]  # nothing is added before the first layer
    _embed(sync, 0, weights, step, room)
    for layer in range(num_layers):
        phase = 1 + layer * _PHASES_A_LAYER
        qkv, norms, forms = room.qkv[layer % room.qkv.shape[0]], weights.norms[layer], weights.forms[layer]
        normed = _rows_of(forms[0], room.normed, size, room)
        adapted = _Adapted(layer - 1, DOWN if layer else NO_STAGE, QKV, layer, 0)
        _norm_all(
            tiles, team, phase, weights, room.hidden, num_tokens, norms[0], behind, room, normed, adapters, room.inner,
            adapted,
        )  # fmt: skip
        ahead = ahead_of(team, weights.out[layer], 1)
        _matmul(team, phase + 1, normed, num_tokens, weights.qkv[layer], qkv, width, 0, ahead)
        _attend(tiles, team, phase + 2, layer, weights, step, attention, room, qkv, adapters)
        hidden, num, came_to, of_rows = room.hidden, num_tokens, attended, 0
        rows = _rows_of(forms[1], attended, num_out, room)
        if layer < num_layers - 1:
            _convert_all(sync, phase + 6, attended, num, rows)
        else:
            hidden, num, came_to, of_rows = room.last_hidden, num_rows, last_attended, 1
            rows = _rows_of(forms[1], last_attended, num_out, room)
            _pick(sync, phase + 6, step, room, attended, last_attended, rows)
        y = hidden if adds else room.products
        ahead = ahead_of(team, weights.gate_up[layer], 2)
        _matmul(team, phase + 7, rows, num, weights.out[layer], y, width, adds, ahead)
        behind = weights.product_norms[layer, 0]
        normed = _rows_of(forms[2], room.normed, size, room)
        adapted = _Adapted(layer, OUT, GATE_UP, layer, of_rows)
        _norm_all(
            tiles, team, phase + 8, weights, hidden, num, norms[1], behind, room, normed, adapters, came_to, adapted
        )  # fmt: skip
        ahead = ahead_of(team, weights.down[layer], 1)
        up = room.up[team.member]
        panels = weights.gate_up[layer]
        _matmul_gate_up(
            tiles, team, phase + 9, normed, num, panels, room.inner, up, ahead, adapters, layer, of_rows
        )  # fmt: skip
        inner = _rows_of(forms[3], room.inner, weights.intermediate, room)
        _convert_all(sync, phase + 10, room.inner, num, inner)
        ahead = ahead_of(team, weights.qkv[layer + 1] if layer + 1 < num_layers else weights.head, 1)
        _matmul(team, phase + 11, inner, num, weights.down[layer], y, width, adds, ahead)
        behind = weights.product_norms[layer, 1]
    phase = 1 + num_layers * _PHASES_A_LAYER
    last, ahead = room.last_hidden, ahead_of(team, weights.qkv[0], 1)
    normed = _rows_of(weights.head_form, room.normed, size, room)
    adapted = _Adapted(num_layers - 1, DOWN, NO_STAGE, 0, 1)
    _norm_all(
        tiles, team, phase, weights, last, num_rows, weights.last_norm, behind, room, normed, adapters, room.inner,
        adapted,
    )  # fmt: skip
    _matmul(team, phase + 1, normed, num_rows, weights.head, room.logits, width, 0, ahead)
    if weights.logit_softcap != 0:
        _cap(tiles, team, phase + 2, weights, room.logits, num_rows)


@kernel(parallel=True, error_model="numpy")
def run_decoder(
    tiles, attention_tiles, num_members, sync, shares, weights, step, work, scoring, slab, room, scratch, partials,
    adapters,
):  # fmt: skip
    """Compute a step: K and V into their blocks, logits into the room."""
    for index in prange(num_members):
        member = np.int64(index)  # else all is typed twice: the index of such a loop has a sign here, and none there
        attention = _Attention(attention_tiles, work, slab, scoring, member_scratch(scratch, member), partials)
        team = _Team(member, num_members, sync, shares)  # type: ignore[arg-type]  # it is an int there
        _member(tiles, team, weights, step, attention, room, adapters)
