"""Detokenizer: tokens to text, one token at a time, never half a character."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Detokenizer"]

_NUM_CONTEXT_TOKENS = 6
"""Tokens of the prompt that a decoder sees before the first output: some put a space before a word only if it is not
the first."""

_MAX_CHARACTER_TOKENS = 4
"""A character has at most so many bytes, and a token at least one."""

_REPLACEMENT = "\ufffd"
"""What decoders make of bytes that are no whole character."""


class Detokenizer:
    """The text of one output as it grows; concatenated, its pieces are the text of all its tokens.

    Args:
        backend: a ``tokenizers.Tokenizer``.
        prompt_token_ids: what comes before the output.
    """

    def __init__(self, backend: Any, prompt_token_ids: Sequence[int]) -> None:  # noqa: ANN401 - tokenizers has no stubs
        self._backend = backend
        # Within a character a stream would wait, and then take the prompt's text for the output's. Where the context
        # begins within one, a byte-fallback decoder breaks the whole run of bytes, and some tokens more mend it.
        contexts = (list(prompt_token_ids[-_NUM_CONTEXT_TOKENS - more :]) for more in range(_MAX_CHARACTER_TOKENS))
        whole = (context for context in contexts if not self._decode(context).endswith(_REPLACEMENT))
        self._stream = _stream(next(whole, []))
        self._pending: list[int] = []  # tokens since the stream last came to the end of a character

    def push(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes; empty in the middle of a character."""
        try:
            piece = self._stream.step(self._backend, token_id)
        except Exception:  # noqa: BLE001 - tokenizers raises no narrower type
            # A broken character has changed the text before it, which is out: byte-fallback decoders judge a run of
            # bytes as a whole. Go on from the first token that is not out.
            self._pending.append(token_id)
            self._stream = _stream(self._pending)
            return self.flush()
        if piece is None:
            self._pending.append(token_id)
            return ""
        self._pending.clear()
        return str(piece)

    def flush(self) -> str:
        """Return what an output that ends in the middle of a character has left: U+FFFD for its bytes; else nothing."""
        if not self._pending:
            return ""
        text = self._decode(self._pending)
        self._pending.clear()
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=True))


def _stream(context: list[int]) -> Any:  # noqa: ANN401 - tokenizers has no stubs
    from tokenizers.decoders import DecodeStream  # noqa: PLC0415 - not needed to import this module

    return DecodeStream(ids=list(context), skip_special_tokens=True)
