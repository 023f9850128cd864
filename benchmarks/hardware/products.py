"""Products alone: rows times all matrices of a model, walked as the fused decoder walks them, and nothing else.

The decoder's own loop over panels is compiled into a kernel that has no norms, no attention and no SiLU; a team of
threads goes through it phase by phase. Weights are a few random panels, over and over: their time does not depend on
their numbers, only on where they are, and every panel has a place of its own in memory.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np
from numba import prange

from pagefold.config import available_cpus
from pagefold.kernels.formats import PANEL_WIDTH, convert, num_panels, pack
from pagefold.kernels.team import SYNC_WIDTH, ends
from pagefold.runner.fused.decoder import odd_lines
from pagefold.runner.fused.kernel import _matmul, _Team
from pagefold.runner.fused.pieces import ahead_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefold.kernels.formats import ProductFormat
    from pagefold.runner.fused.families import FusedConfig

__all__ = ["Products", "Sizes", "layer_matrices"]

_PANELS_MADE = 8


class Sizes(NamedTuple):
    """Columns and numbers of a column of a matrix: N and K."""

    num_columns: int
    num_k: int

    @property
    def num_weights(self) -> int:
        """Weights of the matrix: as many multiply-adds a row."""
        return self.num_columns * self.num_k

    def num_bytes(self, product_format: ProductFormat) -> int:
        """Return its bytes as it is packed, scales included."""
        return num_panels(self.num_columns) * product_format.panel_bytes(self.num_k)


def layer_matrices(config: FusedConfig) -> dict[str, Sizes]:
    """Return the matrices of a layer, in the order in which they are multiplied."""
    num_out, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "qkv": Sizes(num_out + 2 * num_kv, hidden),
        "out": Sizes(hidden, num_out),
        "gate": Sizes(inner, hidden),
        "up": Sizes(inner, hidden),
        "down": Sizes(hidden, inner),
    }


class _Rows(NamedTuple):
    """Rows in a format: the address of the first, bytes between them, numbers of each."""

    address: int
    distance: int
    num_k: int


class _Weights(NamedTuple):
    """Panels of each kind, uint8 ``[L, panels, bytes of a panel]``; the head's, which may be none, without L."""

    qkv: NDArray[np.uint8]
    out: NDArray[np.uint8]
    gate: NDArray[np.uint8]
    up: NDArray[np.uint8]
    down: NDArray[np.uint8]
    head: NDArray[np.uint8]


class _Outputs(NamedTuple):
    """Where products go, float32 ``[T, columns]``."""

    qkv: NDArray[np.float32]
    hidden: NDArray[np.float32]
    inner: NDArray[np.float32]
    logits: NDArray[np.float32]


@numba.njit(parallel=True, nogil=True, error_model="numpy")  # type: ignore[misc]
def _walk(tiles, num_members, sync, shares, num_rows, normed, attended, inner, weights, y, width):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202, PLR0913, PLR0917
    for member in prange(num_members):
        team = _Team(member, num_members, sync, shares)
        for layer in range(weights.qkv.shape[0]):
            phase = 5 * layer
            here = weights.qkv[layer], weights.out[layer], weights.gate[layer], weights.up[layer], weights.down[layer]
            after = weights.qkv[layer + 1] if layer + 1 < weights.qkv.shape[0] else weights.head
            if len(after) == 0:
                after = weights.qkv[0]
            _matmul(tiles, team, phase, normed, num_rows, here[0], y.qkv, width, 0, ahead_of(team, here[1], 1))
            _matmul(tiles, team, phase + 1, attended, num_rows, here[1], y.hidden, width, 1, ahead_of(team, here[2], 1))
            _matmul(tiles, team, phase + 2, normed, num_rows, here[2], y.inner, width, 0, ahead_of(team, here[3], 1))
            _matmul(tiles, team, phase + 3, normed, num_rows, here[3], y.inner, width, 0, ahead_of(team, here[4], 1))
            _matmul(tiles, team, phase + 4, inner, num_rows, here[4], y.hidden, width, 1, ahead_of(team, after, 1))
        if len(weights.head):
            phase = 5 * weights.qkv.shape[0]
            ahead = ahead_of(team, weights.qkv[0], 1)
            _matmul(tiles, team, phase, normed, num_rows, weights.head, y.logits, width, 0, ahead)


class Products:
    """The matrices of some layers, and rows to multiply with them.

    Args:
        product_format: of both.
        config: of the model, for its shapes.
        num_layers: so many of its layers; their weights are to be more than caches hold.
        num_rows: rows.
        has_head: whether the head is multiplied too.

    Attributes:
        num_operations: of all products: two a weight and row.
        num_bytes: of all matrices, as they are packed.
    """

    def __init__(
        self, product_format: ProductFormat, config: FusedConfig, num_layers: int, num_rows: int, *, has_head: bool
    ) -> None:
        matrices = layer_matrices(config)
        head = Sizes(config.vocab_size if has_head else 0, config.hidden_size)
        every = [*list(matrices.values()) * num_layers, head]
        self.num_operations = 2 * num_rows * sum(one.num_weights for one in every)
        self.num_bytes = sum(one.num_bytes(product_format) for one in every)
        self._names, self._num_layers, self._num_rows = (*matrices, "head"), num_layers, num_rows
        self._tiles = product_format.tiles()
        panels = {name: _panels(product_format, one, num_layers) for name, one in matrices.items()}
        self._weights = _Weights(**panels, head=_panels(product_format, head, 1)[0])
        random = np.random.default_rng(0)
        self._rows = [
            _apart(product_format, random.standard_normal((num_rows, matrices[name].num_k)).astype(np.float32))
            for name in ("qkv", "out", "down")
        ]
        widths = [num_panels(matrices[name].num_columns) for name in ("qkv", "out", "gate")]
        self._y = _Outputs(
            *(np.zeros((num_rows, PANEL_WIDTH * num), np.float32) for num in (*widths, num_panels(head.num_columns)))
        )
        self._sync = np.zeros((5 * num_layers + 1, SYNC_WIDTH), np.int64)
        self._shares = np.zeros((5 * num_layers + 1, available_cpus()), np.int64)
        self._num_ks = [matrices[name].num_k for name in ("qkv", "out", "down")]

    def run(self) -> dict[str, float]:
        """Multiply once; return the seconds of each kind of matrix, all layers together."""
        self._sync[:] = self._shares[:] = 0
        num_threads = available_cpus()
        numba.set_num_threads(num_threads)
        rows = [
            _Rows(one.ctypes.data, one.strides[0], num_k) for one, num_k in zip(self._rows, self._num_ks, strict=True)
        ]
        begin = time.monotonic()
        _walk(
            self._tiles, num_threads, self._sync, self._shares, self._num_rows, *rows, self._weights, self._y,
            PANEL_WIDTH,
        )  # fmt: skip
        seconds = dict.fromkeys(self._names, 0.0)
        taken = np.diff(ends(self._sync), prepend=begin)
        for phase, one in enumerate(taken):
            name = "head" if phase == 5 * self._num_layers else self._names[phase % 5]
            seconds[name] += float(one)
        return seconds


def _apart(product_format: ProductFormat, x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return rows in a format, as far apart as the decoder has them."""
    rows = convert(product_format, x)
    room = np.zeros((len(rows), odd_lines(rows.shape[1])), np.uint8)
    room[:, : rows.shape[1]] = rows
    return room


def _panels(product_format: ProductFormat, sizes: Sizes, num_layers: int) -> NDArray[np.uint8]:
    """Return ``[L, panels, bytes of a panel]`` of small random weights."""
    num = num_panels(sizes.num_columns)
    numbers = np.random.default_rng(1).standard_normal((_PANELS_MADE * PANEL_WIDTH, sizes.num_k)).astype(np.float32)
    some = pack(product_format, numbers / np.float32(sizes.num_k))
    panels = np.empty((num_layers, num, some.shape[1]), np.uint8)
    for first in range(0, num, _PANELS_MADE):
        panels[:, first : first + _PANELS_MADE] = some[: num - first]
    return panels
