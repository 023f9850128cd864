"""SlabRunner: the slow twin of a model. Its slab is a list of cells, its arithmetic is a hash.

The cell of a position is a hash of its token and of the cell before it, read from the slab: so it stands for the
namespace and all tokens up to there, as the K and V of a real model do. A sampled token is a hash of all cells that its
row can see, read from the slab after every row has written. So a wrong share, a stale block or a missed copy shows
twice: as a cell that is not what :func:`cells_of` says, and as a token that is not what :func:`alone` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.steps import StepPlan, StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import BlockId
    from pagefold.request import Request
    from pagefold.scheduler import Scheduler

POISON = -1
GARBAGE = -2
VOCAB_SIZE = 3
_MASK = (1 << 61) - 1


def root_cell(namespace: bytes) -> int:
    """Return what the first cell of a namespace leans on."""
    return int.from_bytes(namespace, "little") + 1


def next_cell(before: int, token: int) -> int:
    """Return the cell of ``token`` after the history that ``before`` stands for."""
    return hash((before, token)) & _MASK


def sampled(cells: Sequence[int], seed: int, draw: int) -> int:
    """Return the token that follows ``cells``."""
    return (hash((tuple(cells), seed, draw)) & _MASK) % VOCAB_SIZE


def cells_of(namespace: bytes, tokens: Sequence[int]) -> list[int]:
    """Return the cells that ``tokens`` must have."""
    cells: list[int] = []
    cell = root_cell(namespace)
    for token in tokens:
        cell = next_cell(cell, token)
        cells.append(cell)
    return cells


def alone(request: Request) -> list[int]:
    """Return what ``request`` generates with no scheduler, no cache and nobody else: output tokens to its end."""
    tokens = list(request.token_ids[: request.num_prompt_tokens])
    cells = cells_of(request.namespace, tokens)
    while len(tokens) < request.stop.max_total_tokens:
        token = sampled(cells, request.seed, len(tokens) - request.num_prompt_tokens)
        tokens.append(token)
        if token in request.stop.token_ids:
            break
        cells.append(next_cell(cells[-1], token))
    return tokens[request.num_prompt_tokens :]


class SlabRunner:
    """Carries out plans on lists of ints.

    Args:
        scheduler: says which namespace a row has, which a plan does not: a real model has it in its weights.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._block_size = scheduler.core.block_size
        self.slab = [[POISON] * self._block_size for _ in range(scheduler.core.pool.num_blocks)]

    def run(self, plan: StepPlan) -> StepResult:
        """Copy, write row by row, then sample."""
        self.copy(plan)
        offset = 0
        for row, (start, num_tokens) in enumerate(zip(plan.starts, plan.num_tokens, strict=True)):
            self._write(plan.block_ids[row], start, plan.token_ids[offset : offset + num_tokens], row)
            offset += num_tokens
        tokens = []
        for row, seed, draw in zip(plan.sampling_rows, plan.seeds, plan.draws, strict=True):
            cells = self.read(plan.block_ids[row], plan.starts[row] + plan.num_tokens[row])
            tokens.append(sampled(cells, seed, draw))
        return StepResult(tokens)

    def copy(self, plan: StepPlan) -> None:
        """Make the copies; no block is read by one and written by another, so their order does not matter."""
        written = [copy.dst for copy in plan.copies]
        assert len(set(written)) == len(written), "two copies into one block"
        assert not {copy.src for copy in plan.copies} & set(written), "a copy leans on a copy"
        for copy in plan.copies:
            self.slab[copy.dst] = list(self.slab[copy.src])

    def spoil(self, plan: StepPlan, num_rows: int) -> None:
        """Leave what a step that died may leave: anything, wherever its first ``num_rows`` rows write."""
        for block_ids, start, num_tokens in list(zip(plan.block_ids, plan.starts, plan.num_tokens, strict=True))[
            :num_rows
        ]:
            for position in range(start, start + num_tokens):
                self.slab[block_ids[position // self._block_size]][position % self._block_size] = GARBAGE

    def poison(self, block_id: int, begin: int = 0) -> None:
        """Make cells [begin, block_size) of a block mean nothing."""
        self.slab[block_id][begin:] = [POISON] * (self._block_size - begin)

    def read(self, block_ids: list[BlockId], num_tokens: int) -> list[int]:
        """Return cells [0, num_tokens) of a table."""
        num_blocks = -(-num_tokens // self._block_size)
        return [cell for block_id in block_ids[:num_blocks] for cell in self.slab[block_id]][:num_tokens]

    def _write(self, block_ids: list[BlockId], start: int, tokens: Sequence[int], row: int) -> None:
        if start:
            before = self.slab[block_ids[(start - 1) // self._block_size]][(start - 1) % self._block_size]
        else:
            before = root_cell(self._scheduler.running[row].namespace)
        for position, token in enumerate(tokens, start):
            before = next_cell(before, token)
            self.slab[block_ids[position // self._block_size]][position % self._block_size] = before
