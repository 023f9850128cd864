"""CudaAttention: attention over blocks on an NVIDIA card, by Triton kernels, launched without waiting for it.

A step's sequences with one token decode, the others prefill; both may be in one step. All K and V are written first,
or encoded, and the blocks that are full sealed; where K is stored in a basis or rotated, queries are brought there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pagefold.runner.attention.cuda.blocks import CardBlocks, CellFormat
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
from pagefold.runner.attention.cuda.kernels import decode, merge_splits, prefill, write_kv
from pagefold.runner.attention.cuda.seal import write_sealed
from pagefold.runner.attention.cuda.tile import INTERPRETED
from pagefold.runner.attention.device_columns import DeviceColumns
from pagefold.runner.to_device import pack

if TYPE_CHECKING:
    from pagefold.runner.attention.inputs import AttentionInputs
    from pagefold.runner.slab import AnySlab

__all__ = ["CudaAttention", "HeadShape"]

_LOG2E = 1.4426950408889634
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
        window: how many entries, its own included, a token sees; 0 for all.
        num_splits: into how many splits decoding is cut at most; None for what fills the card.
    """

    def __init__(self, shape: HeadShape, *, window: int = 0, num_splits: int | None = None) -> None:
        self.shape = shape
        self._window = window
        self._num_splits = num_splits
        self._decode = shape.config("decode")
        self._prefill = shape.config("prefill")
        self._inputs: AttentionInputs | None = None
        self._columns: DeviceColumns | None = None
        self._slab: AnySlab | None = None
        self._blocks: CardBlocks | None = None
        self._partials = torch.empty(0)

    def columns(self, inputs: AttentionInputs, device: torch.device) -> DeviceColumns:
        """Return what the kernels read of ``inputs``: what is on the card already, or a copy."""
        if inputs.on_device is not None:
            return inputs.on_device
        if self._columns is None or self._inputs is not inputs:
            host = plan_columns(inputs, self.shape.tokens_a_tile)
            self._inputs, self._columns = inputs, DeviceColumns(*pack(host, device))
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
    ) -> torch.Tensor:
        """See :class:`~pagefold.runner.attention.inputs.AttentionBackend`."""
        assert query.stride(2) == key.stride(2) == value.stride(2) == 1, "a head's numbers lie side by side"
        columns, blocks = self.columns(inputs, query.device), self.blocks(slab)
        num_heads = query.shape[1]
        num_kv_heads, head_dim = key.shape[1:]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        form = blocks.format_of(layer, num_kv_heads)
        places: dict[str, int | float] = {
            "layer": layer,
            "block_stride": blocks.data.stride(0),
            "table_stride_s": columns.tables.stride(0),
            "table_stride_h": columns.tables.stride(1) if columns.tables.shape[1] > 1 else 0,
            "length_stride_s": columns.lengths.stride(0),
            "length_stride_h": int(columns.lengths.shape[1] > 1),
            "cell_stride_s": columns.cells.stride(0) if len(columns.cells) > 1 else 0,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": head_dim,
            "DIMS": max(16, padded(head_dim)),
            "BLOCK_SIZE": slab.block_size,
        }
        recent = self._write(key, value, blocks, form, columns, places)
        if form.ROTATION:
            query = _brought(query, blocks, form, columns, places)
        assert not (form.SEALS and self._window), "nobody sees a part of what is sealed"
        places |= {
            "num_ranges": blocks.num_ranges,
            "num_residuals": blocks.num_residuals,
            "query_stride_t": query.stride(0),
            "query_stride_h": query.stride(1),
            "scale": scale / softcap if softcap else scale * _LOG2E,
            "softcap": softcap * _LOG2E,
            "window": self._window,
            "GROUP": num_heads // num_kv_heads,
            "HAS_WINDOW": self._window > 0,
            "HAS_SOFTCAP": softcap > 0.0,
            "ALIGNMENT": blocks.alignment,
            **_reading(form),
        }
        if len(columns.rows):
            self._run_decode(query, out, blocks, columns, places)
        if len(columns.tiles):
            how = self._prefill
            prefill[(len(columns.tiles), num_kv_heads)](
                query,
                out,
                blocks.data,
                columns.tiles,
                *_tables(columns),
                *_cells(blocks),
                *_unsealed(blocks, columns),
                recent,
                ROWS=how.rows,
                TILE=how.tile,
                num_warps=how.num_warps,
                num_stages=how.num_stages,
                **places,
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

    def num_splits(self, num_rows: int) -> int:
        """Return into how many splits a step with so many decoding sequences is cut."""
        if self._num_splits is not None:
            return self._num_splits
        return num_splits_for(num_rows, self.shape.num_kv_heads, self.shape.num_processors)

    def _write(  # noqa: PLR0913, PLR0917 - the operands of a kernel
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: CardBlocks,
        form: CellFormat,
        columns: DeviceColumns,
        places: dict[str, int | float],
    ) -> torch.Tensor:
        """Put K and V of the step's tokens where they belong.

        Where blocks are sealed, return them in 16 bit too, as float16 ``[T, Hkv, 2, D]``, if somebody reads them so.
        """
        places = places | {
            "key_stride_t": key.stride(0),
            "key_stride_h": key.stride(1),
            "value_stride_t": value.stride(0),
            "value_stride_h": value.stride(1),
        }
        starts, *tables = _tables(columns)
        if not blocks.has_codes:
            heads = padded(key.shape[1])
            write_kv[(len(key),)](key, value, blocks.data, starts, columns.seq_of, *tables, HEADS=heads, **places)
            return blocks.data
        if form.SEALS:
            return self._write_sealed(key, value, blocks, columns, places)
        num_rows = _rows_of(columns)
        write_codes[(-(-len(key) // num_rows), key.shape[1])](
            key,
            value,
            blocks.data,
            blocks.places,
            blocks.key_centres,
            blocks.value_centres,
            blocks.key_bases,
            starts,
            columns.seq_of,
            *tables,
            num_tokens=len(key),
            num_ranges=blocks.num_ranges,
            ROWS=num_rows,
            enable_fp_fusion=False,
            **_encoding(form),
            **places,
        )
        return blocks.data

    def _write_sealed(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: CardBlocks,
        columns: DeviceColumns,
        places: dict[str, int | float],
    ) -> torch.Tensor:
        """Do so where blocks are sealed: into residuals, and into the blocks that are full."""
        num_tokens, num_kv_heads, head_dim = key.shape
        has_recent = len(columns.tiles) > 0  # who decodes finds all in residuals
        shape = num_tokens if has_recent else 0, num_kv_heads, 2, head_dim
        recent = torch.empty(shape, dtype=torch.float16, device=key.device)
        starts, *tables = _tables(columns)
        write_sealed[num_tokens, num_kv_heads](
            key,
            value,
            blocks.data,
            blocks.places,
            blocks.key_centres,
            *_unsealed(blocks, columns),
            recent,
            starts,
            columns.seq_of,
            *tables,
            num_residuals=blocks.num_residuals,
            HAS_RECENT=has_recent,
            num_warps=sealing_warps(int(places["BLOCK_SIZE"]), head_dim),
            enable_fp_fusion=False,
            **places,
        )
        return recent

    def _run_decode(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        blocks: CardBlocks,
        columns: DeviceColumns,
        places: dict[str, int | float],
    ) -> None:
        how, num_rows = self._decode, len(columns.rows)
        num_splits = self.num_splits(num_rows)
        sums, weights = self._room(num_rows, num_splits, query.device)
        decode[(self.shape.num_kv_heads, num_rows, num_splits)](
            query,
            out,
            sums,
            weights,
            blocks.data,
            columns.rows,
            *_tables(columns),
            *_cells(blocks),
            *_unsealed(blocks, columns),
            num_splits=num_splits,
            ROWS=how.rows,
            TILE=how.tile,
            MIN_TILES=max(1, _MIN_SPLIT_ENTRIES // how.tile),
            IS_SPLIT=num_splits > 1,
            num_warps=how.num_warps,
            num_stages=how.num_stages,
            **places,
        )
        if num_splits > 1:
            merge_splits[(self.shape.num_heads, num_rows)](
                out,
                sums,
                weights,
                columns.rows,
                columns.query_starts,
                num_splits,
                NUM_HEADS=self.shape.num_heads,
                HEAD_DIM=places["HEAD_DIM"],
                DIMS=places["DIMS"],
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


def _tables(columns: DeviceColumns) -> tuple[torch.Tensor, ...]:
    """Return the columns that say where entries lie, in the kernels' order."""
    return columns.query_starts, columns.tables, columns.lengths, columns.cells


def _cells(blocks: CardBlocks) -> tuple[torch.Tensor, ...]:
    """Return what those who read codes know of cells, in the kernels' order."""
    return blocks.places, blocks.stored_key_centres, blocks.output_centres


def _unsealed(blocks: CardBlocks, columns: DeviceColumns) -> tuple[torch.Tensor, torch.Tensor]:
    """Return residuals and who has which, which is read where blocks are sealed only."""
    return blocks.residuals, columns.residual_ids


def _encoding(form: CellFormat) -> dict[str, int | float]:
    """Return what those who encode token by token are compiled for."""
    constants = form._asdict()
    del constants["SEALS"]
    return constants


def _reading(form: CellFormat) -> dict[str, int | float]:
    """Return what those who read codes are compiled for."""
    constants = form._asdict()
    del constants["HAS_BASIS"]  # of queries that have been brought there
    return constants


def _rows_of(columns: DeviceColumns) -> int:
    """Return how many tokens share a program, which looks up one cell."""
    return _ENCODED_ROWS if len(columns.cells) == 1 else 1


def _brought(
    query: torch.Tensor,
    blocks: CardBlocks,
    form: CellFormat,
    columns: DeviceColumns,
    places: dict[str, int | float],
) -> torch.Tensor:
    """Return queries where K is."""
    num_rows, num_heads = _rows_of(columns), query.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    bring_queries[(-(-len(query) // num_rows), num_heads)](
        query,
        out,
        blocks.query_bases,
        columns.seq_of,
        columns.cells,
        places["layer"],
        len(query),
        query.stride(0),
        query.stride(1),
        places["cell_stride_s"],
        NUM_KV_HEADS=places["NUM_KV_HEADS"],
        GROUP=num_heads // int(places["NUM_KV_HEADS"]),
        HEAD_DIM=places["HEAD_DIM"],
        DIMS=places["DIMS"],
        ROWS=num_rows,
        ROTATION=form.ROTATION,
        HAS_BASIS=form.HAS_BASIS,
        enable_fp_fusion=False,
    )
    return out
