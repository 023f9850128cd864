"""Told prompts: what an answer repeats of its prompts: text, tokens, and how likely the model found those."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.errors import InvalidRequestError
from pagefold.server.logprobs import ToldToken, finite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.engine.logprobs import PromptLogprobs
    from pagefold.tokenizer import Tokenizer

__all__ = ["MAX_STREAMED", "MAX_TOLD", "ToldPrompt", "prompt_logprobs", "refuse_too_much"]

MAX_TOLD = 2**18
"""How many tokens of prompts one answer may repeat, each logprob of them counted as one more, choice by choice."""

MAX_STREAMED = 2**14
"""How many of them a stream may repeat, which is written while everybody else waits."""


def refuse_too_much(prompts: Sequence[Sequence[int]], num_each: int, *, is_streamed: bool, param: str) -> None:
    """Refuse what would repeat more of its prompts than an answer may.

    Args:
        prompts: tokens of each.
        num_each: how many things are told of each token, in all choices together.
        is_streamed: whether the answer is.
        param: the field that asks for the most of it.

    Raises:
        InvalidRequestError: it is too much.
    """
    most = MAX_STREAMED if is_streamed else MAX_TOLD
    num_told = num_each * sum(map(len, prompts))
    if num_told > most:
        kind = "a stream" if is_streamed else "an answer"
        msg = f"{param} asks for {num_told} tokens and logprobs of prompts, and {kind} has at most {most}."
        raise InvalidRequestError(msg, param=param, remedy="Send fewer prompts, or ask for fewer logprobs of them.")


class ToldPrompt:
    """One prompt as completions echo it.

    Args:
        token_ids: its tokens.
        text: as the client sent it; None where it sent tokens, or where only some of them were kept.
        tokenizer: None tells no text.
    """

    def __init__(self, token_ids: Sequence[int], text: str | None, tokenizer: Tokenizer | None) -> None:
        self._token_ids = token_ids
        self._tokenizer = tokenizer
        if text is None:
            text = "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=False)
        self.text = text

    def tokens(self, logprobs: PromptLogprobs, num_top: int) -> list[ToldToken]:
        """Return what is told of its tokens."""
        told = zip(self._token_ids, self._offsets(), logprobs.named(num_top), strict=True)
        return [ToldToken(*one) for one in told]

    def _offsets(self) -> list[int]:
        """Return how many characters of its text come before each token."""
        if self._tokenizer is None:
            return [0] * len(self._token_ids)
        detokenizer = self._tokenizer.detokenizer([], skip_special_tokens=False)
        pieces = [len(detokenizer.push(token_id)) for token_id in self._token_ids]
        # What the tokenizer puts before a text is no part of it.
        at = len(self.text) - sum(pieces) - len(detokenizer.flush())
        offsets = []
        for length in pieces:
            offsets.append(min(max(at, 0), len(self.text)))
            at += length
        return offsets


def prompt_logprobs(logprobs: PromptLogprobs, num_top: int) -> list[dict[str, Any] | None]:
    """Return a prompt's logprobs in vLLM's form: by token id, null for the first token."""
    return [
        None
        if one is None
        else {
            str(token_id): {"logprob": finite(found), "rank": found.rank, "decoded_token": found.decoded_token}
            for token_id, found in one.items()
        }
        for one in logprobs.named(num_top)
    ]
