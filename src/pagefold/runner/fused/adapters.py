"""FusedAdapters: weights of LoRA adapters as the fused decoder's kernel reads them, by slot (see ``adapted.py``)."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from pagefold.adapters import MODULES, STAGES
from pagefold.kernels.emit import FLOAT_BYTES, LINE_BYTES
from pagefold.kernels.low_rank import WEIGHT_DTYPES, low_rank_tiles
from pagefold.runner.fused.adapted import StepAdapters

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from pagefold.adapters import AdapterFolder, AdapterWeights, LowRank

__all__ = ["FusedAdapters", "PackedAdapter", "adapter_bytes"]

_ITEM_BYTES = (4, 2, 2)


class FusedAdapters:
    """The adapters of a decoder, by slot.

    Args:
        num_layers: of the model.
        num_slots: how many there may be at once.
        max_rank: of each.
    """

    def __init__(self, num_layers: int, num_slots: int, max_rank: int) -> None:
        self._max_rank = max_rank
        self._dtypes = np.zeros(num_slots + 1, np.int64)
        self._shrinks = np.zeros((num_slots + 1, num_layers, len(STAGES), 4), np.int64)
        self._expands = np.zeros((num_slots + 1, num_layers, len(MODULES), 4), np.int64)
        self._low = np.zeros((1, max(map(len, STAGES)) * max_rank), np.float32)
        self._packed: dict[int, PackedAdapter] = {}

    @staticmethod
    def pack(weights: AdapterWeights) -> PackedAdapter:
        """Return an adapter as the kernel reads it. Any thread may call it."""
        return PackedAdapter(weights)

    def put(self, slot: int, packed: PackedAdapter) -> None:
        """Put an adapter into a free slot, between steps."""
        assert slot not in self._packed, "a slot has one adapter"
        self._packed[slot] = packed
        self._dtypes[slot] = packed.dtype
        for place, shrinks in packed.shrinks.items():
            self._shrinks[(slot, *place)] = shrinks
        for place, expands in packed.expands.items():
            self._expands[(slot, *place)] = expands

    def drop(self, slot: int) -> None:
        """Let go of the adapter in a slot, between steps; no request has it any more."""
        del self._packed[slot]
        self._shrinks[slot] = self._expands[slot] = 0

    def of_step(self, slots: NDArray[np.int64] | None, num_tokens: int, logit_rows: NDArray[np.int64]) -> StepAdapters:
        """Return what the kernel is told of a step's adapters.

        Args:
            slots: of each token; None where none has an adapter.
            num_tokens: of the step.
            logit_rows: tokens whose logits are wanted.
        """
        of_tokens = np.zeros(num_tokens, np.int64) if slots is None else slots
        most = max(num_tokens, len(logit_rows))
        if most > len(self._low):
            self._low = np.zeros((most, self._low.shape[1]), np.float32)
        return StepAdapters(
            of_tokens,
            of_tokens[logit_rows],
            self._dtypes,
            self._shrinks,
            self._expands,
            self._low,
            *low_rank_tiles(),
        )


class PackedAdapter:
    """An adapter as the kernel reads it, in the dtype of its file: A ``[K, r]``, of a stage side by side, B ``[r, N]``.

    Args:
        weights: as they were read.

    Attributes:
        dtype: of the weights.
        num_bytes: of all of it.
        shrinks: of each layer and stage that it goes to: see :class:`StepAdapters`.
        expands: of each layer and module.
    """

    def __init__(self, weights: AdapterWeights) -> None:
        self.dtype = WEIGHT_DTYPES.index(weights.adapter.dtype)
        self.shrinks: dict[tuple[int, int], tuple[int, int, int, int]] = {}
        self.expands: dict[tuple[int, int], tuple[int, int, int, int]] = {}
        together = [*_by_stage(weights.adapter.parts)]
        self.num_bytes = adapter_bytes(weights.adapter)
        room = np.zeros(self.num_bytes, np.uint8)
        self._left = self._data = room[-room.ctypes.data % LINE_BYTES :]
        for stage, parts in together:
            layer = parts[0].place.layer
            low = self._take(np.concatenate([weights.matrix(part.down).T for part in parts], axis=1))
            scales = self._take(np.concatenate([np.full(part.rank, part.scale, np.float32) for part in parts]))
            num_low = sum(part.rank for part in parts)
            self.shrinks[layer, stage] = low, scales, parts[0].down.shape[1], num_low
            first = 0
            for part in parts:
                at = self._take(np.ascontiguousarray(weights.matrix(part.up).T))
                expands = at, part.rank, part.up.shape[0], first
                self.expands[layer, MODULES.index(part.place.module)] = expands
                first += part.rank

    def _take(self, matrix: NDArray[np.generic]) -> int:
        """Copy a matrix behind the others, and return its address."""
        here = self._left[: matrix.nbytes]
        here[:] = matrix.reshape(-1).view(np.uint8)
        self._left = self._left[_padded(matrix.nbytes) :]
        return here.ctypes.data


def _by_stage(parts: Sequence[LowRank]) -> Iterator[tuple[int, tuple[LowRank, ...]]]:
    """Yield what lies side by side: parts of one layer whose modules are multiplied with the same rows, with the stage.

    Parts come in order.
    """
    stages = {module: stage for stage, modules in enumerate(STAGES) for module in modules}
    for (_, stage), together in groupby(parts, lambda part: (part.place.layer, stages[part.place.module])):
        yield stage, tuple(together)


def _sizes(dtype: str, together: Sequence[tuple[int, tuple[LowRank, ...]]]) -> Iterator[int]:
    """Yield the bytes of each matrix as it will lie, scales included."""
    item_bytes = _ITEM_BYTES[WEIGHT_DTYPES.index(dtype)]
    for _, parts in together:
        num_low = sum(part.rank for part in parts)
        yield item_bytes * num_low * parts[0].down.shape[1]
        yield FLOAT_BYTES * num_low
        for part in parts:
            yield item_bytes * part.rank * part.up.shape[0]


def adapter_bytes(adapter: AdapterFolder) -> int:
    """Return what :attr:`PackedAdapter.num_bytes` will be."""
    return LINE_BYTES + sum(map(_padded, _sizes(adapter.dtype, [*_by_stage(adapter.parts)])))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES
