"""Blueprint: all that is decided of an engine before weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.memory.limit import Limit

if TYPE_CHECKING:
    import torch

    from pagefold.config import EngineConfig
    from pagefold.kv import KVGeometry
    from pagefold.memory.capacity import Capacity
    from pagefold.runner.card import Card
    from pagefold.runner.codecs.constants import CodecConstants
    from pagefold.runner.models import ModelSpec

__all__ = ["Blueprint"]


@dataclass(frozen=True, slots=True)
class Blueprint:
    """All that is decided of an engine before weights are loaded.

    Attributes:
        config: what was asked.
        spec: the model.
        geometry: of its KV.
        capacity: what fits.
        dtype: of weights, activations and KV.
        is_fused: whether the fused decoder computes it, rather than transformers.
        constants: what codecs know of the model (see ``calibration.py``); None for nothing, or not known yet.
        device: ``cpu`` or ``cuda``.
        card: the one that it runs on; None on a CPU. Its ``capacity`` follows from bounds until the rest is measured.
    """

    config: EngineConfig
    spec: ModelSpec
    geometry: KVGeometry
    capacity: Capacity
    dtype: torch.dtype
    is_fused: bool
    device: str = "cpu"
    card: Card | None = None
    constants: CodecConstants | None = None

    @property
    def limit(self) -> Limit:
        """Up to which length it is computed as it is meant."""
        spec = self.spec
        if self.geometry.keeps:
            return spec.windowed_limit
        could_be_longer = bool(spec.keeps) and spec.max_exact_len < spec.windowed_limit.length
        setting = "allow_streaming" if self.config.allow_streaming and could_be_longer else ""
        return Limit(spec.max_exact_len, spec.limit, setting)
