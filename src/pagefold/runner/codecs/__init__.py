"""Codecs: how K and V are stored in blocks. Their bytes are ``kv/codec.py``'s, where the planner finds them too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pagefold.runner.codecs.basis import into_basis
from pagefold.runner.codecs.floats import Float
from pagefold.runner.codecs.fp8 import ScaledFloat8
from pagefold.runner.codecs.hadamard import hadamard
from pagefold.runner.codecs.int2 import Int2
from pagefold.runner.codecs.int4 import Int4
from pagefold.runner.codecs.int4_symmetric import Int4Symmetric
from pagefold.runner.codecs.int8 import Int8
from pagefold.runner.codecs.two_widths import TwoWidths

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagefold.runner.codecs.vectors import VectorFormat

__all__ = ["CELL_CODECS", "CellCodec"]


@dataclass(frozen=True, slots=True)
class CellCodec:
    """How the K and the V of a cell are stored.

    Attributes:
        keys, values: their formats.
        rotates: whether both are rotated first (see ``hadamard.py``).
        centres: whether constants of their channels are taken off before (see ``constants.py``).
        has_basis: whether K is brought into a basis of its own instead of being rotated (see ``basis.py``).
        seals: whether K's scales are those of channels, over the tokens of a block (see ``sealed_slab.py``).
    """

    keys: VectorFormat
    values: VectorFormat
    rotates: bool = False
    centres: bool = False
    has_basis: bool = False
    seals: bool = False

    @property
    def codes_a_byte(self) -> int:
        """How many codes a byte of K or V holds, at most."""
        return max(1, 8 // min(self.keys.bits, self.values.bits))

    def key_scale_bytes(self, head_dim: int, block_size: int) -> int:
        """Return the bytes of K's scales and zero points in a block."""
        return 2 * self.keys.num_scales * (head_dim if self.seals else block_size)

    def keys_as_stored(self, keys: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
        """Return keys ``[n, D]``, centred or not, in their cell's ``basis`` ``[D, D]``, or rotated, or as they are."""
        if self.has_basis:
            return into_basis(keys, basis)
        return hadamard(keys) if self.rotates else keys

    def values_as_stored(self, values: torch.Tensor) -> torch.Tensor:
        """Return values ``[n, D]``, centred or not, rotated, or as they are."""
        return hadamard(values) if self.rotates else values

    def cannot_pack(self, head_dim: int) -> str:
        """Return what a head must be, where one of ``head_dim`` cannot be stored; else nothing."""
        return self.keys.cannot_pack(head_dim) or self.values.cannot_pack(head_dim)


_FLOAT32, _FLOAT16, _BFLOAT16 = Float(0, torch.float32), Float(1, torch.float16), Float(2, torch.bfloat16)
_INT8, _INT4, _INT4_SYMMETRIC, _INT2 = Int8(), Int4(), Int4Symmetric(), Int2()
_E4M3, _E5M2, _SCALED = Float(5, torch.float8_e4m3fn), Float(6, torch.float8_e5m2), ScaledFloat8()

CELL_CODECS: Mapping[str, CellCodec] = {
    "float32": CellCodec(_FLOAT32, _FLOAT32),
    "float16": CellCodec(_FLOAT16, _FLOAT16),
    "bfloat16": CellCodec(_BFLOAT16, _BFLOAT16),
    "int8_per_token_head": CellCodec(_INT8, _INT8),
    "int4_per_token_head": CellCodec(TwoWidths(), _INT4_SYMMETRIC, rotates=True, centres=True, has_basis=True),
    "int4_plain": CellCodec(_INT4, _INT4),
    "k8v4": CellCodec(_INT8, _INT4_SYMMETRIC, rotates=True, centres=True),
    "kivi2": CellCodec(_INT2, _INT2, centres=True, seals=True),
    "fp8": CellCodec(_E4M3, _E4M3),
    "fp8_e4m3": CellCodec(_E4M3, _E4M3),
    "fp8_e5m2": CellCodec(_E5M2, _E5M2),
    "fp8_per_token_head": CellCodec(_SCALED, _SCALED),
}
"""What can be run, by the names of ``kv/codec.py``."""
