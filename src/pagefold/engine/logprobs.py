"""Logprobs as users get them: by token id, with each token's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.steps import TokenLogprobs
    from pagefold.tokenizer import Tokenizer

__all__ = ["Logprob", "PromptLogprobs", "named_logprobs"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely the model found a token; vLLM's names.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the most likely token of all.
        decoded_token: its text, or None without a tokenizer. A token within a character is U+FFFD.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """What is told of a prompt's tokens. It may be much, so whoever reads it names it, and not the engine's thread.

    Attributes:
        tokenizer: of the model, or None.
        token_ids: of the prompt, from the second on: nothing tells the first.
        found: the logprobs of each of ``token_ids``.
    """

    tokenizer: Tokenizer | None
    token_ids: Sequence[int]
    found: Sequence[TokenLogprobs]

    def named(self, num_top: int | None = None) -> list[dict[int, Logprob] | None]:
        """Return, for each token, the logprobs of it and of the most likely tokens; None for the first.

        Args:
            num_top: how many of these; None for all that were asked for.
        """
        found = self.found
        if num_top is not None:
            found = [one._replace(top=one.top[:num_top]) for one in found]
        return [None, *named_logprobs(self.tokenizer, self.token_ids, found)]


def named_logprobs(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], found: Sequence[TokenLogprobs]
) -> list[dict[int, Logprob]]:
    """Return, for each token, the logprobs of it and of the most likely tokens, in that order; who is both, once."""
    by_id: list[dict[int, tuple[float, int]]] = []
    for token_id, logprobs in zip(token_ids, found, strict=True):
        these = {token_id: (logprobs.logprob, logprobs.rank)}
        for rank, (other, logprob) in enumerate(logprobs.top, 1):
            these.setdefault(other, (logprob, rank))
        by_id.append(these)
    ids = sorted({token_id for these in by_id for token_id in these})
    texts: dict[int, str] = {} if tokenizer is None else dict(zip(ids, tokenizer.token_texts(ids), strict=True))
    return [
        {token_id: Logprob(logprob, rank, texts.get(token_id)) for token_id, (logprob, rank) in these.items()}
        for these in by_id
    ]
