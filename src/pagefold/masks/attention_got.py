"""Attention got: how much attention each key of a context gets, at most, from anybody who may need it.

A key's score is the larger of two:

* *recited*: the model has read the context and is asked to repeat it; what any query of that repetition gives to the
  key, at most. This is KVzip's score (Kim et al., 2025; arXiv 2505.23416, section 3), which tells what a key is worth
  to any later question. KVzip has the context repeated chunk by chunk and normalizes weights over that chunk's keys;
  here they are normalized over all that is seen, as attention does, and every chunk's queries count for every key.
* *natural*: what queries of the same context give it, at most, of those that see it only if it was kept
  (:func:`~pagefold.masks.rule.concerned_from`).

Of the query heads that share a KV head the largest weight counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pagefold.masks.rule import older

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.masks.watched_model import Entering, WatchedModel
    from pagefold.tokenizer import Tokenizer

__all__ = ["RECITED_AT_ONCE", "AttentionGot", "attention_got", "num_positions_for", "recitals"]

RECITED_AT_ONCE = 512
"""Tokens of a context that are repeated behind one prompt."""
_NUM_LEADING = 8
"""Tokens before a chunk that tell where it begins: KVzip's."""
_MOST_PROMPT_TOKENS = 64
"""More than any prompt has."""
_FIRST = "\n\nRepeat the previous context exactly.\n\n"
_NEXT = "\n\nRepeat the part of the previous context exactly, starting with {leading!r}.\n\n"


class AttentionGot(NamedTuple):
    """What the keys of a context get.

    Attributes:
        hidden: what enters each layer's attention when the context is read: ``[T, hidden]`` each.
        natural: ``[L, Hkv, T]``; 0 where no query of the context is far enough.
        recited: ``[L, Hkv, T]``.
    """

    hidden: list[torch.Tensor]
    natural: torch.Tensor
    recited: torch.Tensor

    @property
    def largest(self) -> torch.Tensor:
        """The larger of the two, ``[L, Hkv, T]``."""
        return torch.maximum(self.natural, self.recited)


def num_positions_for(num_tokens: int) -> int:
    """Return how many positions a model must have for a context of so many tokens to be recited."""
    return num_tokens + _MOST_PROMPT_TOKENS + min(num_tokens, RECITED_AT_ONCE)


def recitals(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[list[int]]:
    """Return what is read behind a context for all of it to be repeated: each a prompt and the chunk that it asks for.

    Args:
        token_ids: of the context.
        tokenizer: of the model.
    """
    found = []
    for begin in range(0, len(token_ids), RECITED_AT_ONCE):
        prompt = _FIRST
        if begin:
            prompt = _NEXT.format(leading=tokenizer.decode(list(token_ids[begin - _NUM_LEADING : begin])))
        asked = tokenizer.encode_rendered(prompt)[-_MOST_PROMPT_TOKENS:]
        found.append([*asked, *token_ids[begin : begin + RECITED_AT_ONCE]])
    return found


def attention_got(model: WatchedModel, token_ids: Sequence[int], recited: Sequence[Sequence[int]]) -> AttentionGot:
    """Read a context, then each of ``recited`` behind it, and return how much attention its keys get.

    Args:
        model: reads.
        token_ids: of the context.
        recited: what is read behind it, one at a time; see :func:`recitals`.
    """
    reading = _Natural(model, len(token_ids))
    past = model.read_on(token_ids, None, watcher=reading)
    reciting = _Recited(model, len(token_ids))
    for one in recited:
        model.read_on(one, past, watcher=reciting)
    return AttentionGot(reading.hidden, reading.most, reciting.most)


class _Natural:
    """Watches a context being read."""

    def __init__(self, model: WatchedModel, num_tokens: int) -> None:
        self.hidden: list[torch.Tensor] = []
        self.most = torch.zeros(model.spec.num_layers, model.spec.num_kv_heads, num_tokens)

    def enters(self, entering: Entering) -> None:
        self.hidden.append(entering.hidden)

    def attends(self, layer: int, first: int, weights: torch.Tensor) -> None:
        concerned = older(first)  # the same for all that come here together, which are of one chunk
        assert concerned == older(first + weights.shape[2] - 1), "queries of two chunks came together"
        if concerned:
            _raise(self.most[layer, :, : concerned.stop], weights)


class _Recited:
    """Watches a context being repeated."""

    def __init__(self, model: WatchedModel, num_tokens: int) -> None:
        self.most = torch.zeros(model.spec.num_layers, model.spec.num_kv_heads, num_tokens)

    def enters(self, entering: Entering) -> None:
        pass

    def attends(self, layer: int, first: int, weights: torch.Tensor) -> None:  # noqa: ARG002 - all queries count
        _raise(self.most[layer], weights)


def _raise(most: torch.Tensor, weights: torch.Tensor) -> None:
    """Raise ``most``, ``[Hkv, N]``, to the largest weights that any row gives to the first ``N`` keys."""
    torch.maximum(most, weights[..., : most.shape[1]].amax((1, 2)), out=most)
