"""References: what transformers' own ``generate`` says, prompt by prompt, alone. The slow twin of every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["References"]

_EXACT = "exact"
_EXACT_AS_THEY_ARE = ("gpt_oss",)


class References:
    """Greedy outputs of one model, each computed once.

    Args:
        folder: the model's.
        num_outputs: how many tokens to generate.
        dtype: of weights and arithmetic.

    Attributes:
        model: transformers' model, with transformers' own attention; where that rounds to float32 whatever the dtype
            is, with the same formula without that. Masks are transformers' own in any case.
        eos_token_ids: what the model's generation config says.
        smallest_gap: between the best and the second logit, over all that was generated. Equality is only asked for
            where this is far above rounding.
    """

    def __init__(self, folder: Path, num_outputs: int, dtype: torch.dtype = torch.float64) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
        from transformers.masking_utils import eager_mask

        experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **experts)
        is_eager = self.model.config._attn_implementation == "eager"  # torch's own attention cannot compute the model
        if is_eager and self.model.config.model_type not in _EXACT_AS_THEY_ARE:
            AttentionInterface.register(_EXACT, _exact_attention)
            AttentionMaskInterface.register(_EXACT, eager_mask)
            self.model.set_attn_implementation(_EXACT)
        self.num_outputs = num_outputs
        self.eos_token_ids = frozenset(_as_list(self.model.generation_config.eos_token_id))
        self.smallest_gap = float("inf")
        self._outputs: dict[tuple[int, ...], list[int]] = {}

    def of(self, prompt: Sequence[int], *, ignore_eos: bool = True) -> list[int]:
        """Return the output of ``prompt``: ``num_outputs`` tokens, or up to and with the first end-of-sequence token.

        One run of ``generate`` gives both: batch-1 arithmetic does not know where it will be stopped.
        """
        key = tuple(prompt)
        if key not in self._outputs:
            self._outputs[key] = self._generate(prompt)
        output = self._outputs[key]
        if ignore_eos:
            return output
        ends = [at for at, token_id in enumerate(output) if token_id in self.eos_token_ids]
        return output[: ends[0] + 1] if ends else output

    def generate(self, prompt: Sequence[int], *, eos_token_ids: Sequence[int] | None) -> tuple[list[int], torch.Tensor]:
        """Run ``generate`` now; return the output and its logits, ``[outputs, vocab]``."""
        ids = torch.tensor([list(prompt)])
        config = self.model.generation_config
        before, config.eos_token_id = config.eos_token_id, eos_token_ids and list(eos_token_ids)
        try:
            result = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.num_outputs,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        finally:
            config.eos_token_id = before
        return result.sequences[0, len(prompt) :].tolist(), torch.cat(result.logits)

    def _generate(self, prompt: Sequence[int]) -> list[int]:
        output, logits = self.generate(prompt, eos_token_ids=None)
        assert len(output) == self.num_outputs
        best = logits.topk(2).values
        self.smallest_gap = min(self.smallest_gap, float((best[:, 0] - best[:, 1]).min()))
        return output


def _exact_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Dense attention, soft-capped if asked: ``[1, H, T, D]`` in, ``[1, T, H, D]`` out."""
    group = query.shape[1] // key.shape[1]
    keys, values = (states.repeat_interleave(group, dim=1) for states in (key, value))
    scores = query @ keys.mT * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(-1) @ values).transpose(1, 2).contiguous(), None


def _as_list(eos: int | list[int] | None) -> list[int]:
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else eos
