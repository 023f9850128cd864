"""What crosses between scheduler and runner: a plan in columns, a result, and the protocol of a runner."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pagefold.kv.plans import NO_HOST_OPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.kv import BlockId, CopyOp, HostOps, ResidualCopy
    from pagefold.request import SamplingParams

__all__ = ["DamagedBlocksError", "LaunchingRunner", "PromptPart", "Runner", "StepPlan", "StepResult", "TokenLogprobs"]


class TokenLogprobs(NamedTuple):
    """How likely the model found a token and its alternatives, before anything was done to its logits.

    Attributes:
        logprob: natural logarithm of the token's probability.
        rank: 1 for the most likely token of all.
        top: the most likely tokens and their logprobs, likeliest first; as many as were asked for.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class PromptPart(NamedTuple):
    """Tokens of a prompt whose logprobs are asked for.

    Attributes:
        row: the plan's row that tells them.
        offset: which of the row's tokens tells the first of them; the others follow.
        token_ids: those tokens.
        num_top: how many of the most likely tokens to tell beside each.
    """

    row: int
    offset: int
    token_ids: array[int]
    num_top: int


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
        host_ops: what to move between the blocks and the host arena, before anything else.
        copies: whole-block copies to make then, before the first write.
        residual_ids: where each row has its unsealed block, where blocks are sealed; else none. Then a row that begins
            inside a block ends in it or at its end.
        residual_copies: copies of these to make before the first write too.
        sampling_rows: the rows that have all their tokens after this step, and so sample the next one; ascending. A row
            comes several times where several samples of one prompt begin: each place is a sample of its own.
        sampling: how, for each of ``sampling_rows``.
        seeds: of each of ``sampling_rows``' random draws.
        draws: how many tokens each of ``sampling_rows`` has sampled before: with the seed it fixes the draw.
        adjusted: which of ``sampling_rows`` have logits that change before they are sampled from; ascending.
        histories: prompt and output so far of each of ``adjusted``; the last ``draws`` of them are output. Empty where
            no penalty asks for it. Not a copy.
        banned: token ids that each of ``adjusted`` must not sample.
        masked: which of ``sampling_rows`` may sample only some tokens; ascending.
        masks: those, for each of ``masked``: bit ``t % 8`` of byte ``t // 8`` is token ``t``. What is beyond the end
            of a mask is not in it.
        logprob_rows: which of ``sampling_rows`` tell logprobs of what they sample; ascending.
        prompt_parts: prompt tokens whose logprobs are asked for.
        late: which of ``token_ids`` mean nothing, since the step before samples those tokens; ascending. Only of a step
            that is planned while that one is in flight.
        late_from: which of that step's ``sampling_rows`` samples each of them.
    """

    step_id: int
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    starts: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    block_ids: list[list[BlockId]] = field(default_factory=list)
    host_ops: HostOps = NO_HOST_OPS
    copies: list[CopyOp] = field(default_factory=list)
    residual_ids: list[int] = field(default_factory=list)
    residual_copies: list[ResidualCopy] = field(default_factory=list)
    sampling_rows: list[int] = field(default_factory=list)
    sampling: list[SamplingParams] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    adjusted: list[int] = field(default_factory=list)
    histories: list[array[int]] = field(default_factory=list)
    banned: list[frozenset[int]] = field(default_factory=list)
    masked: list[int] = field(default_factory=list)
    masks: list[bytes] = field(default_factory=list)
    logprob_rows: list[int] = field(default_factory=list)
    prompt_parts: list[PromptPart] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    late_from: list[int] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """How many sequences take part."""
        return len(self.starts)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled.

    Attributes:
        token_ids: one for each of the plan's ``sampling_rows``, in that order.
        logprobs: of the token of each of the plan's ``logprob_rows``.
        prompt_logprobs: of each token of each of the plan's ``prompt_parts``.
        corrupted: rows with a logit that is NaN or infinite, before anything was done to it; what else is said of them
            means nothing.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    corrupted: list[int] = field(default_factory=list)


class DamagedBlocksError(Exception):
    """What a step was to load is not what was stored. Nobody's request is at fault.

    Args:
        host_ids: blocks of the host arena, all that the step found damaged.
    """

    def __init__(self, host_ids: frozenset[int]) -> None:
        super().__init__(f"{len(host_ids)} blocks of the host arena are damaged")
        self.host_ids = host_ids


class Runner(Protocol):
    """Carries out a plan."""

    def run(self, plan: StepPlan) -> StepResult:
        """Move, copy, compute, write KV, sample. If it raises, nothing of the step counts.

        Raises:
            DamagedBlocksError: what was loaded is not what was stored; whatever was computed with it.
        """


class LaunchingRunner(Runner, Protocol):
    """A runner whose device computes while the host does something else."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step; return what waits for its result, and raises what :meth:`run` would, if this has not.

        The step before may still be in flight, and not the one before that; results are asked for in order. What is
        ``late`` in the plan is taken from what the step before samples, where its runner has it.
        """
