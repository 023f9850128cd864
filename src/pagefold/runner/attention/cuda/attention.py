"""CudaAttention: attention over blocks on an NVIDIA card, by Triton kernels, launched without waiting for it.

A step's sequences with one token decode, the others prefill; both may be in one step. All K and V are written first,
or encoded, and the blocks that are full sealed; where K is stored in a basis or rotated, queries are brought there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pagefold.kv import KEEP_ALL
from pagefold.runner.attention.cuda.arguments import Group, LayerArguments, of_sinks, scoring, vectors
from pagefold.runner.attention.cuda.blocks import CardBlocks
from pagefold.runner.attention.cuda.columns import plan_columns
from pagefold.runner.attention.cuda.configs import (
    KernelConfig,
    Reads,
    choose_config,
    num_splits_for,
    padded,
    sealing_warps,
)
from pagefold.runner.attention.cuda.encode import bring_queries, write_codes
from pagefold.runner.attention.cuda.groups import Shape
from pagefold.runner.attention.cuda.kernels import decode, merge_splits, prefill, write_kv
from pagefold.runner.attention.cuda.seal import write_sealed
from pagefold.runner.attention.cuda.tile import INTERPRETED
from pagefold.runner.attention.device_columns import DeviceColumns
from pagefold.runner.to_device import pack

if TYPE_CHECKING:
    from pagefold.kv import KeepRule
    from pagefold.runner.attention.inputs import AttentionInputs
    from pagefold.runner.slab import AnySlab

__all__ = ["CudaAttention", "HeadShape"]

_MIN_SPLIT_ENTRIES = 256
_ENCODED_ROWS = 16
"""Tokens that one program encodes, or whose queries it brings."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What kernels are chosen and compiled for.

    Attributes:
        dtype: of queries, and of blocks without a codec.
        num_heads, num_kv_heads, head_dim: of the model.
        capability: the card's compute capability.
        num_processors: its multiprocessors.
        reads: what blocks hold.
    """

    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    capability: tuple[int, int] = (9, 0)
    num_processors: int = 132
    reads: Reads = Reads.NUMBERS

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.num_heads // self.num_kv_heads

    def config(self, kernel: str) -> KernelConfig:
        """Return how ``decode`` or ``prefill`` works on it."""
        return choose_config(kernel, self.dtype, self.head_dim, self.group, self.capability, self.reads)

    def constants(self, block_size: int) -> Shape:
        """Return the sizes that kernels are compiled for."""
        return Shape(self.num_kv_heads, self.group, self.head_dim, max(16, padded(self.head_dim)), block_size)

    @property
    def tokens_a_tile(self) -> int:
        """Tokens whose queries one program of prefilling takes."""
        return self.config("prefill").rows // self.group


class CudaAttention:
    """See :class:`~pagefold.runner.attention.inputs.AttentionBackend`.

    It keeps room for the partial results of decoding, what it knows of the last slab, and the columns of the last step
    that came without them on the card. One step at a time.

    Args:
        shape: of the heads, and the card.
        num_splits: into how many splits decoding is cut at most; None for what fills the card.
    """

    def __init__(self, shape: HeadShape, *, num_splits: int | None = None) -> None:
        self.shape = shape
        self._num_splits = num_splits
        self._decode = shape.config("decode")
        self._prefill = shape.config("prefill")
        self._inputs: AttentionInputs | None = None
        self._columns: DeviceColumns | None = None
        self._slab: AnySlab | None = None
        self._blocks: CardBlocks | None = None
        self._partials = torch.empty(0)

    def columns(self, inputs: AttentionInputs, block_size: int, device: torch.device) -> DeviceColumns:
        """Return what the kernels read of ``inputs``: what is on the card already, or a copy."""
        if inputs.on_device is not None:
            return inputs.on_device
        if self._columns is None or self._inputs is not inputs:
            host = plan_columns(inputs, self.shape.tokens_a_tile, block_size)
            self._inputs, self._columns = inputs, DeviceColumns.of(pack(host, device))
        return self._columns

    def __call__(  # noqa: PLR0913, PLR0917 - the operands of the op
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
        assert turned is None, "sink tokens are not computed on cards"
        assert query.stride(2) == key.stride(2) == value.stride(2) == 1, "a head's numbers lie side by side"
        columns, blocks = self.columns(inputs, slab.block_size, query.device), self.blocks(slab)
        given = LayerArguments.of(blocks, inputs, columns, layer, self.shape.constants(slab.block_size))
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        recent = _write(key, value, given)
        if given.form.ROTATION:
            query = _brought(query, given)
        asked = vectors("query", query) | {"out": out} | scoring(scale, softcap)
        asked |= of_sinks(sinks, query) | given.window
        if len(columns.rows):
            self._run_decode(asked, given)
        if len(columns.tiles):
            how = self._prefill
            prefill[(len(columns.tiles), self.shape.num_kv_heads)](
                **asked,
                **given.slab,
                **given.cells,
                **given.residuals,
                recent=recent,
                tiles=columns.tiles,
                **given.entries,
                **given.constants,
                ROWS=how.rows,
                TILE=how.tile,
                num_warps=how.num_warps,
                num_stages=how.num_stages,
            )
        return out

    def blocks(self, slab: AnySlab) -> CardBlocks:
        """Return what the kernels are given of ``slab``, which is kept for the next layer."""
        if self._blocks is None or self._slab is not slab:
            self._slab, self._blocks = slab, CardBlocks.of(slab)
        return self._blocks

    def reserve(self, max_rows: int, device: torch.device) -> None:
        """Make room for steps of up to so many decoding sequences now, so that none is made, and none moved, in them.

        Not the most sequences need the most: fewer of them are cut into more splits.
        """
        num_rows = max(range(1, max_rows + 1), key=lambda num: num * self.num_splits(num))
        self._room(num_rows, self.num_splits(num_rows), device)

    def num_splits(self, num_rows: int, keeps: KeepRule = KEEP_ALL) -> int:
        """Return into how many splits a step with so many decoding sequences is cut: no more than a window has."""
        wanted = self._num_splits
        if wanted is None:
            wanted = num_splits_for(num_rows, self.shape.num_kv_heads, self.shape.num_processors)
        if keeps.window is None:
            return wanted
        tile = self._decode.tile
        most_tiles = -(-(keeps.window - 1) // tile) + 1
        return min(wanted, -(-most_tiles // _least_tiles(tile)))

    def _run_decode(self, asked: Group, given: LayerArguments) -> None:
        how, num_rows, out = self._decode, len(given.columns.rows), asked["out"]
        num_splits = self.num_splits(num_rows, given.keeps)
        sums, weights = self._room(num_rows, num_splits, out.device)
        splits = {"sums": sums, "weights": weights, "num_splits": num_splits}
        decode[(self.shape.num_kv_heads, num_rows, num_splits)](
            **asked,
            **splits,
            **given.slab,
            **given.cells,
            **given.residuals,
            rows=given.columns.rows,
            **given.entries,
            **given.constants,
            ROWS=how.rows,
            TILE=how.tile,
            MIN_TILES=_least_tiles(how.tile),
            IS_SPLIT=num_splits > 1,
            num_warps=how.num_warps,
            num_stages=how.num_stages,
        )
        if num_splits > 1:
            merge_splits[(self.shape.num_heads, num_rows)](
                out=out,
                **splits,
                sinks=asked["sinks"],
                HAS_SINKS=asked["HAS_SINKS"],
                rows=given.columns.rows,
                query_starts=given.columns.query_starts,
                SHAPE=given.shape,
                SPLITS=padded(num_splits),
            )

    def _room(self, num_rows: int, num_splits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return room for partial results: float32 ``[rows, H, splits, D]`` and ``[rows, H, splits]``."""
        shape = num_rows, self.shape.num_heads, num_splits
        num_weights = num_rows * self.shape.num_heads * num_splits
        needed = num_weights * (self.shape.head_dim + 1)
        if self._partials.numel() < needed or self._partials.device != device:
            self._partials = torch.empty(needed, dtype=torch.float32, device=device)
        sums = self._partials[: needed - num_weights].view(*shape, self.shape.head_dim)  # first: it stays aligned
        weights = self._partials[needed - num_weights : needed].view(shape)
        if INTERPRETED:
            self._partials.fill_(float("nan"))  # who reads what was not written is found out
        return sums, weights


def _least_tiles(tile: int) -> int:
    """Return of how many tiles a split is at least."""
    return max(1, _MIN_SPLIT_ENTRIES // tile)


def _write(key: torch.Tensor, value: torch.Tensor, given: LayerArguments) -> torch.Tensor:
    """Put K and V of the step's tokens where they belong.

    Where blocks are sealed, return them in 16 bit too, as float16 ``[T, Hkv, 2, D]``, if somebody reads them so.
    """
    num_tokens, num_kv_heads, _ = key.shape
    if not num_tokens:  # another layer has written them
        return given.blocks.data
    numbers = vectors("key", key) | vectors("value", value)
    where = {"seq_of": given.columns.seq_of} | given.entries
    if not given.blocks.has_codes:
        write_kv[(num_tokens,)](**numbers, **given.slab, **where, SHAPE=given.shape, HEADS=padded(num_kv_heads))
        return given.blocks.data
    if given.form.SEALS:
        return _write_sealed(numbers, where, given)
    num_rows = _rows_of(given)
    write_codes[(-(-num_tokens // num_rows), num_kv_heads)](
        **numbers,
        **given.slab,
        **given.encoded_cells,
        **where,
        num_tokens=num_tokens,
        **given.constants,
        ROWS=num_rows,
        enable_fp_fusion=False,
    )
    return given.blocks.data


def _write_sealed(numbers: Group, where: Group, given: LayerArguments) -> torch.Tensor:
    """Do so where blocks are sealed: into residuals, and into the blocks that are full."""
    key: torch.Tensor = numbers["key"]
    num_tokens, num_kv_heads, head_dim = key.shape
    has_recent = len(given.columns.tiles) > 0  # who decodes finds all in residuals
    shape = num_tokens if has_recent else 0, num_kv_heads, 2, head_dim
    recent = torch.empty(shape, dtype=torch.float16, device=key.device)
    write_sealed[num_tokens, num_kv_heads](
        **numbers,
        **given.slab,
        places=given.blocks.places,
        key_centres=given.blocks.key_centres,
        **given.residuals,
        recent=recent,
        **where,
        SHAPE=given.shape,
        HAS_RECENT=has_recent,
        num_warps=sealing_warps(given.shape.BLOCK_SIZE, head_dim),
        enable_fp_fusion=False,
    )
    return recent


def _brought(query: torch.Tensor, given: LayerArguments) -> torch.Tensor:
    """Return queries where K is."""
    num_tokens, num_heads, _ = query.shape
    num_rows = _rows_of(given)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    bring_queries[(-(-num_tokens // num_rows), num_heads)](
        **vectors("query", query),
        out=out,
        bases=given.blocks.query_bases,
        seq_of=given.columns.seq_of,
        num_tokens=num_tokens,
        cells=given.columns.cells,
        cell_stride_s=given.entries["cell_stride_s"],
        layer=given.entries["layer"],
        **given.constants,
        ROWS=num_rows,
        enable_fp_fusion=False,
    )
    return out


def _rows_of(given: LayerArguments) -> int:
    """Return how many tokens share a program, which looks up one cell."""
    return _ENCODED_ROWS if len(given.columns.cells) == 1 else 1
