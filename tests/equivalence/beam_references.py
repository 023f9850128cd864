"""What transformers' beam search finds, prompt by prompt, alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from equivalence.references import References
    from pagefold.sampling import SamplingParams

__all__ = ["BeamReferences", "Found"]


class Found(NamedTuple):
    """One result: its tokens, a token that ended it included, and its score."""

    token_ids: list[int]
    score: float


class BeamReferences:
    """Results of one model, each searched for once.

    Args:
        references: of the model.

    Attributes:
        eos_token_ids: what the model's generation config says.
    """

    def __init__(self, references: References) -> None:
        self._references = references
        self.eos_token_ids = references.eos_token_ids
        self._found: dict[tuple[object, ...], list[Found]] = {}

    def of(self, prompt: Sequence[int], how: SamplingParams) -> list[Found]:
        """Return what is found, the best first: as many as there are beams."""
        key = (tuple(prompt), how.num_samples, how.max_tokens, how.min_tokens, how.ignore_eos, how.stop_token_ids)
        key += (how.length_penalty, how.early_stopping)
        if key not in self._found:
            self._found[key] = self._search(list(prompt), how)
        return self._found[key]

    def _search(self, prompt: list[int], how: SamplingParams) -> list[Found]:
        model = self._references.model
        ends = {*how.stop_token_ids, *(() if how.ignore_eos else self.eos_token_ids)}
        ids = torch.tensor([prompt])
        config = model.generation_config
        before, config.eos_token_id = config.eos_token_id, sorted(ends) or None
        try:
            result = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=how.max_tokens,
                min_new_tokens=how.min_tokens or None,
                do_sample=False,
                num_beams=how.num_samples,
                num_return_sequences=how.num_samples,
                length_penalty=how.length_penalty,
                early_stopping=how.early_stopping,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        finally:
            config.eos_token_id = before
        rows = result.sequences[:, len(prompt) :].tolist()
        found = []
        for row, score in zip(rows, result.sequences_scores.tolist(), strict=True):
            stops = [at for at, token_id in enumerate(row) if token_id in ends and at >= how.min_tokens]
            found.append(Found(row[: stops[0] + 1] if stops else row, score))
        return found
