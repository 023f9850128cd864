"""Packing: what was kept of chunks that no token sees all of any more, in blocks that hold nothing else.

Of a group whose rule packs (``keep.py``): a token sees its own chunk and some before it whole, and of older chunks the
entries that were kept. Which these are is found while a chunk is computed and hangs on its tokens and those before it
alone, so what was kept can be published, and shared, as blocks are.

The step behind which no token sees all of a chunk any more packs it. How much was kept is known when that step has run,
and not before, so it is planned as if all were::

    core.extend(cache, start, end)              grants blocks for all chunks that the step packs
    core.packing.commit(cache, counts)          the step ran: of each chunk so many blocks stay, the others are free
    core.packing.on_failed(...)                 the step failed: all that was granted is free

    core.packing.give_back(cache)               the step is not run after all: likewise

Where there is no room for all the chunks that a step could pack, it computes so few tokens that it packs one.

After ``commit`` the chunk lies at the last node of its tokens, if that is published; whoever comes after goes on with
it. Where somebody else was sooner, the cache takes over what lies there, which is the same. No step may be in flight
then that reads the cache: so nothing is planned behind a step that packs.

Blocks of packed chunks go with their node, when that is a leaf: who goes on behind needs all of them. Where somebody
goes on who does not need them yet, they go when nothing else can (``block_cache.py``). So a path may lack some, and a
hit ends as far behind the first that is gone as tokens see whole chunks.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from pagefold.kv.block import PackedChunk
from pagefold.kv.keep import NO_MASK
from pagefold.kv.lodger import Lodger
from pagefold.kv.table import num_blocks_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv.block import Node
    from pagefold.kv.block_cache import BlockCache
    from pagefold.kv.holding import Holding
    from pagefold.kv.keep_rules import KeepRules
    from pagefold.kv.ops import ResidualCopy
    from pagefold.kv.sequence_cache import SequenceCache

__all__ = ["NO_PACKING", "Packed", "Packing"]


_LEAST_GRANTED = 8
"""So many chunks tell how much others will keep."""
_RESERVE = 0.08
"""What is expected beyond what was kept, as a share of it: who runs short of it is preempted."""


class Packed(NamedTuple):
    """What was kept of a chunk, as the step tells that packed it.

    Attributes:
        num_blocks: how many of the blocks that were granted for it hold anything: the first ones.
        counts: how many entries there are of each layer and head, as the runner has it; the core keeps it.
    """

    num_blocks: int
    counts: object


class Packing(Lodger):
    """The packed chunks of all caches.

    Args:
        blocks: of the device.
        rules: what each cache group keeps; one packs.
        holding: gives blocks back.
    """

    def __init__(self, blocks: BlockCache, rules: KeepRules, holding: Holding) -> None:
        assert rules.packing is not None, "no group packs"
        self._blocks = blocks
        self._rule = rules.packing
        self._holding = holding
        self._block_size, self._num_groups = rules.block_size, len(rules)
        self._chunk_blocks = rules.packing.chunk_blocks(rules.block_size)
        self._num_granted: Counter[int] = Counter()  # blocks, by mask
        self._num_kept: Counter[int] = Counter()
        self._group = len(rules)  # of no group that has a table: these blocks go with their nodes

    @property
    def short_step(self) -> int:
        """How many tokens of a sequence one step computes at most where memory is short: as many as a chunk has."""
        assert self._rule.window is not None, "chunks have a size"
        return self._rule.window

    def expected_share(self, mask: int) -> float:
        """Return how much of what is granted for a chunk is expected to stay: what did of others, with a reserve.

        Args:
            mask: of the sequence; others of the same mask are asked. All is expected to stay where these are few.
        """
        num_granted = self._num_granted[mask]
        if num_granted < _LEAST_GRANTED * self._chunk_blocks:
            return 1.0
        return min(1.0, self._num_kept[mask] / num_granted * (1 + _RESERVE))

    def expected_blocks(self, mask: int) -> int:
        """Return how many blocks a chunk is expected to fill, by the same."""
        return math.ceil(self.expected_share(mask) * self._chunk_blocks)

    def kept_share(self, cache: SequenceCache) -> float | None:
        """Return what share of the blocks of its older chunks ``cache`` has kept; None where nothing is packed yet."""
        return cache.num_packed_blocks / (len(cache.chunks) * self._chunk_blocks) if cache.chunks else None

    def num_due(self, cache: SequenceCache, end: int) -> int:
        """Return how many chunks of ``cache`` a step packs that computes its tokens up to position ``end``."""
        if cache.mask == NO_MASK:
            return 0
        return max(0, self._rule.num_packed(end) - len(cache.chunks))

    def needs_grant(self, cache: SequenceCache, end: int) -> bool:
        """Whether ``cache`` has other blocks than such a step packs into: it is to be extended."""
        return self._num_to_grant(cache, end) != 0

    def _num_to_grant(self, cache: SequenceCache, end: int) -> int:
        """Return how many blocks more than it has ``cache`` is to be granted for such a step; perhaps fewer."""
        return self.num_due(cache, end) * self._chunk_blocks - len(cache.granted)

    def grant(self, cache: SequenceCache, end: int) -> bool:
        """Give ``cache`` blocks for the chunks that such a step packs; False, with nothing changed, without memory."""
        num_new = self._num_to_grant(cache, end)
        if num_new <= 0:
            self.give_back(cache, len(cache.granted) + num_new)
            return True
        if num_new > self._blocks.num_available:
            return False
        num_before = len(cache.granted)
        for _ in range(num_new):
            block = self._blocks.allocate()
            if block is None:  # cached blocks that a transfer reads cannot go
                self.give_back(cache, num_before)
                return False
            block.group = self._group
            cache.granted.append(block)
        return True

    def commit(self, cache: SequenceCache, packed: Sequence[Packed]) -> None:
        """A step ran, and packed the next chunks of ``cache``; its promise is committed, and no step reads the cache.

        To be called of every sequence of every such step: it also publishes what could not be before.

        Args:
            cache: whose.
            packed: what was kept of each chunk, in order; of as many as blocks were granted for.
        """
        granted, cache.granted = cache.granted, []
        size = self._chunk_blocks
        assert len(granted) == len(packed) * size, f"{len(packed)} chunks were packed, {len(granted)} blocks granted"
        for at, one in enumerate(packed):
            of_chunk = granted[at * size : (at + 1) * size]
            assert one.num_blocks <= size, "a chunk fills no more than was granted"
            cache.chunks.append(PackedChunk(tuple(of_chunk[: one.num_blocks]), one.counts))
            cache.num_packed_blocks += one.num_blocks
            for block in of_chunk[: one.num_blocks]:
                self._blocks.pool.note_packed(block, cache.mask)
            for block in of_chunk[one.num_blocks :]:
                self._blocks.pool.release(block)
        self._num_granted[cache.mask] += len(granted)
        self._num_kept[cache.mask] += sum(one.num_blocks for one in packed)
        self._publish(cache)

    def _publish(self, cache: SequenceCache) -> None:
        """Publish the packed chunks of ``cache`` whose tokens are, or take over what others have published there."""
        if cache.tail is None:
            return
        num_places = cache.num_published
        node: Node | None = cache.tail
        own = [at for at, chunk in enumerate(cache.chunks[: num_places // self._chunk_blocks]) if chunk.node is None]
        for at in reversed(own):
            while num_places > (at + 1) * self._chunk_blocks:
                assert node is not None, "a path has as many nodes as are published"
                node, num_places = node.parent, num_places - 1
            assert node is not None, "a path has as many nodes as are published"
            if not node.committed:  # its own, of a step that has not run
                continue
            chunk, theirs = cache.chunks[at], node.packed
            if theirs is None:
                chunk.put(node)
                self._blocks.update_evictable(node)
            else:
                self._holding.take_chunk(theirs)
                self._holding.release_chunk(chunk)
                # Computed elsewhere, as many need not have been kept.
                cache.num_packed_blocks += len(theirs.blocks) - len(chunk.blocks)
                cache.chunks[at] = theirs

    # What becomes of sequences.

    def on_release(self, cache: SequenceCache) -> None:
        """A sequence ends: what it was granted is free."""
        self.give_back(cache)

    def on_failed(self, rows: Sequence[tuple[SequenceCache, int]], copies: Sequence[ResidualCopy]) -> None:  # noqa: ARG002
        """A step failed: what it was to pack is not packed."""
        for cache, _ in rows:
            self.give_back(cache)

    def limit(self, cache: SequenceCache, start: int, num_tokens: int, num_all: int) -> int:  # noqa: ARG002
        """Return how many tokens one step may compute: all, or so few that it packs one chunk, where memory is short.

        What it packs is granted whole, beside what it packs from: of several chunks that is most of what a sequence
        ever holds.
        """
        if cache.mask == NO_MASK or num_tokens <= self.short_step:
            return num_tokens
        end = start + num_tokens
        num_new = (num_blocks_for(end, self._block_size) - cache.capacity // self._block_size) * self._num_groups
        num_new += self._num_to_grant(cache, end)
        if cache.copied_from is not None or cache.may_share_tail:  # a copy may keep what it reads, and a fork makes one
            num_new += self._num_groups
        return num_tokens if num_new <= self._blocks.num_available else self.short_step

    def draft_limit(self, cache: SequenceCache, start: int, num_tokens: int) -> int:
        """Return how many tokens a row may have that ends in drafts: none that has another chunk packed.

        Whether that is due is known only when it is known which drafts count.
        """
        if cache.mask == NO_MASK:
            return num_tokens
        return min(num_tokens, max(1, self._rule.reach(len(cache.chunks)) - start))

    def give_back(self, cache: SequenceCache, num_kept: int = 0) -> None:
        """Let go of what was granted, but for the first ``num_kept`` blocks: no step packs with it."""
        while len(cache.granted) > num_kept:
            self._blocks.pool.release(cache.granted.pop())


class _NoPacking(Packing):
    """No group packs."""

    is_on = False

    def __init__(self) -> None:
        pass

    def kept_share(self, cache: SequenceCache) -> None:
        """Nothing is packed."""


NO_PACKING: Packing = _NoPacking()
"""No packing; it never changes, so all cores without it share it."""
