"""CodecConstants: what is known of a model's K and V, and done to them before they are encoded.

They depend on no request, so what is stored depends on no request; and their digest is part of a block's namespace.
Who measures them, ``engine/calibration.py`` says.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagefold.runner.codecs.basis import plain_basis

__all__ = ["CodecConstants"]


class CodecConstants(NamedTuple):
    """Constants of each cell.

    Attributes:
        key_centres: float32 ``[num_cells, 2, D]``: what is taken off K: off a sequence's first entry, and off all
            others. Scores of the others are all lower by the same then, and weights as they were.
        value_centres: float32 ``[num_cells, 2, D]``: the same of V. An output lacks the constants, each by the weights
            of its entries; the kernel gives them back.
        bases: float32 ``[num_cells, D, D]``: by what K is multiplied then; see ``basis.py``.
    """

    key_centres: torch.Tensor
    value_centres: torch.Tensor
    bases: torch.Tensor

    @classmethod
    def unknown(cls, num_cells: int, head_dim: int) -> CodecConstants:
        """Return those of a model that nothing is known of: nothing is taken off, and K is rotated."""
        bases = plain_basis(head_dim).expand(num_cells, head_dim, head_dim)
        return cls(torch.zeros((num_cells, 2, head_dim)), torch.zeros((num_cells, 2, head_dim)), bases)

    def where(self, known: CodecConstants, is_centred: torch.Tensor, has_basis: torch.Tensor) -> CodecConstants:
        """Return ``known`` constants where cells have use for them, bool ``[num_cells]`` each, and these elsewhere."""
        kinds = is_centred, is_centred, has_basis
        parts = zip(kinds, known, self, strict=True)
        return CodecConstants(*(torch.where(used[:, None, None], theirs, ours) for used, theirs, ours in parts))
