"""From NumPy to a device, and back. A card's copies go through pinned memory, so that the host need not wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = ["ALIGNMENT", "Packing", "pack", "put", "to_host"]

ALIGNMENT = 16
"""Bytes. Kernels are compiled for pointers and widths that are aligned so, once."""

_DTYPES = {
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "float32": torch.float32,
    "float64": torch.float64,
}


class Packing:
    """Where arrays of these shapes lie in one piece of memory, each aligned.

    Args:
        arrays: of the shapes and dtypes that are packed.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]]) -> None:
        self._fields = [(array.shape, array.nbytes, _DTYPES[array.dtype.name]) for array in arrays]
        self._sizes = [num_bytes + -num_bytes % ALIGNMENT for _, num_bytes, _ in self._fields]
        self.num_bytes = sum(self._sizes)

    def fill(self, memory: torch.Tensor, arrays: Sequence[NDArray[Any]]) -> None:
        """Write ``arrays`` into ``memory``, uint8 ``[num_bytes]`` of the host."""
        view, offset = memory.numpy(), 0
        for array, (shape, num_bytes, _), size in zip(arrays, self._fields, self._sizes, strict=True):
            assert array.shape == shape, "it was packed for another shape"
            view[offset : offset + num_bytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            offset += size

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the arrays that lie in ``memory``, uint8 ``[num_bytes]`` of any device."""
        pieces = torch.split(memory, self._sizes)
        return [
            piece[:num_bytes].view(dtype).view(shape)
            for piece, (shape, num_bytes, dtype) in zip(pieces, self._fields, strict=True)
        ]


def pack(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to a device in one piece; return them there."""
    packing = Packing(arrays)
    host = torch.empty(packing.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    packing.fill(host, arrays)
    return packing.views(host.to(device, non_blocking=True))


def put(array: NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return one array on a device; on a CPU it is no copy."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(token_ids: torch.Tensor) -> Callable[[], list[int]]:
    """Queue a copy of int64 ``[R]`` to the host; return what waits for that copy alone, and gives the numbers."""
    if token_ids.device.type != "cuda":
        return lambda: cast("list[int]", token_ids.tolist())
    there = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
    there.copy_(token_ids, non_blocking=True)
    is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]
    is_there.record()

    def read() -> list[int]:
        is_there.synchronize()
        return cast("list[int]", there.tolist())

    return read
