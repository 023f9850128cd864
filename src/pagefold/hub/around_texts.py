"""The tokens that a tokenizer puts around each text, as GGUF metadata says it, in the words of ``tokenizer.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.gguf.header import GgufFormatError

if TYPE_CHECKING:
    from pagefold.gguf.header import GgufHeader
    from pagefold.hub.vocabulary import Vocabulary

__all__ = ["post_processor"]


def post_processor(gguf: GgufHeader, vocabulary: Vocabulary, *, begins: bool) -> dict[str, Any] | None:
    """Return the post-processor that puts the first token before each text, and the last one behind it.

    Args:
        gguf: of the file.
        vocabulary: of the file.
        begins: whether texts begin with a token where the file says nothing of it; none ends with one then.

    Returns:
        None if there is none to put.

    Raises:
        GgufFormatError: such a token has no name.
    """
    before = _token(gguf, vocabulary, "bos", default=begins)
    behind = _token(gguf, vocabulary, "eos", default=False)
    if not before and not behind:
        return None

    def around(type_id: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": "AB"[type_id], "type_id": type_id}}
        return [_special(before, type_id), text, _special(behind, type_id)]

    first, second = ([part for part in around(type_id) if part] for type_id in (0, 1))
    ids = {token: vocabulary.tokens.index(token) for token in (before, behind) if token}
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {
            token: {"id": token, "ids": [token_id], "tokens": [token]} for token, token_id in ids.items()
        },
    }


def _special(token: str, type_id: int) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": type_id}} if token else {}


def _token(gguf: GgufHeader, vocabulary: Vocabulary, role: str, *, default: bool) -> str:
    """Return the token that is put around texts; empty for none."""
    if not gguf.value(f"tokenizer.ggml.add_{role}_token", bool, default):
        return ""
    token = vocabulary.special.get(f"{role}_token")
    if token is None:
        message = f"{gguf.path}: its texts {'begin' if role == 'bos' else 'end'} with a token that it does not name."
        raise GgufFormatError(message)
    return token
