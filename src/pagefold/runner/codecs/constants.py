"""CodecConstants: what is known of a model's K and V, and done to them before they are encoded.

They depend on no request, so what is stored depends on no request; and their digest is part of a block's namespace.
Who measures them, ``engine/calibration.py`` says.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagefold.runner.codecs.basis import plain_basis

__all__ = ["RANGE", "CodecConstants", "num_ranges_of"]

RANGE = 256
"""Entries that have one centre of K. Rope turns a mean with the position, so each range has its own."""


def num_ranges_of(num_positions: int) -> int:
    """Return into how many ranges positions fall; the last may have less than ``RANGE``."""
    return -(-num_positions // RANGE)


class CodecConstants(NamedTuple):
    """Constants of each cell.

    Attributes:
        key_centres: float32 ``[num_cells, 1 + R, D]``: what is taken off K: off a sequence's first entry, and off the
            others of each of the first R ranges of ``RANGE`` entries; off all that come later, what the last has.
            Scores of a range are all lower by the same then; the kernel gives back what ranges differ by.
        value_centres: float32 ``[num_cells, 2, D]``: what is taken off V: off a sequence's first entry, and off all
            others. An output lacks the constants, each by the weights of its entries; the kernel gives them back.
        bases: float32 ``[num_cells, D, D]``: by what K is multiplied then; see ``basis.py``. May be none at all where
            no cell has one.
    """

    key_centres: torch.Tensor
    value_centres: torch.Tensor
    bases: torch.Tensor

    @classmethod
    def unknown(cls, num_cells: int, head_dim: int, num_ranges: int = 1) -> CodecConstants:
        """Return those of a model that nothing is known of: nothing is taken off, and K is rotated."""
        bases = plain_basis(head_dim).expand(num_cells, head_dim, head_dim)
        nothing = torch.zeros((num_cells, 1 + num_ranges, head_dim))
        return cls(nothing, nothing[:, :2], bases)

    @classmethod
    def none(cls, num_cells: int, head_dim: int, device: torch.device) -> CodecConstants:
        """Return those of cells that take nothing off, and have no bases."""
        nothing = torch.zeros((num_cells, 2, head_dim), device=device)
        return cls(nothing, nothing, nothing.new_empty((0, head_dim, head_dim)))

    @property
    def num_ranges(self) -> int:
        """Of how many ranges K has centres."""
        return self.key_centres.shape[1] - 1

    def centre_keys(self, cell: int, entries: torch.Tensor) -> torch.Tensor:
        """Return what is taken off K, float32 ``[n, D]``, of these entries, int64 ``[n]``, of a sequence."""
        ranges = (entries // RANGE).clamp(max=self.num_ranges - 1)
        return self.key_centres[cell, torch.where(entries == 0, 0, 1 + ranges)]

    def to(self, device: torch.device) -> CodecConstants:
        """Return the same in the memory of ``device``."""
        return CodecConstants(*(one.to(device) for one in self))

    def where(self, known: CodecConstants, is_centred: torch.Tensor, has_basis: torch.Tensor) -> CodecConstants:
        """Return ``known`` constants where cells have use for them, bool ``[num_cells]`` each, and these elsewhere."""
        kinds = is_centred, is_centred, has_basis
        parts = zip(kinds, known, self, strict=True)
        return CodecConstants(*(torch.where(used[:, None, None], theirs, ours) for used, theirs, ours in parts))
