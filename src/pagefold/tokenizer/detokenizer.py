"""Detokenizer: tokens to text, one token at a time, never half a character."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

from pagefold.tokenizer.pieces import bytes_of_piece, is_byte_fallback

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

    What ends in the middle of a character has the text before it: bytes that could yet become a character are no text.

    Args:
        backend: a ``tokenizers.Tokenizer``.
        prompt_token_ids: what comes before the output.
        skip_special_tokens: whether special tokens are no text.
    """

    def __init__(
        self,
        backend: Any,  # noqa: ANN401 - tokenizers has no stubs
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._backend = backend
        self._skips = skip_special_tokens
        # Within a character a stream would wait, and then take the prompt's text for the output's. Where the context
        # begins within one, a byte-fallback decoder breaks the whole run of bytes, and some tokens more mend it.
        contexts = (list(prompt_token_ids[-_NUM_CONTEXT_TOKENS - more :]) for more in range(_MAX_CHARACTER_TOKENS))
        whole = (context for context in contexts if not self._decode(context).endswith(_REPLACEMENT))
        self._stream = self._begin(next(whole, []))
        self._pending: list[int] = []  # tokens since the stream last came to the end of a character

    def push(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes; empty in the middle of a character."""
        try:
            piece = self._stream.step(self._backend, token_id)
        except Exception:  # noqa: BLE001 - tokenizers raises no narrower type
            # A broken character has changed the text before it, which is out: byte-fallback decoders judge a run of
            # bytes as a whole. Go on from the first token that is not out.
            pending, self._pending = [*self._pending, token_id], []
            self._stream = self._begin(pending)
            return self._decode(pending)
        if piece is None:
            self._pending.append(token_id)
            return ""
        self._pending.clear()
        return str(piece)

    def flush(self) -> str:
        """Return what an output that has ended has left: what is broken as U+FFFD, nothing of what is incomplete."""
        if not self._pending:
            return ""
        pending, self._pending = self._pending, []
        text = self._decode(pending)
        return text[: len(text) - self._num_incomplete(pending, text)]

    def _num_incomplete(self, token_ids: list[int], text: str) -> int:
        """Return how many of the characters at the end of ``text`` stand for bytes that more could make a character."""
        num_replaced = len(text) - len(text.rstrip(_REPLACEMENT))
        if not num_replaced:
            return 0
        # Special tokens, where they are skipped, have no text alone.
        pieces = [str(self._backend.id_to_token(token_id)) for token_id in token_ids if self._decode([token_id])]
        written = [bytes_of_piece(piece) for piece in pieces[-_MAX_CHARACTER_TOKENS:]]
        known = b"".join(one or b" " for one in written)  # of what is no bytes, no character goes on
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(known)
        num_bytes = len(decoder.getstate()[0])
        if not num_bytes:
            return 0
        # A byte-level decoder writes one sign for the beginning of a character, a fallback decoder one for each byte.
        return min(num_replaced, num_bytes if is_byte_fallback(pieces[-1]) else 1)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=self._skips))

    def _begin(self, context: list[int]) -> Any:  # noqa: ANN401 - tokenizers has no stubs
        from tokenizers.decoders import DecodeStream  # noqa: PLC0415 - not needed to import this module

        return DecodeStream(ids=list(context), skip_special_tokens=self._skips)
