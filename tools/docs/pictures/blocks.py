"""Blocks and tables; the life of a block."""

from __future__ import annotations

from svg import Drawing

from pagefold.kv import BlockState, audit
from pagefold.kv.block import LEGAL_MOVES
from pictures.words import BLOCK, BLOCK_SIZE, Words, draw_block

__all__ = ["blocks", "lifecycle"]


def blocks() -> Drawing:
    """Two sequences that grow in turns, a cached block, and the tables that say where everything lies."""
    words = Words(12)
    core = words.core
    old, _, promise = words.admit("what is a slab")
    words.commit(promise)
    core.release(old)
    texts = {"a": "the quick brown fox jumps over the lazy dog", "b": "blocks need not lie side by side"}
    caches = {name: core.acquire(core.match(name.encode(), b"", 0))[0] for name in texts}
    for end in range(1, 10):
        for name, text in texts.items():
            if end <= len(text.split()):
                assert core.extend(caches[name], end - 1, end)
    for name, text in texts.items():
        words.write(caches[name], text.split(), 0)
    audit(core)

    position = 6
    cache = caches["a"]
    block_id = cache.only_table.block_ids[position // BLOCK_SIZE]
    title = "Block tables and the slab"
    listed = "; ".join(f"table {name.upper()} holds blocks {caches[name].only_table.block_ids}" for name in texts)
    drawing = Drawing(760, 392, title, f"Twelve blocks of four tokens in a slab: {listed}. One block is cached.")
    drawing.text(24, 34, "block tables", "bold")
    for row, name in enumerate(texts):
        y = 48 + row * 42
        drawing.text(24, y + 19, f"sequence {name.upper()}")
        for index, held in enumerate(caches[name].only_table.block_ids):
            strong = " strong" if held == block_id else ""
            drawing.box(120 + index * 40, y, 40, 28, name + strong)
            drawing.text(140 + index * 40, y + 19, str(held), "code", anchor="middle")
    x = 330
    drawing.text(x, 54, f"Where is position {position} of A, “{texts['a'].split()[position]}”?")
    drawing.text(x, 76, f"block  = table[{position} // {BLOCK_SIZE}] = table[1] = {block_id}", "code", size=12)
    drawing.text(x, 94, f"offset = {position} % {BLOCK_SIZE} = {position % BLOCK_SIZE}", "code", size=12)
    drawing.text(x, 116, "Only a last block can have empty slots: that is all the waste.", "pale", size=12)
    drawing.text(24, 164, "the slab", "bold")
    drawing.text(
        92,
        164,
        "blocks are equal, and contiguous in memory; a sequence's blocks need not be neighbours",
        "pale",
        size=12,
    )
    for block in core.pool.blocks:
        owner = next((name for name, held in caches.items() if block.block_id in held.only_table.block_ids), None)
        kind = owner or ("cached" if block.state is BlockState.CACHED else "empty")
        kind += " strong" if block.block_id == block_id else ""
        column, row = block.block_id % 3, block.block_id // 3
        name = f"block {block.block_id}  {block.state.name}"
        draw_block(drawing, 24 + column * (BLOCK + 44), 196 + row * 50, words.slab[block.block_id], kind, name)
    return drawing


def lifecycle() -> Drawing:
    """The table of legal moves."""
    drawing = Drawing(
        760,
        124,
        "The life of a block",
        "; ".join(
            f"{old.name} may become {', '.join(new.name for new in sorted(moves))}"
            for old, moves in LEGAL_MOVES.items()
        ),
    )
    width, height = 140, 54
    places = {
        BlockState.FREE: (30, 40, "empty", "its bytes mean nothing"),
        BlockState.ACTIVE: (310, 40, "a", "held by some table"),
        BlockState.CACHED: (590, 40, "cached", "held by none, findable"),
    }
    for state, (x, y, kind, what) in places.items():
        drawing.box(x, y, width, height, kind)
        drawing.text(x + width / 2, y + 23, state.name, "bold", anchor="middle")
        drawing.text(x + width / 2, y + 42, what, "pale", anchor="middle", size=11)
    free, active, cached = BlockState
    labels: dict[tuple[BlockState, BlockState], tuple[tuple[tuple[float, float], ...], float, float, str]] = {
        (free, active): (((170, 55), (310, 55)), 240, 48, "allocate"),
        (active, free): (((310, 80), (170, 80)), 240, 97, "release, private"),
        (active, cached): (((450, 55), (590, 55)), 520, 48, "release, published"),
        (cached, active): (((590, 80), (450, 80)), 520, 97, "acquire: a hit"),
        (cached, free): (((660, 40), (660, 16), (100, 16), (100, 40)), 380, 30, "evict"),
    }
    assert set(labels) == {(old, new) for old, moves in LEGAL_MOVES.items() for new in moves}, "draw the new moves"
    for points, at_x, at_y, label in labels.values():
        drawing.arrow(*points)
        drawing.text(at_x, at_y, label, anchor="middle", size=12)
    return drawing
