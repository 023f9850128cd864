"""ShadowRunner: a model whose KV is a number. What it samples tells whether it read what it should have.

The cell of a position depends on its token and on the cell before it, as it lies in the slab: so it stands for the
namespace and all tokens up to there, as the K and V of a real model do. A sampled token depends on all cells that its
row reads after every row has written. So a wrong share, a stale block or a copy that was not made shows twice: as a
cell that is not what :func:`cells_of` says, and as a token that is not what :func:`expected_token` says.

There must be a cache group that keeps all; its cells are these numbers. Those of another group are the same numbers and
as much more as the group comes behind it. A row reads of it what the group keeps.

Where blocks are sealed, what a row has of its last block is in its residual, and in each group's block only when that
is full.

Where chunks are packed, which positions of a chunk are kept follows from its cells, and their cells lie in the blocks
that were granted. A row reads those and no others of what lies before the chunks that it sees whole.

It has a host arena too. A block there is stored together with what was stored, as the real arena's are with a checksum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv import Packed
from pagefold.steps import DamagedBlocksError, StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import BlockId, BlockTable
    from pagefold.request import Request
    from pagefold.scheduler import Scheduler
    from pagefold.steps import StepPlan

__all__ = ["VOCAB_SIZE", "ShadowRunner", "alone", "cells_of", "expected_token"]

VOCAB_SIZE = 3
"""Few tokens, so that outputs agree by accident, and part again."""

_POISON = -1
_GARBAGE = -2
_MASK = (1 << 61) - 1


def cells_of(namespace: bytes, token_ids: Sequence[int]) -> list[int]:
    """Return the cells that ``token_ids`` must have."""
    cells: list[int] = []
    cell = _root(namespace)
    for token_id in token_ids:
        cell = _next(cell, token_id)
        cells.append(cell)
    return cells


def expected_token(namespace: bytes, token_ids: Sequence[int], seed: int) -> int:
    """Return the token that follows ``token_ids``, by nothing but their values."""
    return _sampled(cells_of(namespace, token_ids), seed)


def alone(request: Request) -> list[int]:
    """Return what a request generates with no scheduler, no cache and nobody else: output tokens to its end."""
    num_prompt_tokens = request.num_prompt_tokens
    token_ids = list(request.token_ids[:num_prompt_tokens])
    cells = cells_of(request.namespace, token_ids)
    while len(token_ids) < request.stop.max_total_tokens:
        token_ids.append(_sampled(cells, request.seed))
        if token_ids[-1] in request.stop.token_ids:
            break
        cells.append(_next(cells[-1], token_ids[-1]))
    return token_ids[num_prompt_tokens:]


class ShadowRunner:
    """Carries out plans on a slab of numbers.

    Args:
        scheduler: knows which namespace a row has, which a plan does not: a real model has it in its weights.

    Attributes:
        whole_group: the first cache group that keeps all, which tells what the others must have.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        core = scheduler.core
        self._scheduler = scheduler
        self._size = core.block_size
        self._rules = core.rules
        self.whole_group = next(group for group, rule in enumerate(self._rules) if not rule.trims)
        self._slab = [[_POISON] * self._size for _ in range(core.pool.num_blocks)]
        self._arena = [_Stored([_POISON] * self._size) for _ in range(core.host.blocks.num_blocks)]
        self._residuals = [[_POISON] * self._size for _ in range(core.residuals.num_residuals)]
        self._last: list[int] = []  # sampled by the last step

    def run(self, plan: StepPlan) -> StepResult:
        """Store and load, copy, write row by row, then sample.

        Raises:
            DamagedBlocksError: some loads and checks; all stores and all other loads were made, and nothing after them.
        """
        self.move(plan)
        self.copy(plan)
        token_ids = plan.token_ids[:]
        for index, place in zip(plan.late, plan.late_from, strict=True):
            token_ids[index] = self._last[place]
        at = 0
        for row, (start, num_tokens) in enumerate(zip(plan.starts, plan.num_tokens, strict=True)):
            self._write(plan, row, start, token_ids[at : at + num_tokens])
            at += num_tokens
        packed = [self._pack(plan, at) for at in range(len(plan.packing_rows))]
        sampled = zip(plan.sampling_rows, plan.sampled_positions(), plan.seeds, strict=True)
        self._last = [_sampled(self.read_row(plan, row)[:position], seed) for row, position, seed in sampled]
        return StepResult(self._last, packed=packed)

    def move(self, plan: StepPlan) -> None:
        """Make the stores and loads.

        Raises:
            DamagedBlocksError: as ``run`` does.
        """
        for store in plan.host_ops.stores:
            self._arena[store.host_id] = _Stored(self._slab[store.block_id])
        damaged = set()
        for load in plan.host_ops.loads:
            stored = self._arena[load.host_id]
            self._slab[load.block_id] = list(stored.cells)
            if stored.is_damaged:
                damaged.add(load.host_id)
        damaged.update(host_id for host_id in plan.host_ops.checks if self._arena[host_id].is_damaged)
        if damaged:
            raise DamagedBlocksError(frozenset(damaged))

    def copy(self, plan: StepPlan) -> None:
        """Make the copies; no block is read by one and written by another, so their order does not matter."""
        written = [copy.dst for copy in plan.copies]
        assert len(set(written)) == len(written), "two copies into one block"
        assert not {copy.src for copy in plan.copies} & set(written), "a copy leans on a copy"
        for copy in plan.copies:
            self._slab[copy.dst] = list(self._slab[copy.src])
        for residual in plan.residual_copies:
            self._residuals[residual.dst] = list(self._residuals[residual.src])

    def spoil(self, plan: StepPlan, num_rows: int) -> None:
        """Leave what a step that died may leave: anything, wherever its first ``num_rows`` rows write."""
        rows = list(zip(plan.tables, plan.starts, plan.num_tokens, strict=True))
        for row, (tables, start, num_tokens) in enumerate(rows[:num_rows]):
            for position in range(start, start + num_tokens):
                for table in tables:
                    self._put(table, position, _GARBAGE)
            if self._residuals:
                own = self._own(start, start + num_tokens)
                self._residuals[plan.residual_ids[row]][own] = [_GARBAGE] * (own.stop - own.start)
        for row, granted in zip(plan.packing_rows, plan.granted, strict=True):
            for block in granted if row < num_rows else ():
                self._slab[block.block_id] = [_GARBAGE] * self._size

    def die(self, plan: StepPlan, num_rows: int) -> None:
        """Die in the middle: of what was to be moved and copied nothing is sure, and of the rows some were written."""
        for block_id in [load.block_id for load in plan.host_ops.loads] + [copy.dst for copy in plan.copies]:
            self._slab[block_id] = [_GARBAGE] * self._size
        self.spoil(plan, num_rows)

    def damage(self, host_id: int) -> None:
        """Let bits turn in a block of the arena."""
        self._arena[host_id].cells[0] += 1

    def stored(self, host_id: int) -> list[int]:
        """Return what was stored into a block of the arena."""
        return list(self._arena[host_id].cells_then)

    def store(self, host_id: int, cells: list[int]) -> None:
        """Put a block into the arena, as a transfer does."""
        self._arena[host_id] = _Stored(cells)

    def poison_host(self, host_id: int) -> None:
        """Make a block of the arena mean nothing."""
        self._arena[host_id] = _Stored([_POISON] * self._size)

    def poison(self, block_id: int, begin: int = 0) -> None:
        """Make cells [begin, block_size) of a block mean nothing."""
        self._slab[block_id][begin:] = [_POISON] * (self._size - begin)

    def read(self, block_ids: list[BlockId], num_tokens: int) -> list[int]:
        """Return what cells [0, num_tokens) of a table of the whole group stand for."""
        num_blocks = -(-num_tokens // self._size)
        cells = [cell for block_id in block_ids[:num_blocks] for cell in self._cells(block_id)]
        return cells[:num_tokens]

    def read_sealed(self, block_ids: list[BlockId], num_tokens: int, residual_id: int) -> list[int]:
        """Return the same where blocks are sealed: those of the last block, if that is not full, of a residual."""
        num_own = num_tokens % self._size
        return self.read(block_ids, num_tokens - num_own) + self._residuals[residual_id][:num_own]

    def read_row(self, plan: StepPlan, row: int) -> list[int]:
        """Return what a row reads, its own cells included."""
        tables, num_tokens = plan.tables[row], plan.starts[row] + plan.num_tokens[row]
        block_ids = tables[self.whole_group].block_ids
        end = num_tokens  # of what is in blocks
        if self._residuals:
            cells = self.read_sealed(block_ids, num_tokens, plan.residual_ids[row])
            end -= num_tokens % self._size
        else:
            cells = self.read(block_ids, num_tokens)
        rules = self._rules.of(plan.mask_of[row] if plan.mask_of else 0)
        for group, (rule, table) in enumerate(zip(rules, tables, strict=True)):
            if group == self.whole_group:
                continue
            first = rule.first_seen(plan.starts[row])
            for position in (*range(min(rule.num_sinks, first, end)), *range(first, end)):
                block_id = table.at(position // self._size)
                assert block_id is not None, f"position {position} was given back, and is seen"
                cell = self._slab[block_id][position % self._size] - (group - self.whole_group)
                if cell != cells[position]:
                    cells[position] = cell
            if rule.packs:
                self._read_packed(plan, row, cells)
        return cells

    def _read_packed(self, plan: StepPlan, row: int, cells: list[int]) -> None:
        """Put what a row reads of packed chunks where it belongs among ``cells``."""
        for chunk in plan.chunks[row]:
            positions = chunk.counts
            assert isinstance(positions, tuple), "what the core keeps is what it was told"
            assert len(chunk.blocks) == -(-len(positions) // self._size)
            found = [cell for block in chunk.blocks for cell in self._slab[block.block_id]]
            for position, cell in zip(positions, found, strict=False):
                if cell - self._pack_offset != cells[position]:
                    cells[position] = cell - self._pack_offset

    def _pack(self, plan: StepPlan, at: int) -> list[Packed]:
        """Pack the chunks of one of a plan's packing rows."""
        row, granted = plan.packing_rows[at], plan.granted[at]
        rule = self._rules.packing
        assert rule is not None, "a row packs, and no group does"
        assert rule.window is not None, "chunks have a size"
        table, num_blocks = plan.tables[row][list(self._rules).index(rule)], rule.chunk_blocks(self._size)
        first, packed = len(plan.chunks[row]), []
        for number in range(len(granted) // num_blocks):
            begin = (first + number) * rule.window
            cells = []
            for position in range(begin, begin + rule.window):
                block_id = table.at(position // self._size)
                assert block_id is not None, f"position {position} was given back, and is to be packed"
                cells.append(self._slab[block_id][position % self._size])
            share = 1 + (cells[-1] - self._pack_offset) % 5  # all are kept of some chunks, of others none
            kept = [at for at, cell in enumerate(cells) if (cell - self._pack_offset) % 7 % 5 >= share - 1]
            own = granted[number * num_blocks : (number + 1) * num_blocks]
            for place, block in enumerate(own[: -(-len(kept) // self._size)]):
                of_block = [cells[at] for at in kept[place * self._size : (place + 1) * self._size]]
                self._slab[block.block_id][: len(of_block)] = of_block
            packed.append(Packed(-(-len(kept) // self._size), tuple(begin + at for at in kept)))
        return packed

    @property
    def _pack_offset(self) -> int:
        """How much more the cells of the group that packs are than those of the whole group."""
        rule = self._rules.packing
        assert rule is not None, "no group packs"
        return list(self._rules).index(rule) - self.whole_group

    def _put(self, table: BlockTable, position: int, cell: int) -> None:
        self._slab[table.block_ids[position // self._size - table.num_trimmed]][position % self._size] = cell

    def _cells(self, block_id: int) -> list[int]:
        """Return a block's cells; those of the arena lie behind the device's, for requests that stream."""
        num_blocks = len(self._slab)
        return self._slab[block_id] if block_id < num_blocks else self._arena[block_id - num_blocks].cells

    def _write(self, plan: StepPlan, row: int, start: int, token_ids: Sequence[int]) -> None:
        block_ids, size = plan.tables[row][self.whole_group].block_ids, self._size
        if not start:
            before = _root(self._namespace(block_ids))
        elif self._residuals and start % size:
            before = self._residuals[plan.residual_ids[row]][start % size - 1]
        else:
            before = self._cells(block_ids[(start - 1) // size])[(start - 1) % size]
        cells = []
        for token_id in token_ids:
            before = _next(before, token_id)
            cells.append(before)
        if self._residuals:
            self._seal(plan.residual_ids[row], plan.tables[row], start, cells)
            return
        for position, cell in enumerate(cells, start):
            for group, table in enumerate(plan.tables[row]):
                self._put(table, position, cell + group - self.whole_group)

    def _seal(self, residual_id: int, tables: Sequence[BlockTable], start: int, cells: list[int]) -> None:
        """Write cells from position ``start`` on: blocks that they fill, and of the last block also the residual."""
        residual, end = self._residuals[residual_id], start + len(cells)
        begin = start - start % self._size
        assert begin == start or end <= begin + self._size, "it begins inside a block and ends beyond it"
        cells = residual[: start - begin] + cells
        for position, cell in enumerate(cells[: end // self._size * self._size - begin], begin):
            for group, table in enumerate(tables):
                self._put(table, position, cell + group - self.whole_group)
        last = cells[(end - 1) // self._size * self._size - begin :]
        residual[: len(last)] = last

    def _own(self, start: int, end: int) -> slice:
        """Return which slots of its last block a row computes."""
        begin = (end - 1) // self._size * self._size
        return slice(max(start, begin) - begin, end - begin)

    def _namespace(self, block_ids: list[BlockId]) -> bytes:
        """Return the namespace of the request whose table of the whole group this is."""
        held = ((one.cache, one.namespace) for one in self._scheduler.running if one.cache is not None)
        return next(namespace for cache, namespace in held if cache.tables[self.whole_group].block_ids is block_ids)


class _Stored:
    """A block of the arena, and what was stored into it."""

    __slots__ = ("cells", "cells_then")

    def __init__(self, cells: list[int]) -> None:
        self.cells = list(cells)
        self.cells_then = tuple(cells)

    @property
    def is_damaged(self) -> bool:
        """Whether the block is no more what was stored."""
        return tuple(self.cells) != self.cells_then


def _root(namespace: bytes) -> int:
    return int.from_bytes(namespace, "little") + 1


def _next(before: int, token_id: int) -> int:
    return hash((before, token_id)) & _MASK


def _sampled(cells: Sequence[int], seed: int) -> int:
    return (hash((tuple(cells), seed)) & _MASK) % VOCAB_SIZE
