"""StreamingTwin: greedy outputs with sink tokens and a window, as the paper has it: the slow twin of ``streaming_llm``.

StreamingLLM (Xiao et al., 2023, section 3.2) caches K before rope, and turns it, and the query, by their places in the
cache: the sink tokens first, then the window. So here the model's rope is taken out of its layers, transformers' own
cache keeps K as it was before it, and every query turns all that it sees anew. Layers that have windows of their own
turn by position, as the model does.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from equivalence.references import References

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["StreamingTwin"]

_NUMBERS = count()


class StreamingTwin(References):
    """See :class:`References`; but layers that attend to all see ``num_sinks`` and ``window`` tokens.

    Args:
        folder, num_outputs: as there.
        window: the last so many tokens, the query's own included.
        num_sinks: the first so many.
    """

    def __init__(self, folder: Path, num_outputs: int, window: int, num_sinks: int) -> None:
        super().__init__(folder, num_outputs)
        self._window, self._num_sinks = window, num_sinks
        self._positions = torch.zeros(0, dtype=torch.int64)
        self._family = sys.modules[type(self.model).__module__]
        self._turns = self.model.config.model_type != "llama4_text"  # whose layers with rope have chunks: it is let be
        if self._turns:
            self._take_rope_out()
        name = f"streaming_twin_{next(_NUMBERS)}"  # names are known to all models
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, eager_mask)
        self.model.set_attn_implementation(name)

    def _take_rope_out(self) -> None:
        rope = self.model.model.rotary_emb
        self._rope = rope.forward

        def none(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **others: Any) -> Any:
            self._positions = position_ids[0]
            cosines, sines = self._rope(x, position_ids, *args, **others)
            return torch.ones_like(cosines), torch.zeros_like(sines)

        rope.forward = none

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        config, layer = self.model.config, int(module.layer_idx)
        kind = (getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)[layer]
        num_queries, num_keys = query.shape[2], key.shape[2]
        group = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(group, dim=1) for states in (key, value))
        out = torch.empty_like(query)
        has_rope = self._turns and not (config.model_type == "cohere2" and kind == "full_attention")
        by_layer = {"layer_type": kind} if isinstance(next(iter(config.rope_parameters.values())), dict) else {}
        for i in range(num_queries):
            at = num_keys - num_queries + i  # of the keys that are there, the query's own
            if kind == "full_attention":
                begin = max(0, at + 1 - self._window)
                seen = torch.tensor([*range(min(begin, self._num_sinks)), *range(begin, at + 1)])
                places = torch.arange(len(seen))
            else:
                assert attention_mask is not None
                seen = (attention_mask[0, 0, i, :num_keys] == 0).nonzero()[:, 0]
                places = seen
            queries, keys = query[:, :, i : i + 1], key[:, :, seen]
            if has_rope:
                cosines, sines = self._rope(query, places[None], **by_layer)
                rotate = self._family.apply_rotary_pos_emb
                queries, _ = rotate(queries, queries, cosines[:, -1:], sines[:, -1:])
                keys, _ = rotate(keys, keys, cosines, sines)
            scores = queries @ keys.mT * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if s_aux is not None:
                scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).to(scores)), -1)
            weights = scores.softmax(-1)[..., : len(seen)]
            out[:, :, i : i + 1] = weights @ value[:, :, seen]
        return out.transpose(1, 2).contiguous(), None
