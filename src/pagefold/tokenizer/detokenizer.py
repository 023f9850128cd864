"""Detokenizer: tokens to text, one token at a time, never half a character."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Detokenizer"]

_NUM_CONTEXT_TOKENS = 6
"""Tokens of the prompt that a decoder sees before the first output: some put a space before a word only if it is not
the first."""


class Detokenizer:
    """The text of one output as it grows; concatenated, its pieces are the text of all its tokens.

    Args:
        backend: a ``tokenizers.Tokenizer``.
        prompt_token_ids: what comes before the output.
    """

    def __init__(self, backend: Any, prompt_token_ids: Sequence[int]) -> None:  # noqa: ANN401 - tokenizers has no stubs
        from tokenizers.decoders import DecodeStream  # noqa: PLC0415 - not needed to import this module

        self._backend = backend
        self._context = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=True)
        self._pending: list[int] = []  # tokens since the stream last came to the end of a character

    def push(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes; empty in the middle of a character."""
        piece = self._stream.step(self._backend, token_id)
        if piece is None:
            self._pending.append(token_id)
            return ""
        self._pending.clear()
        return str(piece)

    def flush(self) -> str:
        """Return what an output that ends in the middle of a character has left: U+FFFD for its bytes; else nothing."""
        if not self._pending:
            return ""
        text = str(self._backend.decode(self._pending, skip_special_tokens=True))
        self._pending.clear()
        return text
