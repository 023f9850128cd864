"""The ids of tokens that have a role, and those that end what a model says, out of GGUF metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.gguf.header import GgufFormatError

if TYPE_CHECKING:
    from pagefold.gguf.header import GgufHeader

__all__ = ["special_token_ids"]

_ENDS_BY_KEY = ("eos", "eot", "eom")
_ENDS_OF_TURN = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""Tokens by which models that chat end their turns. Few headers name them: llama.cpp knows them by their text."""


def special_token_ids(gguf: GgufHeader, *ends: str) -> dict[str, int | list[int] | None]:
    """Return the ids of special tokens by transformers' names; None where there are none.

    Where several tokens end what the model says, ``eos_token_id`` is a list of them, the header's own first.

    Args:
        gguf: of the file.
        ends: tokens that end what models of this family say in chats, beside those of all families.

    Raises:
        GgufFormatError: an id is no token's.
    """
    tokens = gguf.values("tokenizer.ggml.tokens", str)
    eos = [token_id for key in _ENDS_BY_KEY if (token_id := _id(gguf, key, len(tokens))) is not None]
    if "tokenizer.chat_template" in gguf.metadata:
        by_text = {tokens[token_id]: token_id for token_id in range(len(tokens) - 1, -1, -1)}
        eos += [by_text[token] for token in (*_ENDS_OF_TURN, *ends) if token in by_text]
    eos = list(dict.fromkeys(eos))
    return {
        "bos_token_id": _id(gguf, "bos", len(tokens)),
        "eos_token_id": eos if len(eos) > 1 else eos[0] if eos else None,
        "pad_token_id": _id(gguf, "padding", len(tokens)),
    }


def _id(gguf: GgufHeader, role: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in gguf.metadata:
        return None
    token_id = gguf.value(key, int)
    if not 0 <= token_id < num_tokens:
        message = f"{gguf.path}: {key} is {token_id}, and there are {num_tokens} tokens."
        raise GgufFormatError(message)
    return token_id
