"""What a sequence holds while its older chunks are packed."""

from __future__ import annotations

from array import array

from svg import Drawing

from pagefold.kv import KeepRule, KVCore, Packed, audit

__all__ = ["packing"]

BLOCK_SIZE, CHUNK_BLOCKS, NUM_CHUNKS = 4, 4, 5
CHUNK = BLOCK_SIZE * CHUNK_BLOCKS
CELL = 26  # pixels: a block


def packing() -> Drawing:
    """A prompt that is computed chunk by chunk, half of whose older tokens are kept."""
    rule = KeepRule(CHUNK, is_chunked=True, num_before=1, packs=True)
    core = KVCore(64, block_size=BLOCK_SIZE, rules=[rule])
    tokens = array("i", range(NUM_CHUNKS * CHUNK))
    cache, _ = core.acquire(core.match(b"", b"", 0))
    num_blocks = len(tokens) // BLOCK_SIZE
    drawing = Drawing(
        760,
        92 + 42 * NUM_CHUNKS,
        "Packed chunks",
        f"A prompt of chunks of {CHUNK_BLOCKS} blocks, computed up to the middle of one after another: it and the "
        "one before it are whole, of each older one half of the blocks are held.",
    )
    drawing.text(24, 32, "computed", "bold")
    for chunk in range(NUM_CHUNKS):
        drawing.text(130 + chunk * (CHUNK_BLOCKS * CELL + 8), 32, f"chunk {chunk}", "bold")
    for row in range(NUM_CHUNKS):
        start, end = max(0, (2 * row - 1) * CHUNK // 2), (2 * row + 1) * CHUNK // 2
        assert core.extend(cache, start, end)
        promise = core.publishing.promise(cache, tokens.tobytes(), end)
        assert promise is not None
        core.publishing.commit(promise)
        num_packed = len(cache.granted) // CHUNK_BLOCKS
        core.packing.commit(cache, [Packed(CHUNK_BLOCKS // 2, None)] * num_packed)
        core.trim(cache, end)
        audit(core)
        y = 46 + row * 42
        drawing.text(24, y + 19, f"{row or ''}½ {'chunks' if row else 'chunk'}")
        for place in range(num_blocks):
            chunk, nth = divmod(place, CHUNK_BLOCKS)
            x = 130 + chunk * (CHUNK_BLOCKS * CELL + 8) + nth * CELL
            if place < cache.only_table.end and cache.only_table.at(place) is not None:
                drawing.box(x, y, CELL - 2, 28, "a")
            elif chunk < len(cache.chunks) and nth < len(cache.chunks[chunk].blocks):
                drawing.box(x, y, CELL - 2, 28, "shared")
            else:
                drawing.box(x, y, CELL - 2, 28, "empty promised")
        num_held = sum(1 for _ in cache.all_block_ids())
        drawing.text(744, y + 19, f"{num_held} blocks", "pale", anchor="end", size=12)
    y = 46 + 42 * NUM_CHUNKS
    for x, kind, words in (
        (24, "a", "whole"),
        (130, "shared", "what was kept, packed"),
        (340, "empty promised", "free"),
    ):
        drawing.box(x, y, CELL - 2, 20, kind)
        drawing.text(x + CELL + 6, y + 15, words, size=12)
    return drawing
