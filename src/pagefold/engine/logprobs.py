"""Logprobs as users get them: by token id, with each token's text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.engine.outputs import Logprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.steps import TokenLogprobs
    from pagefold.tokenizer import Tokenizer

__all__ = ["named_logprobs"]


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
