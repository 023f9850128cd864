"""What crosses between scheduler and runner: a plan in columns, a result, and protocols of who carries it out."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pagefold.kv.ops import NO_HOST_OPS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.kv import Block, BlockId, BlockTable, CopyOp, HostOps, Packed, PackedChunk, ResidualCopy
    from pagefold.sampling import SamplingParams

__all__ = [
    "AdaptedRow",
    "BlockMover",
    "DamagedBlocksError",
    "DraftedRow",
    "LaunchingRunner",
    "MovesInFlight",
    "PromptPart",
    "Runner",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
]


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


class DraftedRow(NamedTuple):
    """A row whose last tokens are drafts: guesses of what the row would sample, computed before that is known.

    It samples once behind its own last token, and once behind each draft. What it samples behind a draft counts as long
    as that draft, and all before it, are what it samples there.

    Attributes:
        row: the plan's row.
        place: the first of its ``sampling_rows``; it has one more of them than drafts, one behind the other.
        first: where its first draft is in ``token_ids``.
        num_drafts: how many it has, at least one.
    """

    row: int
    place: int
    first: int
    num_drafts: int


class AdaptedRow(NamedTuple):
    """A row whose tokens are computed with an adapter.

    Attributes:
        row: the plan's row.
        slot: where the runner has the adapter's weights, from 1 on.
    """

    row: int
    slot: int


@dataclass(slots=True)
class StepPlan:
    """One step of all sequences that take part, as columns. Row ``i`` is one sequence.

    Attributes:
        step_id: counts up from 0.
        token_ids: the tokens to compute, all rows one after another, int32.
        starts: position of each row's first token. The KV of [0, start) is in the blocks before the step's writes,
            or is written in this same step by an earlier row.
        num_tokens: how many tokens of ``token_ids`` are each row's.
        tables: each row's block tables, one for each cache group. They are the sequence's own, as of now.
        host_ops: what to move between the blocks and the host arena, before anything else.
        copies: whole-block copies to make then, before the first write.
        residual_ids: where each row has its unsealed block, where blocks are sealed; else none. Then a row that begins
            inside a block ends in it or at its end.
        residual_copies: copies of these to make before the first write too.
        chunks: each row's packed chunks before the step, where chunks are packed; else none. They are the sequence's
            own, as of now.
        mask_of: by which mask each row keeps its older tokens, where chunks are packed; :data:`NO_MASK` for none.
        packing_rows: the rows that pack their next chunks, behind their writes and before anybody attends; ascending.
        granted: for each of them the blocks that it packs into, so many for each chunk as that fills whole.
        sampling_rows: the rows that have all their tokens after this step, and so sample the next one; ascending. A row
            comes several times where several samples of one prompt begin: each place is a sample of its own; and where
            it has drafts.
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
        logprob_tops: how many of the most likely tokens each of ``logprob_rows`` tells beside it.
        prompt_parts: prompt tokens whose logprobs are asked for.
        drafted: the rows that have drafts; ascending.
        adapted: the rows that have adapters; ascending.
        late: which of ``token_ids`` mean nothing, since the step before samples those tokens; ascending. Only of a step
            that is planned while that one is in flight.
        late_from: which of that step's ``sampling_rows`` samples each of them.
    """

    step_id: int
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    starts: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    tables: list[Sequence[BlockTable]] = field(default_factory=list)
    host_ops: HostOps = NO_HOST_OPS
    copies: list[CopyOp] = field(default_factory=list)
    residual_ids: list[int] = field(default_factory=list)
    residual_copies: list[ResidualCopy] = field(default_factory=list)
    chunks: list[Sequence[PackedChunk]] = field(default_factory=list)
    mask_of: list[int] = field(default_factory=list)
    packing_rows: list[int] = field(default_factory=list)
    granted: list[Sequence[Block]] = field(default_factory=list)
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
    logprob_tops: list[int] = field(default_factory=list)
    prompt_parts: list[PromptPart] = field(default_factory=list)
    drafted: list[DraftedRow] = field(default_factory=list)
    adapted: list[AdaptedRow] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    late_from: list[int] = field(default_factory=list)

    @property
    def block_ids(self) -> list[list[BlockId]]:
        """Each row's blocks of the first cache group, which is the only one of most models."""
        return [tables[0].block_ids for tables in self.tables]

    def sampled_positions(self) -> list[int]:
        """Return the position of the token that each of ``sampling_rows`` samples."""
        positions = [self.starts[row] + self.num_tokens[row] for row in self.sampling_rows]
        for _, place, _, num_drafts in self.drafted:
            for at in range(num_drafts):
                positions[place + at] -= num_drafts - at
        return positions

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
        corrupted: rows with a logit that is NaN or infinite, before anything was done to it, or, whether they sample or
            not, with a token that is so inside the model, drafts included; what else is said of them means nothing.
        packed: what each of the plan's ``packing_rows`` packed, chunk by chunk.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    corrupted: list[int] = field(default_factory=list)
    packed: list[list[Packed]] = field(default_factory=list)


class DamagedBlocksError(Exception):
    """What a step was to load is not what was stored. Nobody's request is at fault.

    Args:
        host_ids: blocks of the host arena, all that the step found damaged.
    """

    def __init__(self, host_ids: frozenset[int]) -> None:
        super().__init__(f"{len(host_ids)} blocks of the host arena are damaged")
        self.host_ids = host_ids


class MovesInFlight(Protocol):
    """Moves of a step that are under way while it is queued and computed."""

    def hold(self, layer: int) -> None:
        """Let what is queued from now on wait for the blocks up to ``layer``, and for what the step may overwrite."""

    def hold_all(self) -> None:
        """Let what is queued from now on wait for all of it."""

    def verify(self) -> None:
        """Compare checksums.

        Raises:
            DamagedBlocksError: some of what was loaded or checked.
        """

    def learn(self) -> None:
        """The step has ended: take note of how long its loads took."""


class BlockMover(Protocol):
    """Moves a step's blocks between the device and the host arena."""

    def begin(
        self,
        ops: HostOps,
        blocks: Any,  # noqa: ANN401 - NumPy's on a CPU, torch's on a card
        layer_ends: Sequence[int] = (),
    ) -> MovesInFlight | None:
        """Begin a step's moves; return what is still on its way, if anything.

        Args:
            ops: what the core decided.
            blocks: uint8 ``[num_blocks, block_bytes]``: the device's blocks, which this reads and writes.
            layer_ends: where each layer ends in a block, in bytes; layers may come one after another.

        Raises:
            DamagedBlocksError: some of what was loaded or checked, where that is known already; else
                :meth:`MovesInFlight.verify` raises it.
        """


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
