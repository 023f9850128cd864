"""Holding: how a sequence's tables come by blocks, and how they give them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.block import Block, PackedChunk
from pagefold.kv.held_block import HeldBlock
from pagefold.kv.names import digest_of
from pagefold.kv.table import num_blocks_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv.block import Node
    from pagefold.kv.block_cache import BlockCache
    from pagefold.kv.host_tier import HostTier
    from pagefold.kv.keep_rules import KeepRules
    from pagefold.kv.moves import Moves
    from pagefold.kv.sequence_cache import SequenceCache
    from pagefold.kv.tree import PrefixHit
    from pagefold.kv.uses import Uses

__all__ = ["Holding"]


class Holding:
    """Which blocks tables hold.

    Args:
        blocks: of the device.
        rules: what each cache group keeps.
        moves: what is copied for tables.
        host: from where blocks are loaded.
        uses: where it is noted that a part of a block is used.
    """

    def __init__(self, blocks: BlockCache, rules: KeepRules, moves: Moves, host: HostTier, uses: Uses) -> None:
        self._blocks = blocks
        self._pool = blocks.pool
        self._rules = rules
        self._moves = moves
        self._host = host
        self._uses = uses

    # Tables that begin.

    def take(self, cache: SequenceCache, nodes: list[Node]) -> None:
        """Let the tables of ``cache`` begin with the blocks of ``nodes``, as far as they are kept."""
        rules = self._rules.of(cache.mask)
        for group, (table, rule) in enumerate(zip(cache.tables, rules, strict=True)):
            first = rule.first_block(len(nodes), self._rules.block_size)
            kept = [nodes[at] for at in rule.places(len(nodes), self._rules.block_size)] if first else nodes
            blocks = [block for node in kept if (block := node.blocks[group]) is not None]
            block_ids = self._pool.acquire_all(blocks)
            table.hold(block_ids, first, rule.num_sink_blocks(self._rules.block_size))
            if rule.trims:
                for block in blocks:
                    self._blocks.windows.note_busy(block)
        cache.chunks = rules.packed_of(nodes)
        for chunk in cache.chunks:
            self.take_chunk(chunk)
        cache.num_packed_blocks = sum(len(chunk.blocks) for chunk in cache.chunks)

    def take_with_held(self, cache: SequenceCache, nodes: list[Node], hit: PrefixHit) -> bool:
        """Let the tables of ``cache`` begin with blocks of ``nodes`` and those that ``hit`` says the host holds.

        What is loaded becomes theirs where they lack it; what lies behind them is published later.

        Where groups keep the last tokens only it is all or nothing: False, with nothing changed, where something of
        ``hit`` has gone since, or memory is short.
        """
        size, rules = self._rules.block_size, self._rules.of(hit.mask)
        num_blocks = hit.num_blocks
        places_of = [rule.places(num_blocks, size) for rule in rules]
        pinned = self._host.blocks.pin(hit.held)  # before allocating, which may evict into the arena
        sources = _sources(nodes, pinned, places_of)
        chunks = _chunk_sources(hit.nodes, pinned, rules, num_blocks)
        if sources is None or chunks is None or not self._fill(cache, sources, chunks):
            self._host.blocks.unpin(pinned)
            return False
        loaded: set[HeldBlock] = set()
        places: set[int] = set()  # a place's tokens count once, whatever groups they are loaded of
        for table, rule, places_held, of_group in zip(cache.tables, rules, places_of, sources, strict=True):
            for place, block_id, source in zip(places_held, table.block_ids, of_group, strict=True):
                if isinstance(source, HeldBlock):
                    node = nodes[place] if place < len(nodes) else None
                    self._moves.load(source, self._pool.blocks[block_id], node)
                    source.count_use(cache.num_loaded_tokens, 0 if place in places else size)
                    loaded.add(source)
                    places.add(place)
            table.hold(table.block_ids, rule.first_block(num_blocks, size), rule.num_sink_blocks(size))
        for number, (chunk, of_chunk) in enumerate(zip(cache.chunks, chunks, strict=True)):
            if isinstance(of_chunk, PackedChunk):
                continue
            assert rules.packing is not None, "some group packs"
            num_places = len(set(rules.packing.chunk_places(number, size)) - places)
            for block, source in zip(chunk.blocks, of_chunk, strict=True):
                self._moves.load(source, block)
                source.count_use(cache.num_loaded_tokens, num_places * size)
                num_places = 0
            loaded.update(of_chunk)
        self._host.blocks.unpin([one for one in pinned if one not in loaded])
        return True

    def take_partial(self, cache: SequenceCache, node: Node, num_tokens: int) -> int:
        """Let the next blocks of ``cache`` be copies of those of ``node``. Return their tokens; 0 without memory."""
        sources: list[Block] = []
        for block in node.blocks:
            if block is None:
                break
            self._pool.pin_io(block)  # before allocating, which might evict it
            sources.append(block)
        self._blocks.update_evictable(node)
        copies: list[Block] = []
        while len(copies) < len(node.blocks) == len(sources):
            dst = self._blocks.allocate()
            if dst is None:
                break
            copies.append(dst)
        is_taken = len(copies) == len(node.blocks)
        if is_taken:
            self._uses.note_part(node)
            cache.copied_from = node
            for table, src, dst in zip(cache.tables, sources, copies, strict=True):
                dst.group = src.group
                self._moves.copy(src, dst, num_tokens)
                table.block_ids.append(dst.block_id)
        else:
            for dst in copies:
                self._pool.release(dst)
        for src in sources:
            self._pool.unpin_io(src)  # the copy has pinned it too
        if not is_taken:
            self._blocks.update_evictable(node)
            return 0
        return num_tokens

    def take_held(self, cache: SequenceCache, held: tuple[HeldBlock, ...]) -> int:
        """Let the next blocks of ``cache`` be loaded from the host. Return how many blocks are, from the first on."""
        pinned = self._host.blocks.pin(held)  # before allocating, which may evict into the arena
        num_loaded = 0
        for one in pinned:
            block = self._blocks.allocate()
            if block is None:
                break
            block.group = 0
            self._moves.load(one, block)
            cache.only_table.block_ids.append(block.block_id)
            one.count_use(cache.num_loaded_tokens, self._rules.block_size)
            num_loaded += 1
        self._host.blocks.unpin(pinned[num_loaded:])
        return num_loaded

    # Tables that go on.

    def extend(self, cache: SequenceCache, end: int) -> bool:
        """Give the tables of ``cache`` blocks up to position ``end``; False, and nothing changes, without memory."""
        tables, size = cache.tables, self._rules.block_size
        num_blocks, num_old = num_blocks_for(end, size), cache.capacity // size
        num_new = num_blocks - num_old
        if num_new * len(tables) > self._blocks.num_available:
            return False
        allocate = self._blocks.allocate
        for group, table in enumerate(tables):
            for _ in range(num_new):
                block = allocate()
                if block is None:  # cached blocks that a transfer reads cannot go
                    self.cut(cache, num_old)
                    return False
                block.group = group
                table.block_ids.append(block.block_id)
        cache.capacity = num_blocks * size
        return True

    def unshare(self, cache: SequenceCache, start: int, *, copies: bool) -> bool:
        """Give ``cache`` blocks of its own from position ``start`` on; False when memory is short.

        Args:
            cache: whose blocks a fork may hold too.
            start: where it will write next.
            copies: whether what lies before ``start`` is in the shared blocks at all.
        """
        size = self._rules.block_size
        first = start // size
        for table in cache.tables:
            for at in range(first - table.num_trimmed, len(table.block_ids)):
                src = self._pool.blocks[table.block_ids[at]]
                if src.num_table_refs == 1:
                    continue
                dst = self._blocks.allocate()
                if dst is None:
                    return False  # blocks replaced so far stay replaced: the next try goes on from there
                dst.group = src.group
                num_tokens = start % size if at == first - table.num_trimmed else 0
                if num_tokens and copies:
                    self._moves.copy(src, dst, num_tokens)
                table.block_ids[at] = dst.block_id
                self._pool.release(src)
        cache.may_share_tail = False
        return True

    def share(self, cache: SequenceCache, twin: SequenceCache) -> None:
        """Let the tables of ``twin`` hold what those of ``cache`` do."""
        for table, other in zip(cache.tables, twin.tables, strict=True):
            other.block_ids, other.sink_ids = list(table.block_ids), list(table.sink_ids)
            other.num_trimmed = table.num_trimmed
        twin.may_share_tail = cache.may_share_tail = True
        twin.chunks, twin.num_packed_blocks = list(cache.chunks), cache.num_packed_blocks
        for block_id in twin.all_block_ids():
            self._pool.acquire(self._pool.blocks[block_id])

    # Blocks that are given back.

    def cut(self, cache: SequenceCache, num_blocks: int) -> None:
        """Give back the private blocks behind place ``num_blocks``, the newest first."""
        for table in reversed(cache.tables):
            while table.end > num_blocks:
                self._pool.release(self._pool.blocks[table.block_ids.pop()])
        cache.capacity = num_blocks * self._rules.block_size

    def trim(self, cache: SequenceCache, num_tokens: int) -> None:
        """Give back what nobody sees from position ``num_tokens`` on: see :meth:`KVCore.trim`."""
        promise = cache.promise
        assert promise is None or promise.before is None, "the step that wrote the tokens is committed"
        num_published = cache.num_published if promise is None else promise.first
        if cache.marks and cache.marks[-1].end <= num_published:
            self._set_landmarks(cache, num_published)
        pool, size, rules = self._pool, self._rules.block_size, self._rules.of(cache.mask)
        for group in rules.trimmed:
            table, rule = cache.tables[group], rules[group]
            first = rule.first_kept(num_tokens, size)
            if rule.packs:  # what is not packed yet is what it will be packed from
                first = min(first, len(cache.chunks) * rule.chunk_blocks(size))
            if cache.tail is not None:
                first = min(first, rule.first_block(num_published, size))
            if first <= table.num_trimmed:
                continue
            for block_id in table.cut_front(first, rule.num_sink_blocks(size)):
                block = pool.blocks[block_id]
                if pool.release(block) and block.node is not None:
                    self._blocks.windows.note_idle(block, is_left=True)

    def release(self, cache: SequenceCache) -> None:
        """Give back all: published blocks become cached, private ones free. Tails go first.

        So of one prefix the tail is always evicted before the head.
        """
        tick, now_s = self._blocks.tick, self._blocks.now_s
        blocks, release = self._pool.blocks, self._pool.release
        tail, rules = cache.tail, self._rules.of(cache.mask)
        others_went_on = tail is not None and bool(tail.children)
        if tail is not None and others_went_on and rules.trimmed and cache.has_path and tail.committed:
            self._blocks.windows.mark(tail, "message")  # it is no end of a path
        for table, rule in zip(cache.tables, rules, strict=True):
            trims = rule.trims
            for block_id in reversed(list(table.all_ids())):
                block = blocks[block_id]
                node = block.node
                if node is None:
                    release(block)
                    continue
                node.last_used = tick
                node.used_s = now_s
                if not release(block):
                    continue
                if not node.children:
                    self._blocks.update_evictable(node)
                elif trims:
                    self._blocks.windows.note_idle(block, is_left=others_went_on)
            table.clear()
        for chunk in reversed(cache.chunks):
            self.release_chunk(chunk)
        cache.chunks.clear()
        cache.num_packed_blocks = 0

    def release_chunk(self, chunk: PackedChunk) -> None:
        """Give back what was kept of a chunk."""
        for block in chunk.blocks:
            self._pool.release(block)
        if chunk.node is not None:
            self._blocks.update_evictable(chunk.node)

    def take_chunk(self, chunk: PackedChunk) -> None:
        """Hold what was kept of a chunk once more; it is published."""
        assert chunk.node is not None, "who takes it has found it at its node"
        self._pool.acquire_all(chunk.blocks)
        self._blocks.update_evictable(chunk.node)

    # Inside.

    def _set_landmarks(self, cache: SequenceCache, num_published: int) -> None:
        """Make landmarks of the places of ``cache`` that are published now: it still holds their windows."""
        windows = self._blocks.windows
        while cache.marks and cache.marks[-1].end <= num_published:
            mark = cache.marks.pop()
            node = cache.tail
            for _ in range(cache.num_published - mark.end):
                assert node is not None, "the path has so many nodes as are published"
                node = node.parent
            if node is None or not node.committed:
                continue
            windows.mark(node, mark.why)

    def _fill(
        self, cache: SequenceCache, sources: list[list[Block | HeldBlock]], chunks: list[PackedChunk | list[HeldBlock]]
    ) -> bool:
        """Let ``cache`` hold the blocks among ``sources`` and ``chunks``, and new ones for the others.

        False, with nothing changed, when memory is short.
        """
        for table, of_group in zip(cache.tables, sources, strict=True):
            own = [one for one in of_group if isinstance(one, Block)]
            self._pool.acquire_all(own)
            table.block_ids = [block.block_id for block in own]
            for block in own:
                assert block.node is not None, "what a hit found is published"
                self._blocks.windows.note_busy(block)
                if not block.node.children:
                    self._blocks.update_evictable(block.node)
        cache.chunks = [one for one in chunks if isinstance(one, PackedChunk)]
        for chunk in cache.chunks:
            self.take_chunk(chunk)
        new = self._allocate(sum(isinstance(one, HeldBlock) for part in (*sources, *chunks) for one in _each(part)))
        if new is None:
            self.release(cache)
            return False
        for group, (table, of_group) in enumerate(zip(cache.tables, sources, strict=True)):
            held = [one if isinstance(one, Block) else new.pop() for one in of_group]
            table.block_ids = [block.block_id for block in held]
            for block in held:
                block.group = group
        cache.chunks = [
            one if isinstance(one, PackedChunk) else self._begin_chunk(one, new, cache.mask) for one in chunks
        ]
        cache.num_packed_blocks = sum(len(chunk.blocks) for chunk in cache.chunks)
        return True

    def _allocate(self, num_blocks: int) -> list[Block] | None:
        """Return so many new blocks; None, with nothing changed, when memory is short."""
        new: list[Block] = []
        while len(new) < num_blocks:
            block = self._blocks.allocate()
            if block is None:
                for one in new:
                    self._pool.release(one)
                return None
            new.append(block)
        return new

    def _begin_chunk(self, held: list[HeldBlock], new: list[Block], mask: int) -> PackedChunk:
        """Return a packed chunk in new blocks, into which it will be loaded, of what was kept by ``mask``."""
        told = held[0].chunk
        assert told is not None, "the first block of a packed chunk says which that is"
        blocks = tuple(new.pop() for _ in held)
        for block in blocks:
            block.group = len(self._rules)  # as ``packing.py`` has it
            self._pool.note_packed(block, mask)
        return PackedChunk(blocks, told.counts)


def _each(source: list[Block | HeldBlock] | list[HeldBlock] | PackedChunk) -> Sequence[Block | HeldBlock]:
    return source.blocks if isinstance(source, PackedChunk) else source


def _sources(
    nodes: list[Node], held: list[HeldBlock], places_of: list[Sequence[int]]
) -> list[list[Block | HeldBlock]] | None:
    """Return what the tables of each group begin with; None where something is neither on the device nor held.

    Args:
        nodes: of the path.
        held: what the host holds of it, group by group in the order of their places.
        places_of: where each group needs its blocks; those behind ``nodes`` the host holds.
    """
    lacking: dict[tuple[int, bytes], HeldBlock] = {(one.name.group, one.name.path): one for one in held}
    on_device = {digest_of(node) for node in nodes}
    behind = [one for one in held if one.name.path not in on_device]
    sources: list[list[Block | HeldBlock]] = []
    for group, places in enumerate(places_of):
        of_group: list[Block | HeldBlock] = []
        for node in (nodes[at] for at in places if at < len(nodes)):
            source = node.blocks[group] or lacking.get((group, digest_of(node)))
            if source is None:
                return None
            of_group.append(source)
        of_group += [one for one in behind if one.name.group == group]
        if len(of_group) != len(places):
            return None
        sources.append(of_group)
    return sources


def _chunk_sources(
    nodes: list[Node], held: list[HeldBlock], rules: KeepRules, num_blocks: int
) -> list[PackedChunk | list[HeldBlock]] | None:
    """Return where the packed chunks of a path are; None where one is neither on the device nor held.

    Args:
        nodes: of the path, that the device has.
        held: what the host holds of it; of packed chunks last, in order.
        rules: what each group keeps.
        num_blocks: how many blocks the path has.
    """
    rule = rules.packing
    if rule is None:
        return []
    parts: dict[bytes, list[HeldBlock]] = {}
    for one in held:
        if one.name.group >= len(rules):
            parts.setdefault(one.name.path, []).append(one)
    by_number = {told.number: of_chunk for of_chunk in parts.values() if (told := of_chunk[0].chunk) is not None}
    found: list[PackedChunk | list[HeldBlock]] = []
    for number in range(rule.num_packed(num_blocks * rules.block_size)):
        at = rule.chunk_places(number, rules.block_size)[-1]
        packed = nodes[at].packed if at < len(nodes) else None
        of_chunk = by_number.get(number, [])
        if packed is not None:
            found.append(packed)
        elif of_chunk and (told := of_chunk[0].chunk) is not None and told.num_blocks == len(of_chunk):
            found.append(of_chunk)
        else:
            return None
    return found
