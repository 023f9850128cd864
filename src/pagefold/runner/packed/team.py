"""ProductTeam: the threads that multiply rows with packed matrices, and the room that they do it in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numba
import numpy as np
import torch

from pagefold.kernels.compiled import specialised
from pagefold.kernels.emit import LINE_BYTES
from pagefold.kernels.formats import PANEL_WIDTH
from pagefold.kernels.team import SYNC_WIDTH
from pagefold.runner.fused.pieces import TOKENS_A_TILE
from pagefold.runner.packed.kernel import (
    NUM_PHASES,
    Chosen,
    ExpertPanels,
    ExpertRoom,
    RowTiles,
    add_weighted,
    run_experts,
    run_product,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pagefold.kernels.formats import ProductFormat

__all__ = ["Groups", "ProductTeam"]

_NO_SOURCES = np.zeros(0, np.int64)


class Groups:
    """Which rows are multiplied with which matrix: rows of a group lie side by side, groups in their order.

    Attributes:
        sources: int64 ``[S]``: which of the rows that are given each is.
        row_tiles: how they are cut.

    Args:
        sources: as above.
        counts: int64 ``[groups]``: how many rows each group has.
    """

    __slots__ = ("row_tiles", "sources")

    def __init__(self, sources: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        self.sources = sources
        self.row_tiles = _cut(counts)

    def in_order(self) -> Groups:
        """Return the same groups, of rows that lie as these do already."""
        same = Groups.__new__(Groups)
        same.sources, same.row_tiles = _NO_SOURCES, self.row_tiles
        return same


class ProductTeam:
    """Multiplies rows with packed matrices, for all layers of a model, one after another.

    A row's numbers are the same to the bit in any company, and with any number of threads.

    Args:
        product_format: of the matrices.
        num_threads: how many work together.

    Attributes:
        product_format: likewise.
    """

    def __init__(self, product_format: ProductFormat, num_threads: int) -> None:
        self.product_format = product_format
        self._tiles = product_format.tiles()
        self._num_threads = min(num_threads, numba.config.NUMBA_NUM_THREADS)
        self._sync = np.zeros((NUM_PHASES, SYNC_WIDTH), np.int64)
        self._shares = np.zeros((NUM_PHASES, self._num_threads), np.int64)
        self._rows = np.zeros(0, np.uint8)
        self._whole = Groups(_NO_SOURCES, np.ones(1, np.int64))
        self._product: Callable[..., None] | None = None
        self._add: Callable[..., None] | None = None
        self._experts: Callable[..., None] | None = None

    def multiply(self, x: torch.Tensor, panels: NDArray[np.uint8], groups: Groups | None = None) -> torch.Tensor:
        """Return rows times the matrices of their groups, float32 ``[S, P * W]``: columns are filled up to panels.

        Args:
            x: float32 ``[T, K]``.
            panels: uint8 ``[groups, P, bytes of a panel]``.
            groups: of which rows; None for all of them in their order, times the one matrix that there is.
        """
        x = x.contiguous()
        num_rows = len(x)
        if groups is None:
            if self._whole.row_tiles.nums.sum() != num_rows:
                self._whole = Groups(_NO_SOURCES, np.array([num_rows]))
            groups = self._whole
        elif len(groups.sources):
            num_rows = len(groups.sources)
        y = torch.empty(num_rows, panels.shape[1] * PANEL_WIDTH)
        if not num_rows:
            return y
        self._sync[:] = self._shares[:] = 0
        numba.set_num_threads(self._num_threads)  # of the calling thread
        arguments = (
            self._tiles,
            self._num_threads,
            self._sync,
            self._shares,
            x.numpy(),
            groups.sources,
            self._room(num_rows, x.shape[1]),
            groups.row_tiles,
            panels,
            y.numpy(),
        )
        if self._product is None:
            self._product = specialised(run_product, arguments)
        self._product(*arguments)
        return y

    def add_weighted(
        self, y: torch.Tensor, places: NDArray[np.int64], weights: torch.Tensor, num_columns: int
    ) -> torch.Tensor:
        """Return the sums of some rows of ``y`` times their weights, in their order: float32 ``[T, num_columns]``.

        Args:
            y: float32 ``[S, >= num_columns]``.
            places: int64 ``[T, k]``: of which rows.
            weights: float32 ``[T, k]``.
            num_columns: how many of each row.
        """
        out = torch.empty(len(places), num_columns)
        arguments = y.contiguous().numpy(), places, weights.contiguous().numpy(), out.numpy()
        if self._add is None:
            self._add = specialised(add_weighted, arguments)
        self._add(*arguments)
        return out

    def compute_experts(
        self, x: torch.Tensor, chosen: Chosen, row_tiles: RowTiles, panels: ExpertPanels, activation: int
    ) -> torch.Tensor:
        """Return the weighted sums of experts that are an MLP with a gate, float32 ``[T, E]``: all in one go.

        Args:
            x: float32 ``[T, E]``.
            chosen: which experts.
            row_tiles: how the rows of ``chosen`` are cut.
            panels: of the experts.
            activation: of the gate: the address of one of the tiles of rows.
        """
        x, num_rows, num_inner = x.contiguous(), len(chosen.sources), panels.num_inner
        out = torch.empty_like(x)
        if not num_rows:
            return out
        self._room(num_rows, max(x.shape[1], num_inner))  # once for both: a view of the first must not be left behind
        self._sync[:] = self._shares[:] = 0
        numba.set_num_threads(self._num_threads)  # of the calling thread
        room = ExpertRoom(
            self._room(num_rows, x.shape[1]),
            np.empty((num_rows, panels.gate_up.shape[1] * PANEL_WIDTH), np.float32),
            self._room(num_rows, num_inner),
            np.empty((num_rows, panels.down.shape[1] * PANEL_WIDTH), np.float32),
            out.numpy(),
        )
        arguments = (
            self._tiles,
            activation,
            self._num_threads,
            self._sync,
            self._shares,
            x.numpy(),
            chosen,
            row_tiles,
            panels,
            PANEL_WIDTH,
            room,
        )
        if self._experts is None:
            self._experts = specialised(run_experts, arguments)
        self._experts(*arguments)
        return out

    def _room(self, num_rows: int, num_k: int) -> NDArray[np.uint8]:
        """Return room for so many rows: an odd number of cache lines apart, since tiles walk along several at once."""
        lines = -(-self.product_format.row_bytes(num_k) // LINE_BYTES) | 1
        num_bytes = num_rows * lines * LINE_BYTES
        if self._rows.size < num_bytes:
            self._rows = np.zeros((num_bytes + num_bytes // 2) // LINE_BYTES * LINE_BYTES, np.uint8)
        return self._rows[:num_bytes].reshape(num_rows, lines * LINE_BYTES)


def _cut(counts: NDArray[np.int64]) -> RowTiles:
    """Cut the rows of groups into tiles, none of which is larger than what stays in the cache."""
    firsts_of_groups = np.cumsum(counts) - counts
    if counts.max(initial=0) <= TOKENS_A_TILE:
        groups = np.flatnonzero(counts)
        return RowTiles(groups, firsts_of_groups[groups], counts[groups])
    cut = [
        (group, first + at, min(TOKENS_A_TILE, num - at))
        for group, (first, num) in enumerate(zip(firsts_of_groups.tolist(), counts.tolist(), strict=True))
        for at in range(0, num, TOKENS_A_TILE)
    ]
    return RowTiles(*(np.array(column, np.int64) for column in zip(*cut, strict=True)))
