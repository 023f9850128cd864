"""Codecs: how many bytes the K or the V of one head and token takes, scales included."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CODECS", "KV_CACHE_DTYPES", "Codec", "num_wide", "plain_codec"]

_WIDE_BITS = 8


def num_wide(num_elements: int) -> int:
    """Return how many elements of a vector of two widths have 8 bits: 3 of 16, up to a multiple of 4.

    The others come in pairs then, where a vector has a multiple of 4.
    """
    return min(num_elements, 4 * -(-3 * num_elements // 64))


_RESIDUAL_BYTES = 2
"""Bytes of an element of a block that is not sealed yet: 16 bit."""


@dataclass(frozen=True, slots=True)
class Codec:
    """How elements of K and V are stored.

    Attributes:
        name: vLLM's name of the cache dtype where it has one.
        element_bits: bits of one element.
        scale_group: elements that share a scale; 0 for all elements of a head and token.
        scale_bytes: bytes of one scale, with its zero point where there is one; 0 for none.
        values: how V is stored where it differs from K; None for alike.
        has_wide: whether :func:`num_wide` elements of a vector have 8 bits instead.
        channel_tokens: tokens that share K's scale in each channel; 0 where a scale is a token's. They are those of a
            block, which is *sealed* when it is full: until then its K and V are elsewhere, in 16 bit (its *residual*).
    """

    name: str
    element_bits: int
    scale_group: int = 0
    scale_bytes: int = 0
    values: Codec | None = None
    has_wide: bool = False
    channel_tokens: int = 0

    def in_blocks(self, block_size: int) -> Codec:
        """Return the codec as it is in blocks of so many tokens."""
        return replace(self, channel_tokens=block_size) if self.channel_tokens else self

    def key_bytes(self, num_elements: int) -> int:
        """Return the bytes of the K of one head and token: elements in whole bytes, then scales."""
        if num_elements == 0:
            return 0
        wide = num_wide(num_elements) if self.has_wide else 0
        elements = -(-(wide * _WIDE_BITS + (num_elements - wide) * self.element_bits) // 8)
        if self.channel_tokens:  # a token's share of what its block has once
            return elements + -(-num_elements * self.scale_bytes // self.channel_tokens)
        num_scales = -(-num_elements // self.scale_group) if self.scale_group else 1
        return elements + num_scales * self.scale_bytes

    def value_bytes(self, num_elements: int) -> int:
        """Return the bytes of the V of one head and token."""
        return (self.values or self).key_bytes(num_elements)

    def residual_bytes(self, num_elements: int) -> int:
        """Return the bytes of so many elements of a block that is not sealed yet; 0 where blocks are not sealed."""
        return _RESIDUAL_BYTES * num_elements if self.channel_tokens else 0

    def bits_per_element(self, num_elements: int) -> float:
        """Return the bits that an element takes with its share of the scales, of K and V together."""
        return 4 * (self.key_bytes(num_elements) + self.value_bytes(num_elements)) / num_elements


def plain_codec(element_bytes: int) -> Codec:
    """Return the codec of elements as they are computed, without scales."""
    return Codec(f"{8 * element_bytes} bit", 8 * element_bytes)


_INT4_VALUES = Codec("int4 with a scale", 4, scale_bytes=2)

_ALL = (
    Codec("float64", 64),
    Codec("float32", 32),
    Codec("float16", 16),
    Codec("bfloat16", 16),
    # One scale a layer, which is no part of a block.
    Codec("fp8", 8),
    Codec("fp8_e4m3", 8),
    Codec("fp8_e5m2", 8),
    # A scale in 16 bit for each token and head.
    Codec("fp8_per_token_head", 8, scale_bytes=2),
    Codec("int8_per_token_head", 8, scale_bytes=2),
    # A scale in 16 bit for each token and head; K's first elements, of its own basis, have 8 bits.
    Codec("int4_per_token_head", 4, scale_bytes=2, values=_INT4_VALUES, has_wide=True),
    # K as int8_per_token_head, V as int4_per_token_head.
    Codec("k8v4", 8, scale_bytes=2, values=_INT4_VALUES),
    # A scale and a zero point, in 16 bit each, for each token and head.
    Codec("int4_plain", 4, scale_bytes=4),
    # KIVI: K with a scale and a zero point for each channel of a block, V with one of each for each token and head.
    Codec("kivi2", 2, scale_bytes=4, values=Codec("kivi2", 2, scale_bytes=4), channel_tokens=16),
    # A scale in 16 bit and a zero point in 16 bit for 128 elements.
    Codec("int4_g128", 4, scale_group=128, scale_bytes=4),
    # llama.cpp's blocks of 32 elements with a scale in 16 bit.
    Codec("q8_0", 8, scale_group=32, scale_bytes=2),
    Codec("q4_0", 4, scale_group=32, scale_bytes=2),
    # Blocks of 16 elements with a scale in 8 bit.
    Codec("nvfp4", 4, scale_group=16, scale_bytes=1),
)

CODECS: Mapping[str, Codec] = MappingProxyType({codec.name: codec for codec in _ALL})
"""Every codec that bytes are known of. Which of them a server runs is another question."""

KV_CACHE_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        name: name
        for name in (
            "float16",
            "bfloat16",
            "fp8",
            "fp8_e4m3",
            "fp8_e5m2",
            "fp8_per_token_head",
            "int8_per_token_head",
            "k8v4",
            "int4_per_token_head",
            "int4_plain",
            "kivi2",
        )
    }
    | {"fp16": "float16", "bf16": "bfloat16", "int8": "int8_per_token_head", "int4": "int4_per_token_head"}
)
"""What ``--kv-cache-dtype`` of a server takes beside ``auto``, and the codec that each is."""
