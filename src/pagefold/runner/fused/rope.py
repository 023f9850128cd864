"""The table of cosines and sines of a rope: equal to the bit to what transformers' models compute."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from pagefold.runner.fused.families import FusedConfig, Rope

__all__ = ["rope_table"]


def rope_table(config: FusedConfig, folder: Path, num_positions: int) -> NDArray[np.float32]:
    """Return cosines and sines, float32 ``[positions, 2, D]``.

    Args:
        config: of the model.
        folder: the model's: kinds that are not computed here are computed by transformers, from its ``config.json``.
        num_positions: how many positions, from 0 on.
    """
    rope, scale = config.rope, 1.0
    if rope.kind == "default":
        frequencies = _frequencies(rope.theta, config.head_dim)
    elif rope.kind == "llama3":
        frequencies = _llama3_frequencies(rope, config.head_dim)
    else:
        frequencies, scale = _frequencies_of_transformers(rope.kind, folder)
    assert len(frequencies) * 2 == config.head_dim, "a rope of a part of the head"
    angles = torch.arange(num_positions)[:, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack([angles.cos() * scale, angles.sin() * scale], dim=1).numpy()


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


def _frequencies_of_transformers(kind: str, folder: Path) -> tuple[torch.Tensor, float]:
    """Return frequencies and what cosines and sines are multiplied by."""
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds, and few models need it
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](AutoConfig.from_pretrained(folder))
    return frequencies, scale
