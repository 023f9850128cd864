"""ShadowRunner: a model whose KV is a number. What it samples tells whether it read what it should have.

The cell of a position depends on its token and on the cell before it, as it lies in the slab: so it stands for the
namespace and all tokens up to there, as the K and V of a real model do. A sampled token depends on all cells that its
row reads after every row has written. So a wrong share, a stale block or a copy that was not made ends in a wrong
token, and :func:`expected_token` says which is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.steps import StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import BlockId
    from pagefold.scheduler import Scheduler
    from pagefold.steps import StepPlan

__all__ = ["ShadowRunner", "expected_token"]

_MASK = (1 << 61) - 1
_GARBAGE = -2
_VOCAB_SIZE = 3
"""Few tokens, so that outputs agree by accident, and part again."""


def expected_token(namespace: bytes, token_ids: Sequence[int], seed: int) -> int:
    """Return the token that follows ``token_ids``, by nothing but their values."""
    cell = _root(namespace)
    total = seed
    for token_id in token_ids:
        cell = _next(cell, token_id)
        total = _mix(total, cell)
    return total % _VOCAB_SIZE


class ShadowRunner:
    """Carries out plans on a slab of numbers.

    Args:
        scheduler: knows which namespace a row has, which a plan does not: a real model has it in its weights.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._size = scheduler.core.block_size
        self._slab = [[_GARBAGE] * self._size for _ in range(scheduler.core.pool.num_blocks)]

    def run(self, plan: StepPlan) -> StepResult:
        """Copy, write row by row, then sample."""
        self._copy(plan)
        at = 0
        for row, (start, num_tokens) in enumerate(zip(plan.starts, plan.num_tokens, strict=True)):
            self._write(plan.block_ids[row], start, plan.token_ids[at : at + num_tokens], row)
            at += num_tokens
        sampled = []
        for row, seed in zip(plan.sampling_rows, plan.seeds, strict=True):
            total = seed
            for position in range(plan.starts[row] + plan.num_tokens[row]):
                total = _mix(total, self._cell(plan.block_ids[row], position))
            sampled.append(total % _VOCAB_SIZE)
        return StepResult(sampled)

    def die(self, plan: StepPlan, num_rows: int) -> None:
        """Leave what a step that died may leave: garbage wherever its first ``num_rows`` rows write, and in copies."""
        if num_rows:
            for copy in plan.copies:
                self._slab[copy.dst] = [_GARBAGE] * self._size
        rows = list(zip(plan.block_ids, plan.starts, plan.num_tokens, strict=True))
        for block_ids, start, num_tokens in rows[:num_rows]:
            for position in range(start, start + num_tokens):
                self._slab[block_ids[position // self._size]][position % self._size] = _GARBAGE

    def _copy(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            self._slab[copy.dst] = list(self._slab[copy.src])

    def _write(self, block_ids: list[BlockId], start: int, token_ids: Sequence[int], row: int) -> None:
        before = self._cell(block_ids, start - 1) if start else _root(self._scheduler.running[row].namespace)
        for position, token_id in enumerate(token_ids, start):
            before = _next(before, token_id)
            self._slab[block_ids[position // self._size]][position % self._size] = before

    def _cell(self, block_ids: list[BlockId], position: int) -> int:
        return self._slab[block_ids[position // self._size]][position % self._size]


def _root(namespace: bytes) -> int:
    return int.from_bytes(namespace, "little") + 1


def _next(cell: int, token_id: int) -> int:
    return (cell * 0x9E3779B97F4A7C15 + token_id * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK


def _mix(total: int, cell: int) -> int:
    mixed = ((total ^ cell) * 0xD6E8FEB86659FD93) & _MASK
    return mixed ^ (mixed >> 29)
