"""StoredMatrix: a matrix as a file has it, in blocks of one of GGML's kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["StoredMatrix"]


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    """A quantized matrix ``[N, K]``.

    Attributes:
        kind: of its blocks, by GGML's name: ``Q4_0``, ``Q4_1``, ``Q5_0``, ``Q5_1``, ``Q8_0``, ``Q4_K``, ``Q5_K`` or
            ``Q6_K``.
        shape: N and K.
        blocks: uint8 ``[N, bytes of a row]``, mapped where a file has them so.
        row_order: row i of the model is row ``row_order[i]`` of ``blocks``; None where they are in the model's order.
    """

    kind: str
    shape: tuple[int, int]
    blocks: NDArray[np.uint8]
    row_order: NDArray[np.int64] | None = None
