"""What crosses between scheduler and runner: a plan in columns, a result, and the protocol of a runner."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pagefold.kv import BlockId, CopyOp
    from pagefold.request import SamplingParams

__all__ = ["Runner", "StepPlan", "StepResult"]


@dataclass(slots=True)
class StepPlan:
    """One step of all sequences that take part, as columns. Row ``i`` is one sequence.

    Attributes:
        step_id: counts up from 0.
        token_ids: the tokens to compute, all rows one after another, int32.
        starts: position of each row's first token. The KV of [0, start) is in the blocks before the step's writes,
            or is written in this same step by an earlier row.
        num_tokens: how many tokens of ``token_ids`` are each row's.
        block_ids: each row's block table; position ``p`` lies in ``block_ids[i][p // block_size]``.
        copies: whole-block copies to make before the first write.
        sampling_rows: the rows that have all their tokens after this step, and so sample the next one.
        sampling: how, for each of ``sampling_rows``.
        seeds: of each of ``sampling_rows``' random draws.
        draws: how many tokens each of ``sampling_rows`` has sampled before: with the seed it fixes the draw.
    """

    step_id: int
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    starts: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    block_ids: list[list[BlockId]] = field(default_factory=list)
    copies: list[CopyOp] = field(default_factory=list)
    sampling_rows: list[int] = field(default_factory=list)
    sampling: list[SamplingParams] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """How many sequences take part."""
        return len(self.starts)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled.

    Attributes:
        token_ids: one for each of the plan's ``sampling_rows``, in that order.
    """

    token_ids: list[int]


class Runner(Protocol):
    """Carries out a plan."""

    def run(self, plan: StepPlan) -> StepResult:
        """Copy, compute, write KV, sample. If it raises, nothing of the step counts."""
