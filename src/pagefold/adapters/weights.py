"""AdapterWeights: the matrices of an adapter, as its file has them, and what names them whatever their folder."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import numpy as np

from pagefold.errors import AdapterError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefold.adapters.folder import AdapterFolder, TensorAt

__all__ = ["AdapterWeights"]

_KINDS: dict[str, type] = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16}
_EXPONENT = {"F32": (np.uint32, 0x7F800000), "BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00)}
"""Of each dtype the bits of the exponent: all set in what is no finite number."""
_DIGEST_BYTES = 16


class AdapterWeights:
    """An adapter, read whole.

    Args:
        adapter: what its folder says.

    Attributes:
        adapter: as given.
        fingerprint: of all that decides what it computes: weights, and what they are multiplied by.

    Raises:
        AdapterError: the file cannot be read, is another one now, or has numbers that are not finite.
    """

    def __init__(self, adapter: AdapterFolder) -> None:
        self.adapter = adapter
        try:
            content = adapter.file.read_bytes()
        except OSError as error:
            msg = f"{adapter.file} cannot be read: {error.strerror}."
            raise AdapterError(msg, remedy="Check the file and its rights.") from None
        begin = 8 + len(adapter.header)
        if content[8:begin] != adapter.header or len(content) < begin + adapter.num_bytes:
            msg = f"{adapter.file} has changed while it was read."
            raise AdapterError(msg, remedy="Load it again when it is whole.")
        self._data = np.frombuffer(content, np.uint8)[begin:]
        self._kind = _KINDS[adapter.dtype]
        self._check_finite()
        digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES)
        for part in adapter.parts:
            digest.update(struct.pack("<d", part.scale))
        self.fingerprint = digest.hexdigest()

    def matrix(self, at: TensorAt) -> NDArray[np.generic]:
        """Return a matrix; bfloat16 as its bits, uint16."""
        rows, columns = at.shape
        num_bytes = rows * columns * np.dtype(self._kind).itemsize
        return self._data[at.begin : at.begin + num_bytes].view(self._kind).reshape(rows, columns)

    def _check_finite(self) -> None:
        kind, exponent = _EXPONENT[self.adapter.dtype]
        for part in self.adapter.parts:
            for half, at in (("A", part.down), ("B", part.up)):
                bits = self.matrix(at).view(kind)
                if (bits & kind(exponent) == exponent).any():
                    msg = f"{self.adapter.folder} has NaN or infinity in lora_{half} of {part.place.name}."
                    raise AdapterError(msg, remedy="Train or download it again.")
