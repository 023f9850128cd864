"""LengthBound: how few tokens a text can have, known without tokenizing it."""

from __future__ import annotations

import json
from typing import Any

from pagefold.tokenizer.pieces import letter_of_byte

__all__ = ["LengthBound"]

_MAX_DECOMPOSITION = 4
"""No character's canonical decomposition has more, so NFC makes at most so many characters into one."""

_NOT_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


class LengthBound:
    """A lower bound of the tokens of a text, for vocabularies where one can be proven.

    Every token covers at most as many units as the longest entry of the vocabulary has, if no token stands for text of
    any length, and what the vocabulary drops is not counted. A unit is a byte for byte-level BPE, and a character for
    BPE that falls back to bytes. Anything else (WordPiece, Unigram with its fused unknown token, added tokens that
    swallow white space, pre-tokenizers that remove) has no bound here.

    Args:
        backend: a ``tokenizers.Tokenizer``.
    """

    def __init__(self, backend: Any) -> None:  # noqa: ANN401 - tokenizers has no stubs
        normalizers = _steps(backend.normalizer, "normalizers")
        pre_tokenizers = _steps(backend.pre_tokenizer, "pretokenizers")
        added = backend.get_added_tokens_decoder().values()
        model = backend.model
        vocab = backend.get_vocab(with_added_tokens=False)
        self._counts_bytes = any(step["type"] == "ByteLevel" for step in pre_tokenizers)
        self._composes = any(step["type"] == "NFC" for step in normalizers)
        self._dropped = bytes(byte for byte in range(256) if letter_of_byte(byte) not in vocab)
        is_known = (
            type(model).__name__ == "BPE"
            and not (model.continuing_subword_prefix or model.end_of_word_suffix)
            and (self._counts_bytes or (model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256))))
            and all(_keeps_length(step) for step in normalizers)
            and all(_keeps_text(step) for step in pre_tokenizers)
            and not any(token.lstrip or token.rstrip for token in added)
        )
        longest = max((*map(len, vocab), *(len(token.content.encode()) for token in added)), default=0)
        self._max_units = longest if is_known else 0

    def min_tokens(self, text: str) -> int:
        """Return how many tokens ``text`` has at least; 0 where nothing is proven."""
        return -(-self._num_units(text) // self._max_units) if self._max_units else 0

    def _num_units(self, text: str) -> int:
        if self._composes and not text.isascii():
            drops = self._counts_bytes and set(self._dropped) - _NOT_IN_UTF8
            return 0 if drops else len(text) // _MAX_DECOMPOSITION
        if not self._counts_bytes:
            return len(text)
        return len(text.encode().translate(None, delete=self._dropped))


def _steps(component: Any, name: str) -> list[dict[str, Any]]:  # noqa: ANN401 - as above
    """Return what a normalizer or pre-tokenizer does, in order, as its JSON."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return list(state[name]) if state["type"] == "Sequence" else [state]


def _keeps_length(step: dict[str, Any]) -> bool:
    """Whether a normalizer makes nothing shorter, but for what NFC composes."""
    if step["type"] == "Replace":
        found = step["pattern"].get("String", "")
        return len(found) == 1 and len(step["content"]) >= 1
    return step["type"] in ("NFC", "Prepend")


def _keeps_text(step: dict[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in ("ByteLevel", "Digits", "Metaspace")
