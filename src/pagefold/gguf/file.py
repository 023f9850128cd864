"""Read the tensors of a GGUF file: as float32 arrays, or as they lie in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pagefold.gguf.dequantize import DEQUANTIZE
from pagefold.gguf.header import GgufHeader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from pagefold.gguf.header import TensorInfo

__all__ = ["GgufFile"]


class GgufFile(GgufHeader):
    """A GGUF file whose tensors are read, not its header alone.

    Arrays of float32 are copies, which outlive the file.
    """

    def read(self, name: str) -> NDArray[np.float32]:
        """Return a tensor, dequantized: float32, C-contiguous, of the shape in ``tensors[name].shape``.

        The numbers are equal in bits to what other readers of the file get.

        Raises:
            KeyError: no tensor of that name.
        """
        info = self.tensors[name]
        return self._numbers(info, 0, info.num_bytes).reshape(info.shape)

    def read_rows(self, name: str, num_rows: int) -> Iterator[NDArray[np.float32]]:
        """Yield a tensor as ``read`` has it, ``num_rows`` rows at a time; the last of them may be fewer.

        A vector comes whole: its blocks may hold several of its rows, which are single numbers.

        Raises:
            KeyError: no tensor of that name.
        """
        info = self.tensors[name]
        if len(info.shape) == 1:
            yield self.read(name)
            return
        row_bytes = info.num_bytes // info.shape[0]
        for start in range(0, info.shape[0], num_rows):
            rows = min(num_rows, info.shape[0] - start)
            yield self._numbers(info, start * row_bytes, rows * row_bytes).reshape(rows, *info.shape[1:])

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """Return the blocks of a matrix, uint8 ``[rows, bytes of a row]``, as they lie in the file.

        While anybody has them the file cannot be closed.

        Raises:
            KeyError: no tensor of that name.
        """
        info = self.tensors[name]
        raw = np.frombuffer(self._buffer, np.uint8, count=info.num_bytes, offset=info.offset_bytes)
        return raw.reshape(info.shape[0], -1)

    def _numbers(self, info: TensorInfo, start_bytes: int, num_bytes: int) -> NDArray[np.float32]:
        raw = np.frombuffer(self._buffer, np.uint8, count=num_bytes, offset=info.offset_bytes + start_bytes)
        return DEQUANTIZE[info.kind.name](raw.reshape(-1, info.kind.block_bytes))
