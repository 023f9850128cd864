"""Capacity: what a config, a model and a machine come to, in blocks and tokens. Decided before weights are loaded.

The server decides it here before it loads anything, and the planner for machines that nobody has bought yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pagefold.errors import BudgetTooSmallError, ConfigError, DoesNotFitError
from pagefold.kv import max_hot_blocks_of
from pagefold.memory.limit import Limit

if TYPE_CHECKING:
    from pagefold.kv import CacheLayout

__all__ = [
    "KV_SHARE_OF_FREE_MEMORY",
    "NO_SHARE",
    "Capacity",
    "DraftShare",
    "check_room",
    "human_bytes",
    "plan_capacity",
]

KV_SHARE_OF_FREE_MEMORY = 0.5
"""Default KV budget on a CPU: this share of the memory that is free once the weights are in. The rest stays for
activations, compiled kernels, the server, and the machine's other processes, which share this memory with us, unlike a
GPU's. Slabs are touched block by block, so what is never used is never taken."""

_MIN_STREAMING_BLOCKS = 2
"""A sequence that streams has one block that it fills and one more."""

_MIN_DEFAULT_TOKENS = 2**18
"""The default budget stops where more could not be used: at ``max_num_seqs`` requests of full length, or at so many
tokens if that is more (for prefixes to stay cached)."""

_LEAST_LEN = 2
"""A sequence has a token of a prompt and one that follows it."""

_NOTHING = Limit(0)
"""Of what ends ``max_model_len``: no setting does."""


@dataclass(frozen=True, slots=True)
class DraftShare:
    """How much of a KV budget the draft model has beside the model: its share, in whole blocks.

    Attributes:
        layout: of the draft model's KV; None without one, whose share is nothing.
        asked_bytes: what was asked; None for as many tokens as the model has.
    """

    layout: CacheLayout | None = None
    asked_bytes: int | None = None

    def of(self, budget: int, layout: CacheLayout) -> int:
        """Return the share's bytes, given the whole budget and the layout of the model's KV; at least one block."""
        if self.layout is None:
            return 0
        wanted = self.asked_bytes
        if wanted is None:
            own, others = self.layout.bytes_per_token, layout.bytes_per_token
            wanted = budget * own // (own + others)
        return max(1, self.layout.num_blocks(wanted)) * self.layout.bytes_per_block

    def around(self, num_bytes: int, layout: CacheLayout) -> int:
        """Return the smallest budget that leaves so many bytes to the model."""
        if self.layout is None or self.asked_bytes is not None:
            return num_bytes + self.of(0, layout)
        own, others, block_bytes = self.layout.bytes_per_token, layout.bytes_per_token, self.layout.bytes_per_block
        # The fewest blocks k for which the share of a budget of num_bytes + k * block_bytes is below k + 1 blocks.
        num_blocks = (num_bytes * own - (own + others) * block_bytes) // (others * block_bytes) + 1
        return num_bytes + max(1, num_blocks) * block_bytes

    def check(self, length: int, num_new: int | None) -> None:
        """See that the share that was asked for holds a request of so many tokens, written so many at a time.

        Raises:
            BudgetTooSmallError: it does not; names the smallest that works.
        """
        if self.layout is None or self.asked_bytes is None:
            return
        num_blocks, num_needed = self.layout.num_blocks(self.asked_bytes), self.layout.num_blocks_for(length, num_new)
        if num_blocks < num_needed:
            msg = (
                f"speculative_config.kv_cache_memory_bytes is {self.asked_bytes:,}, which is {num_blocks} blocks of "
                f"the draft model; one request of max_model_len = {length} tokens needs {num_needed}."
            )
            smallest = num_needed * self.layout.bytes_per_block
            remedy = f"The smallest that works is {smallest}; or leave it out for as many tokens as the model has."
            raise BudgetTooSmallError(msg, missing_bytes=smallest - self.asked_bytes, remedy=remedy)


NO_SHARE = DraftShare()
"""Without a draft model."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits into the memory that KV has.

    Attributes:
        weight_bytes: bytes of the weights in the chosen dtype.
        kv_budget_bytes: bytes of the blocks, and of the residuals beside them.
        num_blocks: blocks, all of equal size.
        block_size: tokens a block.
        max_model_len: the longest sequence that is served, in tokens.
        num_blocks_per_request: blocks of a sequence of ``max_model_len``.
        num_host_blocks: blocks that the host keeps of those that were evicted.
        host_bytes: bytes of the host's blocks.
        num_groups: cache groups, each of which has blocks of its own of a sequence.
        num_residuals: running sequences that have room for an unsealed block in 16 bit; 0 where blocks are not sealed.
        residual_bytes: bytes of all that room.
        limited_by: what ends ``max_model_len``, where a setting does; else it says nothing.
        draft_bytes: bytes of a draft model's blocks, which the budget has beside these; 0 without one.
    """

    weight_bytes: int
    kv_budget_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    num_blocks_per_request: int
    num_host_blocks: int = 0
    host_bytes: int = 0
    num_groups: int = 1
    num_residuals: int = 0
    residual_bytes: int = 0
    limited_by: Limit = _NOTHING
    draft_bytes: int = 0

    @property
    def context(self) -> Limit:
        """``max_model_len``, with what ends it there, where a setting does."""
        return self.limited_by._replace(length=self.max_model_len)

    @property
    def block_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.kv_budget_bytes - self.residual_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that all blocks hold, in every layer."""
        return self.num_blocks // self.num_groups * self.block_size

    @property
    def max_concurrency(self) -> float:
        """How many requests of ``max_model_len`` tokens fit at once, rounded to blocks."""
        return self.num_blocks / self.num_blocks_per_request

    def lines(self) -> list[str]:
        """Return the lines that a start prints."""
        blocks = f"{self.num_blocks:,} blocks of {self.block_size} tokens"
        size = human_bytes(self.kv_budget_bytes)
        if self.num_residuals:
            size += f" - {human_bytes(self.residual_bytes)} for unsealed blocks of {self.num_residuals:,} requests"
        lines = [
            f"weights    {human_bytes(self.weight_bytes)}",
            f"KV budget  {size} = {blocks} = {self.num_tokens:,} tokens",
            f"fits       {self.max_concurrency:,.1f} requests of max_model_len = {self.max_model_len:,} tokens at once",
        ]
        if self.num_host_blocks:
            num_tokens = self.num_host_blocks // self.num_groups * self.block_size
            lines.append(f"host       {human_bytes(self.host_bytes)} for {num_tokens:,} tokens that were evicted")
        return lines


def plan_capacity(  # noqa: PLR0913 - the facts that it weighs, by name
    *,
    layout: CacheLayout,
    weight_bytes: int,
    limit: Limit,
    max_model_len: int | Literal["auto"] | None,
    kv_cache_memory_bytes: int | None,
    max_num_seqs: int,
    available_bytes: int,
    host_bytes: int = 0,
    allow_streaming: bool = False,
    max_num_batched_tokens: int | None = None,
    is_ours: bool = False,
    draft: DraftShare = NO_SHARE,
) -> Capacity:
    """Decide budget, blocks and ``max_model_len``.

    Args:
        layout: of the model's KV.
        weight_bytes: bytes of the weights as they will be loaded.
        limit: the longest sequence that is computed rightly: all that the model was made for, or less.
        max_model_len: what was asked: a number, ``auto``, or None for all of ``limit``.
        kv_cache_memory_bytes: the budget asked for, or None for the default share.
        max_num_seqs: sequences at once; bounds the default budget, and each has a residual where blocks are sealed.
        available_bytes: memory that is free before the weights are loaded.
        host_bytes: what to set aside for blocks that are evicted, of the same memory.
        allow_streaming: whether a sequence may be larger than the budget, and lie in those blocks for the rest.
        max_num_batched_tokens: what a step of ours writes, beside what windows keep; None for another engine.
        is_ours: whether all of it is for weights and blocks, as on a GPU whose share for the rest is already taken off;
            the default budget is then all that the weights leave.
        draft: the share of a draft model, whose weights are no more part of ``available_bytes``.

    Raises:
        ConfigError: ``max_model_len`` is beyond ``limit``, or that holds no request.
        DoesNotFitError: the weights alone, or with the budget, do not fit.
        BudgetTooSmallError: the budget holds less than one request of ``max_model_len``; names the smallest that works.
    """
    _check_length(limit, max_model_len)
    left = available_bytes - weight_bytes
    if left <= 0:
        msg = f"The weights need {human_bytes(weight_bytes)}, and {human_bytes(available_bytes)} of memory are free."
        needed = layout.num_blocks_for(2) * layout.bytes_per_block
        if isinstance(max_model_len, int):
            needed = layout.num_blocks_for(max_model_len) * layout.bytes_per_block
        remedy = "Use a smaller model or a machine with more memory."
        raise DoesNotFitError(msg, missing_bytes=needed - left, remedy=remedy)
    num_host_blocks = host_bytes // layout.bytes_per_block
    if host_bytes:
        left = _beside_host(host_bytes, num_host_blocks, layout, left)
    residual_bytes = max_num_seqs * layout.residual_bytes
    budget = kv_cache_memory_bytes
    wanted_len = limit.length if max_model_len is None or max_model_len == "auto" else max_model_len
    if budget is None:
        enough = max(
            max_num_seqs * layout.num_blocks_for(wanted_len, max_num_batched_tokens),
            sum(_MIN_DEFAULT_TOKENS // group.block_size for group in layout.groups),
        )
        most = draft.around(enough * layout.bytes_per_block + residual_bytes, layout)
        budget = left if is_ours else min(int(left * KV_SHARE_OF_FREE_MEMORY), most)
    elif budget > left:
        msg = (
            f"kv_cache_memory_bytes is {budget:,}, but beside the weights ({human_bytes(weight_bytes)}) only "
            f"{human_bytes(left)} ({left:,} bytes) of memory are free."
        )
        remedy = "Give a smaller budget, or leave it out to take a share of what is free."
        raise DoesNotFitError(msg, missing_bytes=budget - left, remedy=remedy)
    draft_bytes = draft.of(budget, layout)
    num_blocks = layout.num_blocks(budget - draft_bytes - residual_bytes)
    num_usable = _num_streamed(num_blocks, num_host_blocks) if allow_streaming else num_blocks
    longest = layout.longest_in(num_usable, limit.length, max_num_batched_tokens)
    if max_model_len == "auto":
        wanted_len = longest
    num_blocks_needed = layout.num_blocks_for(max(wanted_len, 2), max_num_batched_tokens)
    draft.check(max(wanted_len, 2), max_num_batched_tokens)
    if num_usable < num_blocks_needed:
        msg = (
            f"The KV budget of {budget:,} bytes is {num_blocks} blocks of {layout.bytes_per_block:,} bytes"
            f"{_beside_others(residual_bytes, max_num_seqs, draft_bytes)}; one request of max_model_len = "
            f"{max(wanted_len, 2)} tokens needs {num_blocks_needed}."
        )
        smallest = num_blocks_needed * layout.bytes_per_block + residual_bytes
        smallest = draft.around(smallest, layout)
        remedy = _remedy(smallest, left, longest)
        if draft.asked_bytes is not None:
            remedy += " A smaller speculative_config.kv_cache_memory_bytes leaves more of it."
        raise BudgetTooSmallError(msg, missing_bytes=smallest - budget, remedy=remedy)
    return Capacity(
        weight_bytes=weight_bytes,
        kv_budget_bytes=num_blocks * layout.bytes_per_block + residual_bytes,
        num_blocks=num_blocks,
        block_size=layout.block_size,
        max_model_len=wanted_len,
        num_blocks_per_request=num_blocks_needed,
        num_host_blocks=num_host_blocks,
        host_bytes=num_host_blocks * layout.bytes_per_block,
        num_groups=len(layout.groups),
        num_residuals=max_num_seqs if residual_bytes else 0,
        residual_bytes=residual_bytes,
        limited_by=limit if limit.setting and wanted_len == limit.length else _NOTHING,
        draft_bytes=draft_bytes,
    )


def check_room(draft_weight_bytes: int, available_bytes: int) -> None:
    """See that a draft model's weights fit into the memory that is free.

    Raises:
        DoesNotFitError: they do not.
    """
    if draft_weight_bytes >= available_bytes:
        free = max(0, available_bytes)
        msg = f"The draft model's weights need {human_bytes(draft_weight_bytes)}, and {human_bytes(free)} are free."
        missing = draft_weight_bytes + 1 - available_bytes
        raise DoesNotFitError(msg, missing_bytes=missing, remedy="Use a smaller draft model, or none.")


def _num_streamed(num_blocks: int, num_host_blocks: int) -> int:
    """Return how many blocks a sequence may have that takes its share of the device and all of the host's."""
    if num_blocks < _MIN_STREAMING_BLOCKS:
        return num_blocks
    return max(num_blocks, num_host_blocks + max_hot_blocks_of(num_blocks))


def _beside_host(host_bytes: int, num_host_blocks: int, layout: CacheLayout, left: int) -> int:
    """Return what is left beside the host's blocks; refuse a size that holds none, or leaves nothing."""
    if not num_host_blocks:
        msg = f"kv_offloading_size is {human_bytes(host_bytes)}, and one block takes {layout.bytes_per_block:,} bytes."
        raise ConfigError(msg, remedy="Give more, or 0 for none.")
    if host_bytes >= left:
        msg = (
            f"kv_offloading_size is {human_bytes(host_bytes)}, but beside the weights only {human_bytes(max(left, 0))} "
            "of memory are free."
        )
        missing = host_bytes + layout.num_blocks_for(2) * layout.bytes_per_block - left
        raise DoesNotFitError(msg, missing_bytes=missing, remedy="Give less: blocks that are in use need memory too.")
    return left - host_bytes


def _beside_others(residual_bytes: int, max_num_seqs: int, draft_bytes: int) -> str:
    """Say what unsealed blocks and a draft model take, if they take anything."""
    others = []
    if residual_bytes:
        others.append(f"{human_bytes(residual_bytes)} for unsealed blocks of max_num_seqs = {max_num_seqs} requests")
    if draft_bytes:
        others.append(f"{human_bytes(draft_bytes)} for the draft model")
    return f" beside {' and '.join(others)}" if others else ""


def _check_length(limit: Limit, max_model_len: int | Literal["auto"] | None) -> None:
    if limit.length < _LEAST_LEN:
        msg = f"No request fits: beyond {limit.length} token {limit.why}."
        raise ConfigError(msg, remedy=limit.or_without("Use another model"))
    if isinstance(max_model_len, int) and max_model_len > limit.length:
        why = f"the model was made for {limit.length} positions"
        if limit.why:
            why = f"beyond {limit.length} tokens {limit.why}"
        msg = f"max_model_len is {max_model_len}, but {why}."
        raise ConfigError(msg, remedy=limit.or_without(f"Give at most {limit.length}"))


def _remedy(smallest_bytes: int, left_bytes: int, longest: int) -> str:
    """Say which budget or which length would work; never a budget that is refused in its turn."""
    if smallest_bytes <= left_bytes:
        remedy = f"The smallest budget that works is kv_cache_memory_bytes={smallest_bytes}"
    else:
        remedy = f"No budget works: it takes {smallest_bytes:,} bytes, and beside the weights {left_bytes:,} are free"
    if longest > 1:
        remedy += f"; or give a smaller max_model_len (at most {longest} fits, which is what auto takes)"
    elif smallest_bytes > left_bytes:
        remedy += "; use a smaller model or a machine with more memory"
    return remedy + "."


def human_bytes(num_bytes: int) -> str:
    """Return a size for people, in powers of 1024."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"
