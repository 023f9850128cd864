"""Tables of cosines and sines of ropes: equal to the bit to what transformers' models compute."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from pagefold.runner.fused.families import FusedConfig, Rope

__all__ = ["rope_tables"]


def rope_tables(config: FusedConfig, folder: Path, num_positions: int) -> NDArray[np.float32]:
    """Return cosines and sines of all ropes of a model, float32 ``[ropes, positions, 2, D]``.

    Args:
        config: of the model.
        folder: the model's: kinds that are not computed here are computed by transformers, from its ``config.json``.
        num_positions: how many positions, from 0 on.
    """
    positions = torch.arange(num_positions)[:, None].float()
    tables = []
    for rope in config.ropes:
        frequencies, scale = _frequencies_of(rope, config.head_dim, folder)
        assert len(frequencies) * 2 == config.head_dim, "a rope of a part of the head"
        angles = positions * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        tables.append(torch.stack([angles.cos() * scale, angles.sin() * scale], dim=1))
    return torch.stack(tables).numpy()


def _frequencies_of(rope: Rope, head_dim: int, folder: Path) -> tuple[torch.Tensor, float]:
    """Return a rope's radians a position, float32 ``[D / 2]``, and what cosines and sines are multiplied by."""
    if rope.kind == "default":
        return _frequencies(rope.theta, head_dim), 1.0
    if rope.kind == "linear":
        return _frequencies(rope.theta, head_dim) / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, head_dim), 1.0
    return _frequencies_of_transformers(rope, folder)


def _frequencies(theta: float, head_dim: int) -> torch.Tensor:
    """Return float32 ``[D / 2]``: radians a position."""
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim))


def _llama3_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return Llama 3.1's: long wavelengths are stretched by ``factor``, short ones not, and those between in part.

    The order of operations is that of transformers' ``modeling_rope_utils``, so that the bits are too.
    """
    frequencies = _frequencies(rope.theta, head_dim)
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    share = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - share) * stretched / rope.factor + share * stretched
    is_between = ~(wavelengths < shortest) & ~(wavelengths > longest)
    return torch.where(is_between, between, stretched)


def _frequencies_of_transformers(rope: Rope, folder: Path) -> tuple[torch.Tensor, float]:
    """Return frequencies and what cosines and sines are multiplied by."""
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds, and few models need it
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    of_layers = {"layer_type": rope.layer_type} if rope.layer_type else {}
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope.kind](AutoConfig.from_pretrained(folder), **of_layers)
    return frequencies, scale
