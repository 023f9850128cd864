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

__all__ = ["PACKED_DTYPES", "Blueprint", "why_not_packed", "without_windows"]

PACKED_DTYPES = "float32", "bfloat16"
"""What the fused decoder and packed layers compute in."""
_SLOTS, _NUMBERS = 4, 8
"""Of how many slots and numbers blocks of pairs are made."""


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
    def packs(self) -> bool:
        """Whether transformers computes it with packed layers."""
        return not self.is_fused and not why_not_packed(self.config, str(self.dtype), self.device)

    @property
    def computes_pairs(self) -> bool:
        """Whether attention multiplies pairs of bfloat16, which lie in blocks as such."""
        if str(self.dtype) != "torch.bfloat16":
            return False
        config = self.config
        has_words = config.block_size % _SLOTS == 0 and self.spec.head_dim % _NUMBERS == 0
        return self.is_fused or (self.packs and has_words and config.attention_backend != "reference")

    @property
    def arithmetic(self) -> str:
        """What decides the bits of products, the fused decoder's or those of packed layers; empty for torch's own."""
        return self.formats.arithmetic if self.is_fused or self.packs else ""

    @property
    def formats(self) -> DecoderFormats:
        """In which formats the fused decoder, or packed layers, have the model's matrices."""
        from pagefold.runner.fused.formats import decoder_formats  # noqa: PLC0415 - kernels come with it

        dtype = str(self.dtype).removeprefix("torch.")
        kinds = self.spec.stored_kinds if self.is_fused else {}  # packed layers get dequantized tensors
        return decoder_formats(dtype, self.config.quantization, kinds)

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


def why_not_packed(config: EngineConfig, dtype: str, device: str) -> str:
    """Return what packed layers do not go with; empty if they are there.

    Args:
        config: what was asked.
        dtype: of weights and activations, with or without ``torch.`` before it.
        device: ``cpu`` or ``cuda``.
    """
    from pagefold.runner.fused.formats import processor_lacks  # noqa: PLC0415 - kernels come with it

    dtype = dtype.removeprefix("torch.")
    if device != "cpu":
        return f"device={device} (they are computed on CPUs)"
    if dtype not in PACKED_DTYPES:
        return f"dtype={dtype} (they are computed in {' and '.join(PACKED_DTYPES)})"
    lacking = processor_lacks(dtype, config.quantization)
    return f"a processor without {lacking}" if lacking else ""


def without_windows(config: EngineConfig) -> str:
    """Return the setting beside which windows are not computed, as what streams knows one group; empty for none."""
    return "allow_streaming" if config.allow_streaming else ""
