"""Dense twin: transformers' model with an attention that loops over heads under an explicit mask, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

    from pagefold.masks.watched_model import Entering, SeenRows

__all__ = ["ExplicitMask", "dense_logits"]


class ExplicitMask:
    """All bits written out: bool ``[L, Hkv, T, T]``."""

    def __init__(self, bits: torch.Tensor) -> None:
        self.bits = bits

    def of_layer(self, entering: Entering) -> SeenRows:
        return lambda first, last: self.bits[entering.layer, :, first:last, :last]


def dense_logits(folder: Path, token_ids: list[int], bits: torch.Tensor) -> torch.Tensor:
    """Return logits ``[T, vocab]`` in float64 under ``bits`` ``[L, Hkv, T, T]``, and causality."""

    def attend(module, query, key, value, attention_mask, *, scaling, **_arguments):
        group = query.shape[1] // key.shape[1]
        num = query.shape[2]
        heads = []
        for head in range(query.shape[1]):
            scores = query[0, head] @ key[0, head // group].T * scaling
            hidden = ~(bits[module.layer_idx, head // group] & torch.ones(num, num, dtype=torch.bool).tril())
            heads.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value[0, head // group])
        return torch.stack(heads, 1)[None], None

    AttentionInterface.register("dense_twin", attend)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="dense_twin").eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0]
