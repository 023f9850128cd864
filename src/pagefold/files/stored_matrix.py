"""StoredMatrix: a quantized matrix as a file has it. Nobody has expanded it, and nobody has copied it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["StoredMatrix"]


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    """A matrix of N rows of K numbers, each row in blocks of its kind.

    Attributes:
        kind: GGML's name of the kind of blocks, such as ``Q4_K``.
        shape: N and K.
        blocks: uint8 ``[N, bytes of a row]``, as in the file, which they are mapped from: nobody writes to them.
        row_order: int64 ``[N]``: row i of the model is row ``row_order[i]`` of ``blocks``; None where rows lie in the
            model's order.
    """

    kind: str
    shape: tuple[int, int]
    blocks: NDArray[np.uint8]
    row_order: NDArray[np.int64] | None = None
