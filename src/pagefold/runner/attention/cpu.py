"""Attention over blocks on a CPU, as one op for transformers' models: float32, or bfloat16 in pairs, any family.

What a step's attention has to do is dealt once for each cache group (``dealing.py``) and done in every layer
(``kernel.py``) by a team of threads. A family that the fused decoder knows uses the same kernel without coming through
here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np
import torch
from numba import prange

from pagefold.kernels.compiled import part, specialised
from pagefold.kernels.kept import kernel
from pagefold.kernels.rows import LOG2E
from pagefold.kernels.team import SYNC_WIDTH, claim, finish, wait
from pagefold.runner.attention.dealing import WorkDealer
from pagefold.runner.attention.kept_work import tell_counts
from pagefold.runner.attention.kernel import NO_SINKS, Scoring, attend, merge, pack, seal, write
from pagefold.runner.attention.kernel_slab import KEY_FORMAT, VALUE_FORMAT, kernel_slab
from pagefold.runner.attention.scratch import Scratch, make_scratch
from pagefold.runner.attention.tiles import FLOAT16, INT2, attention_tiles
from pagefold.runner.attention.work import AttentionWork, work_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pagefold.runner.attention.inputs import AttentionInputs
    from pagefold.runner.attention.kernel_slab import KernelSlab
    from pagefold.runner.slab import AnySlab

__all__ = ["AttentionRoom", "CpuAttention", "scoring_of"]

_TOKENS_A_WRITE = 16
_WRITE, _SEAL, _ATTEND, _MERGE, _NUM_PHASES = range(5)


def scoring_of(scale: float, softcap: float, sinks: torch.Tensor | None = None) -> Scoring:
    """Return how the kernel makes scores: they are exponents of 2, not of e."""
    of_heads = NO_SINKS if sinks is None else sinks.detach().float().numpy() * np.float32(LOG2E)
    if softcap:
        return Scoring(np.float32(scale / softcap), np.float32(softcap * LOG2E), of_heads)
    return Scoring(np.float32(scale * LOG2E), np.float32(0.0), of_heads)


class _Operands(NamedTuple):
    """A layer's tensors, in float32: ``query`` and ``out`` are ``[T, H, D]``, ``key`` and ``value`` ``[T, Hkv, D]``.

    ``turned`` is as ``query``, or of no tokens where no sink tokens are kept.
    """

    query: NDArray[np.float32]
    turned: NDArray[np.float32]
    key: NDArray[np.float32]
    value: NDArray[np.float32]
    out: NDArray[np.float32]


class AttentionRoom:
    """The dealer and the room to work in, for one slab and one model's heads: what is kept between steps.

    Args:
        slab: the blocks.
        num_heads, num_kv_heads: of the model.
        num_members: of the team.
        chunk_size: of chunks that are packed; 0 where none are.
    """

    def __init__(self, slab: AnySlab, num_heads: int, num_kv_heads: int, num_members: int, chunk_size: int = 0) -> None:
        head_dim = slab.head_dim
        self.slab = kernel_slab(slab, num_kv_heads)
        formats = set(map(int, np.unique(self.slab.cells[:, [KEY_FORMAT, VALUE_FORMAT]])))
        if INT2 in formats:  # unsealed blocks are in 16 bit
            formats.add(FLOAT16)
        self.tiles = attention_tiles(slab.block_size, head_dim, formats)
        self.group = num_heads // num_kv_heads
        self.dealer = WorkDealer(len(slab.data), slab.block_size, self.group, seals=slab.seals, chunk_size=chunk_size)
        num_rows = self.dealer.tokens_per_item * self.group
        self.scratch = make_scratch(num_members, num_rows, self.dealer.split_size, head_dim, self.tiles.lanes)
        self._partials = np.zeros((0, num_heads, head_dim + 2), np.float32)

    def slab_for(self, work: AttentionWork) -> KernelSlab:
        """Return the blocks, with room for what a step has of unsealed ones in 16 bit, at least."""
        opened = self.slab.opened
        if len(opened) < work.num_opened:
            grown = np.zeros((work.num_opened + work.num_opened // 2, *opened.shape[1:]), np.uint16)
            self.slab = self.slab._replace(opened=grown)
        return self.slab

    def partials(self, num_slots: int) -> NDArray[np.float32]:
        """Return room for so many partial results, at least."""
        if len(self._partials) < num_slots:
            self._partials = np.zeros((num_slots + num_slots // 2, *self._partials.shape[1:]), np.float32)
        return self._partials


class CpuAttention:
    """See :class:`~pagefold.runner.attention.inputs.AttentionBackend`. float32, and bfloat16 whose blocks are in pairs.

    It keeps the work of the last step that it saw, and room to do it in: one step at a time.

    Args:
        num_threads: how many work together.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = min(num_threads, numba.config.NUMBA_NUM_THREADS)
        self._room: AttentionRoom | None = None
        self._slab: AnySlab | None = None
        self._inputs: AttentionInputs | None = None
        self._work: AttentionWork | None = None
        self._sync = np.zeros((_NUM_PHASES, SYNC_WIDTH), np.int64)
        self._kernel: Callable[..., None] | None = None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slab: AnySlab,
        inputs: AttentionInputs,
        layer: int,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        turned: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :class:`~pagefold.runner.attention.inputs.AttentionBackend`."""
        chunk_size = 0 if inputs.packed is None else inputs.packed.chunk_size
        room = self._room_for(slab, query.shape[1], key.shape[1], chunk_size)
        if self._inputs is not inputs or self._work is None:
            self._inputs, self._work = inputs, room.dealer.deal(inputs)
        work = self._work
        out = torch.empty(query.shape)
        turned = query[:0] if turned is None else turned
        self._sync[:] = 0
        numba.set_num_threads(self._num_threads)  # of the calling thread
        arguments = (
            room.tiles,
            self._num_threads,
            self._sync,
            work,
            _Operands(*(tensor.float().contiguous().numpy() for tensor in (query, turned, key, value, out))),
            room.slab_for(work),
            layer,
            scoring_of(scale, softcap, sinks),
            room.scratch,
            room.partials(work.num_slots),
        )
        if self._kernel is None:
            self._kernel = specialised(_run, arguments)
        self._kernel(*arguments)
        tell_counts(work.packs, work.kept_counts, inputs.packed)
        return out.to(query.dtype)

    def _room_for(self, slab: AnySlab, num_heads: int, num_kv_heads: int, chunk_size: int) -> AttentionRoom:
        if self._room is None or self._slab is not slab or self._room.group != num_heads // num_kv_heads:
            self._room = AttentionRoom(slab, num_heads, num_kv_heads, self._num_threads, chunk_size)
            self._slab, self._inputs, self._kernel = slab, None, None
        return self._room


@part()
def member_scratch(scratch, member):
    """Return one member's part of a team's scratch."""
    return Scratch(
        query=scratch.query[member],
        acc=scratch.acc[member],
        state=scratch.state[member],
        scores=scratch.scores[member],
        tops=scratch.tops[member],
        totals=scratch.totals[member],
        state_tops=scratch.state_tops[member],
        state_totals=scratch.state_totals[member],
        sums=scratch.sums[member],
        first_weights=scratch.first_weights[member],
        shifts=scratch.shifts[member],
        first_shifts=scratch.first_shifts[member],
        scales=scratch.scales[member],
        zeros=scratch.zeros[member],
        scaled=scratch.scaled[member],
        constants=scratch.constants[member],
        own=scratch.own[member],
        vector=scratch.vector[member],
        spare=scratch.spare[member],
        limits=scratch.limits[member],
        ends=scratch.ends[member],
        hidden=scratch.hidden[member],
        begins=scratch.begins[member],
        blocks=scratch.blocks[member],
        ahead=scratch.ahead[member],
    )


@part()
def _member(tiles, member, num_members, sync, step_work, operands, slab, layer, scoring, scratch, partials):
    query, turned, key, value, out = operands
    num_tokens, num_kv_heads = key.shape[0], key.shape[1]
    num_chunks = (num_tokens + _TOKENS_A_WRITE - 1) // _TOKENS_A_WRITE
    work, own = work_of(step_work, layer), member_scratch(scratch, member)
    while True:
        chunk = claim(sync, _WRITE)
        if chunk >= num_chunks:
            break
        for t in range(chunk * _TOKENS_A_WRITE, min((chunk + 1) * _TOKENS_A_WRITE, num_tokens)):
            for h in range(num_kv_heads):
                write(slab, work, layer, t, h, key[t, h], value[t, h], own)
        finish(sync, _WRITE)
    wait(sync, _WRITE, num_chunks)
    if len(work.seals):
        seal(sync, _SEAL, work, slab, layer, own)
    pack(sync, _SEAL, work, slab, layer)
    attend(tiles, sync, _ATTEND, num_members, work, query, turned, slab, layer, scoring, own, partials, out)
    if step_work.num_slots:
        merge(sync, _MERGE, work, slab, layer, scoring.sinks, own, partials, out)


@kernel(parallel=True, error_model="numpy")
def _run(tiles, num_members, sync, work, operands, slab, layer, scoring, scratch, partials):
    for index in prange(num_members):
        member = np.int64(index)  # else all is typed twice: the index of such a loop has a sign here, and none there
        _member(tiles, member, num_members, sync, work, operands, slab, layer, scoring, scratch, partials)
