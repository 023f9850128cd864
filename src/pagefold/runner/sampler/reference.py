"""The race in plain torch, on any device: slow and obvious. The tests hold the kernel to it, token for token."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from pagefold.runner.sampler.draws import GOLDEN, MIX_1, MIX_2, REACHED
from pagefold.runner.to_device import put

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefold.runner.sampler.draws import Draws

__all__ = ["draw_tokens", "exponential_noise", "race_tokens"]


def draw_tokens(logits: torch.Tensor, draws: Draws) -> NDArray[np.int64]:
    """Return a token id for each draw, -1 where the row has no distribution.

    Args:
        logits: ``[R, vocab]``, any float dtype; drawn from as float32, in float64.
        draws: of ``D`` of the rows.
    """
    return cast("NDArray[np.int64]", race_tokens(logits, draws).cpu().numpy())


def race_tokens(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Do the same where the logits are, and leave it there: int64 ``[D]``. The host waits for nothing."""
    device = logits.device
    if not logits.shape[-1]:
        return torch.full((len(draws.rows),), -1, device=device)
    kept = logits[put(draws.rows, device)].float().double()
    top = kept.amax(-1, keepdim=True)  # NaN if one is
    inverse_temperatures = put(draws.inverse_temperatures, device)[:, None]
    least = put(draws.log_min_p, device)[:, None]
    kept = kept.masked_fill((kept - top) * inverse_temperatures < least, float("-inf"))
    if draws.top_k.any() or (draws.top_p < 1.0).any():
        kept = _cut(kept, top, inverse_temperatures, draws)
    keys = put(draws.keys.view(np.int64), device)
    finish = (kept - top) * inverse_temperatures - exponential_noise(keys, logits.shape[-1]).log()
    return finish.argmax(-1).where(top[:, 0].isfinite(), -1)


def _cut(kept: torch.Tensor, top: torch.Tensor, inverse_temperatures: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Put minus infinity for what top_k and then top_p cut: ``[D, vocab]`` to the same. Of equals the first stay."""
    device, num_tokens = kept.device, kept.shape[-1]
    top_k = put(np.where(draws.top_k > 0, draws.top_k, num_tokens), device)[:, None]
    top_p = put(np.where(draws.top_p < 1.0, draws.top_p * REACHED, np.inf), device)[:, None]
    ordered, order = kept.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(torch.arange(num_tokens, device=device) >= top_k, float("-inf"))
    weights = ((ordered - top) * inverse_temperatures).exp()
    mass_before = weights.cumsum(-1) - weights
    ordered = ordered.masked_fill(mass_before >= top_p * weights.sum(-1, keepdim=True), float("-inf"))
    return ordered.scatter(-1, order, ordered)


def exponential_noise(keys: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the noise of each key's tokens: int64 ``[D]`` to float64 ``[D, num_tokens]``."""
    tokens = torch.arange(1, num_tokens + 1, device=keys.device)
    bits = keys[:, None] + tokens * _signed(GOLDEN)
    bits = (bits ^ _shifted(bits, 30)) * _signed(MIX_1)
    bits = (bits ^ _shifted(bits, 27)) * _signed(MIX_2)
    bits = bits ^ _shifted(bits, 31)
    uniforms = (_shifted(bits, 12).double() + 0.5) * 2.0**-52
    return -torch.log1p(-uniforms)


def _shifted(bits: torch.Tensor, places: int) -> torch.Tensor:
    """Shift to the right with zeros from the left: torch has no arithmetic of unsigned numbers."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
