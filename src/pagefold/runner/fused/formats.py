"""In which formats the fused decoder has a model's matrices."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import llvmlite.binding as llvm
import numpy as np

from pagefold.kernels.block_kinds import KINDS
from pagefold.kernels.blocks import blocks_of
from pagefold.kernels.emit import IS_WIDE
from pagefold.kernels.floats import Floats, Int8Weights
from pagefold.kernels.pairs import Pairs, bfloat16_pairs, round_to_bfloat16
from pagefold.kernels.quads import int8_quads
from pagefold.kernels.rounded_blocks import rounded_blocks
from pagefold.kernels.rows import LANES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pagefold.kernels.formats import ProductFormat

__all__ = ["EMBEDDING", "HEAD", "DecoderFormats", "decoder_formats", "natural_dtype", "processor_lacks"]


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BFLOAT16_BELOW = 16
"""Bits of a float32 below those that it has as bfloat16."""


class DecoderFormats(NamedTuple):
    """Formats of a model's matrices.

    Attributes:
        products: of those that rows are multiplied with.
        embedding: of the embedding, where it is not the head's matrix too.
        stored: of tensors that are computed with as the checkpoint has them, by their names.
    """

    products: ProductFormat
    embedding: ProductFormat
    stored: Mapping[str, ProductFormat] = MappingProxyType({})

    def of(self, name: str, other: ProductFormat | None = None) -> ProductFormat:
        """Return the format of a tensor; ``other``, or that of products, where it is not computed with as it is."""
        return self.stored.get(name, other or self.products)

    @property
    def arithmetic(self) -> str:
        """What decides the bits of all that is computed with them: products, and what is done with rows between."""
        stored = sorted({one.arithmetic for one in self.stored.values()})
        texts = dict.fromkeys((self.products.arithmetic, self.embedding.arithmetic, *stored))
        return f"{', embedding in '.join(texts)}; rows in {LANES} lanes"

    def rounded(self, number: float) -> np.float32:
        """Return a number of the model as transformers has it in the dtype that is computed in."""
        exact = np.array([number], np.float32)
        if not isinstance(self.embedding, Pairs):
            return np.float32(exact[0])
        bits = round_to_bfloat16(exact).astype(np.uint32) << _BFLOAT16_BELOW
        return np.float32(bits.view(np.float32)[0])


def natural_dtype() -> str:
    """Return the dtype that this processor is fastest in: bfloat16 where an instruction multiplies it, else float32."""
    return "bfloat16" if bfloat16_pairs().is_native else "float32"


def processor_lacks(dtype: str, quantization: str | None, kinds: Collection[str] = ()) -> str:
    """Return what this processor lacks without which nothing computes in the formats; empty if it has all.

    Args:
        dtype: ``float32`` or ``bfloat16``.
        quantization: as in the config.
        kinds: of what is computed with as it is stored.
    """
    features = llvm.get_host_cpu_features()
    if dtype == "bfloat16" and not features.get("fma"):  # without, it takes ten times as long as float32
        return "FMA, with which bfloat16 is computed"
    widening = "avx512bw" if IS_WIDE else "avx2"
    for name in (quantization, *sorted(set(kinds))):
        is_of_blocks = name == "int4" or name in KINDS
        if (is_of_blocks or name == "w8a8_int8") and not features.get(widening):
            return f"{widening.upper()}, with which {name} is computed"
        if is_of_blocks and not features.get("f16c"):
            return f"F16C, with which scales of {name} are read"
    return ""


def decoder_formats(
    dtype: str, quantization: str | None, stored_kinds: Mapping[str, str] = MappingProxyType({})
) -> DecoderFormats:
    """Return the formats for what a config asks for.

    Args:
        dtype: ``float32`` or ``bfloat16``.
        quantization: as in the config.
        stored_kinds: GGML's kinds of tensors that the checkpoint has quantized, by their names.
    """
    numbers = bfloat16_pairs() if dtype == "bfloat16" else Floats()
    if quantization == "w8a8_int8":
        return DecoderFormats(int8_quads(), numbers)
    if quantization == "int8":
        return DecoderFormats(Int8Weights(), numbers)
    if quantization == "int4":
        vocabulary = rounded_blocks("Q8_0", "int8")
        return DecoderFormats(rounded_blocks("Q4_1", "int4"), numbers, {HEAD: vocabulary, EMBEDDING: vocabulary})
    stored = {name: blocks_of(kind) for name, kind in stored_kinds.items()} if quantization is None else {}
    return DecoderFormats(numbers, numbers, stored)
