"""Logprobs in OpenAI's two forms: that of completions, in columns, and that of chats, an object a token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.engine.logprobs import Logprob

if TYPE_CHECKING:
    from pagefold.engine.outputs import OutputDelta
    from pagefold.tokenizer import Tokenizer

__all__ = ["ToldToken", "chat_logprobs", "completion_logprobs", "finite", "told_tokens"]

_LEAST = -9999.0
"""JSON has no infinity; vLLM's number."""

_REPLACEMENT = "\ufffd"


class ToldToken(NamedTuple):
    """A token and what is told of it.

    Attributes:
        token_id: the token.
        text_offset: characters of the text before it.
        logprobs: of it and of the most likely tokens; None of the first token of all: nothing tells it.
    """

    token_id: int
    text_offset: int
    logprobs: dict[int, Logprob] | None


def told_tokens(delta: OutputDelta) -> list[ToldToken]:
    """Return what ``delta`` tells; nothing where logprobs were not asked for."""
    if delta.logprobs is None:
        return []
    pairs = zip(delta.token_ids, delta.logprobs, strict=True)
    return [ToldToken(token_id, delta.text_offset, logprobs) for token_id, logprobs in pairs]


def completion_logprobs(told: list[ToldToken], tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    r"""Return the ``logprobs`` of a completion's choice. A token within a character is ``bytes:\xe2``, as OpenAI's."""
    if not told:
        return None
    return {
        "tokens": [_own_name(one, tokenizer) for one in told],
        "token_logprobs": [None if one.logprobs is None else finite(one.logprobs[one.token_id]) for one in told],
        "top_logprobs": [None if one.logprobs is None else _by_name(one.logprobs, tokenizer) for one in told],
        "text_offset": [one.text_offset for one in told],
    }


def chat_logprobs(told: list[ToldToken], num_top: int, tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """Return the ``logprobs`` of a chat's choice, with the ``num_top`` most likely tokens of each."""
    if not told:
        return None
    content = []
    for one in told:
        assert one.logprobs is not None, "only output tokens are told so"
        best = [token_id for token_id, logprob in one.logprobs.items() if logprob.rank <= num_top][:num_top]
        best.sort(key=lambda token_id, logprobs=one.logprobs: -logprobs[token_id].logprob)  # type: ignore[misc]
        entry = _entry(one.token_id, one.logprobs[one.token_id], tokenizer)
        entry["top_logprobs"] = [_entry(token_id, one.logprobs[token_id], tokenizer) for token_id in best]
        content.append(entry)
    return {"content": content, "refusal": None}


def _own_name(one: ToldToken, tokenizer: Tokenizer | None) -> str:
    if one.logprobs is not None:
        return _name(one.token_id, one.logprobs[one.token_id], tokenizer)
    text = None if tokenizer is None else tokenizer.token_texts([one.token_id])[0]
    return _name(one.token_id, Logprob(0.0, 1, text), tokenizer)


def _by_name(logprobs: dict[int, Logprob], tokenizer: Tokenizer | None) -> dict[str, float]:
    return {_name(token_id, logprob, tokenizer): finite(logprob) for token_id, logprob in logprobs.items()}


def _entry(token_id: int, logprob: Logprob, tokenizer: Tokenizer | None) -> dict[str, Any]:
    written = _bytes(token_id, logprob, tokenizer)
    text = f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token
    return {"token": text, "logprob": finite(logprob), "bytes": None if written is None else list(written)}


def _name(token_id: int, logprob: Logprob, tokenizer: Tokenizer | None) -> str:
    """Return a text that tells the token from others."""
    text = logprob.decoded_token
    if text is not None and _REPLACEMENT not in text:
        return text
    written = _bytes(token_id, logprob, tokenizer)
    return f"token_id:{token_id}" if written is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def _bytes(token_id: int, logprob: Logprob, tokenizer: Tokenizer | None) -> bytes | None:
    text = logprob.decoded_token
    if text is not None and _REPLACEMENT not in text:
        return text.encode()
    return None if tokenizer is None else tokenizer.token_bytes(token_id)


def finite(logprob: Logprob) -> float:
    """Return a logprob as JSON can have it."""
    return max(logprob.logprob, _LEAST)
