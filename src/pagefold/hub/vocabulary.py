"""A tokenizer's vocabulary as GGUF metadata has it, whatever the rules that cut texts into its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.errors import UnsupportedModelError
from pagefold.gguf.header import GgufFormatError

if TYPE_CHECKING:
    from pagefold.gguf.header import GgufHeader

__all__ = [
    "BYTE",
    "CONTROL",
    "MATCHED_LITERALLY",
    "NORMAL",
    "UNKNOWN",
    "USER_DEFINED",
    "Vocabulary",
    "read_vocabulary",
    "refuse_setting",
]

# GGML's types of tokens. Unknown, control and user-defined ones are matched in the text before merges see it.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

# GGUF's names for the ids of special tokens, and transformers'.
_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}

MATCHED_LITERALLY = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file.

    Attributes:
        tokens: by id; they are distinct.
        types: of each, as above.
        special: tokens that have a role, by transformers' names of the roles.
    """

    tokens: list[str]
    types: list[int]
    special: dict[str, str]


def read_vocabulary(gguf: GgufHeader) -> Vocabulary:
    """Read the vocabulary from a file's metadata.

    Raises:
        GgufFormatError: metadata that is missing or contradicts itself.
    """
    tokens = gguf.values("tokenizer.ggml.tokens", str)
    types = gguf.values("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        message = f"{gguf.path}: its {len(tokens)} tokens are not distinct, or do not fit its {len(types)} token types."
        raise GgufFormatError(message)
    special = {name: _token(gguf, tokens, key) for name, key in _SPECIAL_TOKENS.items() if key in gguf.metadata}
    return Vocabulary(tokens, types, special)


def _token(gguf: GgufHeader, tokens: list[str], key: str) -> str:
    token_id = gguf.value(key, int)
    if not 0 <= token_id < len(tokens):
        message = f"{gguf.path}: {key} is {token_id}, and there are {len(tokens)} tokens."
        raise GgufFormatError(message)
    return tokens[token_id]


def refuse_setting(gguf: GgufHeader, key: str, *, default: bool) -> None:
    """Refuse a tokenizer whose setting ``key`` is on, or is on where the file does not say so.

    Raises:
        UnsupportedModelError: it is.
    """
    if gguf.value(f"tokenizer.ggml.{key}", bool, default):
        message = f"{gguf.path} has a tokenizer with {key}, which is not converted."
        raise UnsupportedModelError(message, remedy="Use the model's original folder, which has a tokenizer.json.")
