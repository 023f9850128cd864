"""What a prefix's blocks must become to be used with another layout, if that can be: blocks of another size.

Only what changes no bit of any output is converted. The numbers of a block are those of its tokens, whatever its size:
our attention cuts a sequence at fixed entries (``runner/attention/dealing.py``), not where its blocks end. So where
they are stored as they were computed, a block of another size is the same numbers in another order. All else is other
numbers: another dtype or codec rounds what the layers before have computed already, and other weights or another
decoder compute something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pagefold.errors import PrefixMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pagefold.store.prefix_layout import PrefixLayout

__all__ = ["PAIRS", "PANELS", "Conversion", "conversion_of"]

PANELS, PAIRS = "panels-v1", "pairs-v1"
"""Arrangements of numbers as they were computed on a CPU: those of ``runner/slab.py``."""

_ELEMENT_BYTES = {"torch.float32": 4, "torch.bfloat16": 2}
"""What the fused decoder computes in."""
_TOKENS_A_WORD = {PANELS: 1, PAIRS: 2}
_MOST_SHOWN = 24
_MOST_BLOCK_SIZE = 256


class Conversion(NamedTuple):
    """From blocks of one layout to those of another.

    Attributes:
        source, target: the layouts.
    """

    source: PrefixLayout
    target: PrefixLayout

    @property
    def num_joined(self) -> int:
        """How many blocks become one."""
        return max(1, self.target.block_size // self.source.block_size)

    @property
    def num_parts(self) -> int:
        """How many blocks one becomes."""
        return max(1, self.source.block_size // self.target.block_size)

    def join(self, payloads: Sequence[bytes]) -> bytes:
        """Return ``num_joined`` blocks, one behind the other, as one."""
        if len(payloads) == 1:
            return payloads[0]
        found = [_numbers(payload, self.source) for payload in payloads]
        return _block(np.concatenate([k for k, _ in found], axis=2), np.concatenate([v for _, v in found], axis=1))

    def part(self, payload: bytes, index: int) -> bytes:
        """Return one of the ``num_parts`` blocks that a block becomes."""
        if self.num_parts == 1:
            return payload
        keys, values = _numbers(payload, self.source)
        size, words = self.target.block_size, self.target.block_size // _TOKENS_A_WORD[self.source.arrangement]
        return _block(keys[:, :, index * size : (index + 1) * size], values[:, index * words : (index + 1) * words])


def conversion_of(source: PrefixLayout, target: PrefixLayout, what: str) -> Conversion:
    """Return how blocks of ``source`` become those of ``target``.

    Args:
        source: the layout of a file.
        target: the layout that is wanted.
        what: is told of: the file's name.

    Raises:
        PrefixMismatchError: they cannot; names what is other, with both values.
    """
    compared = [
        ("model", _of_model(source), _of_model(target), source.model == target.model),
        ("dtype", source.dtype, target.dtype, source.dtype == target.dtype),
        ("codec and arrangement", source.arrangement, target.arrangement, source.arrangement == target.arrangement),
        ("decoder", source.decoder, target.decoder, source.decoder == target.decoder),
    ]
    other = [f"its {name} is {theirs}, and here {here}" for name, theirs, here, is_same in compared if not is_same]
    if other:
        msg = f"{what} cannot be used here: {'; '.join(other)}."
        raise PrefixMismatchError(msg, remedy="Export it again from a server like this one.")
    if source.block_size != target.block_size:
        why = _why_one_size(source) or _why_one_size(target)
        if why:
            sizes = f"its blocks have {source.block_size} tokens, and here they have {target.block_size}"
            msg = f"{what} cannot be used here: {sizes}, which cannot be changed without loss: {why}."
            raise PrefixMismatchError(msg, remedy=f"Use --block-size {source.block_size} here, or export it again.")
        source_size = source.of_size(target.block_size)
    else:
        source_size = source
    if source_size._replace(label="") != target._replace(label=""):
        msg = (
            f"{what} cannot be used here: its blocks have {source_size.block_bytes:,} bytes and heads of "
            f"{source.head_dim}, and here they have {target.block_bytes:,} and {target.head_dim}."
        )
        raise PrefixMismatchError(msg, remedy="Export it again from a server like this one.")
    return Conversion(source, target)


def _of_model(layout: PrefixLayout) -> str:
    label = f" ({layout.label})" if layout.label else ""
    shown = layout.model if len(layout.model) <= _MOST_SHOWN else f"{layout.model[:_MOST_SHOWN]}..."
    return f"{shown}{label}"


def _why_one_size(layout: PrefixLayout) -> str:
    """Return why the size of a layout's blocks cannot be changed without loss; empty if it can."""
    words = _TOKENS_A_WORD.get(layout.arrangement)
    if words is None:
        return f"{layout.arrangement} are not numbers as they were computed on a CPU"
    if not layout.decoder.startswith("fused: "):
        return f"with {layout.decoder or 'this decoder'} it may change what is computed"
    size, element_bytes = layout.block_size, _ELEMENT_BYTES.get(layout.dtype)
    if element_bytes is None:
        return f"it is not known for {layout.dtype}"
    of_cell = 2 * size * layout.head_dim * element_bytes
    is_whole = layout.block_bytes % of_cell == 0 and layout.head_dim % words == 0 and size % words == 0
    if not is_whole or size & (size - 1) or size > _MOST_BLOCK_SIZE:
        return "the sizes of its blocks and heads do not go together"
    return ""


def _numbers(payload: bytes, layout: PrefixLayout) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return views of a block's K, words ``[num_cells, of a token, slot]``, and V, ``[num_cells, slot, of a token]``.

    Of pairs a word is two numbers: of K of one token, of V of two tokens, which are one slot here.
    """
    per_word = _TOKENS_A_WORD[layout.arrangement]
    word = np.dtype(f"u{per_word * _ELEMENT_BYTES[layout.dtype]}")
    size, head_dim = layout.block_size, layout.head_dim
    cells = np.frombuffer(payload, word).reshape(-1, 2, size * head_dim // per_word)
    keys = cells[:, 0].reshape(len(cells), head_dim // per_word, size)
    return keys, cells[:, 1].reshape(len(cells), size // per_word, head_dim)


def _block(keys: NDArray[Any], values: NDArray[Any]) -> bytes:
    """Return the block of these numbers."""
    num_cells = len(keys)
    return np.stack([keys.reshape(num_cells, -1), values.reshape(num_cells, -1)], axis=1).tobytes()
