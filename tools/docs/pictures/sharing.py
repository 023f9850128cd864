"""The prefix tree, and what a step promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from svg import Drawing

from pagefold.kv import audit
from pictures.words import BLOCK, BLOCK_SIZE, Words, draw_block

if TYPE_CHECKING:
    from pagefold.kv import Promise, SequenceCache

__all__ = ["promises", "tree"]


def tree() -> Drawing:
    """Two prompts with one beginning: shared blocks, and a block that is copied where they part."""
    words = Words(16)
    system = "You are a kind cook . Answer briefly"
    texts = {"a": f"{system} How do I boil an egg well ?", "b": f"{system} How do I bake good dark bread ?"}
    caches: dict[str, SequenceCache] = {}
    starts: dict[str, int] = {}
    copies = []
    for name, text in texts.items():
        caches[name], starts[name], promise = words.admit(text)
        copies += words.core.moves.pending_copies
        words.commit(promise)
    (copy,) = copies

    num_tokens = len(texts["b"].split())
    drawing = Drawing(
        760,
        410,
        "The prefix tree",
        f"Two prompts share blocks {caches['a'].only_table.block_ids[:2]}. The second copies {copy.num_tokens} tokens "
        f"of block {copy.src} into block {copy.dst} and computes {num_tokens - starts['b']} of {num_tokens} tokens.",
    )
    places: dict[int, tuple[float, float]] = {}
    nodes = sorted(words.core.tree.nodes(), key=lambda node: node.depth)
    for node in nodes:
        block = node.blocks[0]
        assert block is not None, "of a group that keeps all"
        holders = [name for name, cache in caches.items() if block.block_id in cache.only_table.block_ids]
        kind = holders[0] if len(holders) == 1 else "shared"
        x = {"a": 100.0, "b": 452.0, "shared": 276.0}[kind]
        y = 86.0 + node.depth * 76
        places[block.block_id] = (x, y)
        held = " and ".join(holder.upper() for holder in holders)
        draw_block(drawing, x, y, words.words_of(node), kind, f"block {block.block_id}: {held}")
        parent = node.parent
        assert parent is not None
        if not parent.blocks:
            drawing.box(x + BLOCK / 2 - 140, 20, 280, 28, "box")
            drawing.text(x + BLOCK / 2, 39, "namespace: model, layout, tenant, salt …", anchor="middle", size=12)
            drawing.arrow((x + BLOCK / 2, 48), (x + BLOCK / 2, y - 14))
        else:
            above = places[parent.blocks[0].block_id]
            drawing.arrow((above[0] + BLOCK / 2, above[1] + 26), (x + BLOCK / 2, y - 14))
    source, target = places[copy.src], places[copy.dst]
    drawing.arrow((source[0] + BLOCK, source[1] + 13), (target[0], target[1] + 13), kind="line promised")
    middle = (source[0] + BLOCK + target[0]) / 2
    drawing.text(middle, source[1] + 32, "copy on write:", "pale", anchor="middle", size=12)
    drawing.text(middle, source[1] + 48, f"{copy.num_tokens} tokens", "pale", anchor="middle", size=12)
    y = 372
    for row, (name, cache) in enumerate(caches.items()):
        held = ", ".join(map(str, cache.only_table.block_ids))
        found = starts[name]
        costs = f"Found {found} of {num_tokens} tokens, computed {num_tokens - found}."
        drawing.box(100, y + row * 24 - 11, 12, 12, name)
        drawing.text(120, y + row * 24, f"table of {name.upper()}: blocks {held}. {costs}")
    return drawing


def promises() -> Drawing:
    """One step of two requests that begin alike: promised, then committed or taken back."""
    texts = {
        "a": "one prefix for both of them is used once a ends so",
        "b": "one prefix for both of them is used once b goes on",
    }
    drawing = Drawing(
        760,
        330,
        "Promised and committed",
        "Three states of the same blocks: promised while a step is planned, committed when it ran, taken back when it "
        "failed. Request B leans on two blocks that A has promised.",
    )
    columns = (
        ("schedule(): promised", "B leans on what A will write", False, False),
        ("apply(): committed", "the step ran: the blocks stay", True, False),
        ("abandon(): taken back", "the step failed: both wait again", False, True),
    )
    for number, (title, what, is_committed, is_abandoned) in enumerate(columns):
        words = Words(6)
        caches: dict[str, SequenceCache] = {}
        made: list[Promise | None] = []
        hits = {}
        for name, text in texts.items():
            caches[name], hits[name], promise = words.admit(text)
            made.append(promise)
        assert hits == {"a": 0, "b": 2 * BLOCK_SIZE}
        for promise in made if is_committed else []:
            words.commit(promise)
        for promise in reversed(made) if is_abandoned else []:
            assert promise is not None
            words.core.publishing.abandon(promise)
        for cache in list(caches.values()) if is_abandoned else []:
            words.core.release(cache)
        audit(words.core)
        x = 24 + number * 246
        drawing.text(x, 34, title, "bold code")
        drawing.text(x, 54, what, "pale", size=12)
        committed = {
            block.block_id: node.committed for node in words.core.tree.nodes() for block in node.blocks if block
        }
        for block in words.core.pool.blocks[:4]:
            holders = [name for name, cache in caches.items() if block.block_id in cache.only_table.block_ids]
            kind = "empty" if not holders else holders[0] if len(holders) == 1 else "shared"
            held = f"{block.num_table_refs} table{'s' * (block.num_table_refs != 1)}"
            if block.block_id in committed:
                state = "committed" if committed[block.block_id] else "promised"
                kind += "" if committed[block.block_id] else " promised"
            else:
                state = block.state.name
            shown = words.slab[block.block_id] if holders else [""] * BLOCK_SIZE
            name = f"block {block.block_id}  {state}, {held}"
            draw_block(drawing, x, 88 + block.block_id * 48, shown, kind, name)
        for row, (name, cache) in enumerate(caches.items()):
            ids = ", ".join(map(str, cache.only_table.block_ids))
            said = f"{name.upper()}: blocks {ids}" if ids else f"{name.upper()}: waits"
            drawing.text(x, 292 + row * 20, said, "code", size=12)
    return drawing
