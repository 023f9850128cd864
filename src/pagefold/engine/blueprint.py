"""Blueprint: all that is decided of an engine before weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.memory.limit import Limit

if TYPE_CHECKING:
    import torch

    from pagefold.config import EngineConfig
    from pagefold.engine.adapters import AdapterPlan
    from pagefold.engine.masking import EngineMask
    from pagefold.kv import KVGeometry
    from pagefold.memory.capacity import Capacity
    from pagefold.runner.card import Card
    from pagefold.runner.codecs.constants import CodecConstants
    from pagefold.runner.fused.formats import DecoderFormats
    from pagefold.runner.models import ModelSpec

__all__ = ["Blueprint", "without_windows"]


@dataclass(frozen=True, slots=True)
class Blueprint:
    """All that is decided of an engine before weights are loaded.

    Attributes:
        config: what was asked.
        spec: the model.
        geometry: of its KV.
        capacity: what fits.
        dtype: of weights, activations and KV.
        not_fused: why the fused decoder does not compute it, and transformers does; empty where it does.
        constants: what codecs know of the model (see ``calibration.py``); None for nothing, or not known yet.
        device: ``cpu`` or ``cuda``.
        draft: the model that drafts for it; None for none.
        adapters: what is known of LoRA adapters; None where requests may name none.
        mask: by what older tokens are kept; None where all are.
        card: the one that it runs on; None on a CPU. Its ``capacity`` follows from bounds until the rest is measured.
    """

    config: EngineConfig
    spec: ModelSpec
    geometry: KVGeometry
    capacity: Capacity
    dtype: torch.dtype
    not_fused: str = ""
    device: str = "cpu"
    card: Card | None = None
    constants: CodecConstants | None = None
    draft: Blueprint | None = None
    mask: EngineMask | None = None
    adapters: AdapterPlan | None = None

    @property
    def is_fused(self) -> bool:
        """Whether the fused decoder computes it, rather than transformers."""
        return not self.not_fused

    @property
    def computes_pairs(self) -> bool:
        """Whether attention multiplies pairs of bfloat16, which lie in blocks as such."""
        return self.is_fused and str(self.dtype) == "torch.bfloat16"

    @property
    def formats(self) -> DecoderFormats:
        """In which formats the fused decoder has the model's matrices."""
        from pagefold.runner.fused.formats import decoder_formats  # noqa: PLC0415 - kernels come with it

        return decoder_formats(str(self.dtype).removeprefix("torch."), self.config.quantization)

    @property
    def computes_windows(self) -> bool:
        """Whether the model's windows are computed as such, as far as any sequence passes them."""
        return bool(self.spec.keeps) and not without_windows(self.config)

    @property
    def limit(self) -> Limit:
        """Up to which length it is computed as it is meant."""
        spec = self.spec
        if self.config.streaming_llm is not None:
            is_asked = isinstance(self.config.max_model_len, int)
            return spec.endless_limit if is_asked else min(spec.endless_limit, Limit(spec.max_positions))
        if self.computes_windows:
            return spec.windowed_limit
        could_be_longer = spec.max_exact_len < spec.windowed_limit.length
        setting = without_windows(self.config) if could_be_longer else ""
        return Limit(spec.max_exact_len, spec.limit, setting)


def without_windows(config: EngineConfig) -> str:
    """Return the setting beside which windows are not computed, as what streams knows one group; empty for none."""
    return "allow_streaming" if config.allow_streaming else ""
