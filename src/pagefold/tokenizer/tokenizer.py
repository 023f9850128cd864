"""Tokenizer: a model folder's own tokenizer and chat template, as transformers loads them."""

from __future__ import annotations

import contextlib
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pagefold.errors import InvalidRequestError, UnsupportedModelError
from pagefold.tokenizer.detokenizer import Detokenizer
from pagefold.tokenizer.length_bound import LengthBound
from pagefold.tokenizer.pieces import bytes_of_piece

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Tokenizer"]

_REPLACEMENT = "\ufffd"
"""What decoders make of bytes that are no whole character."""


class Tokenizer:
    """Encodes prompts and chats, and makes detokenizers.

    Args:
        folder: the model's.

    Raises:
        UnsupportedModelError: the folder's tokenizer cannot be loaded, or has no fast form.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415 - heavy, and not needed to import this module

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except (ValueError, OSError, KeyError, TypeError) as error:
            msg = f"The tokenizer of {folder} cannot be loaded: {str(error).splitlines()[0]}"
            raise UnsupportedModelError(msg, remedy="Use a folder with a tokenizer.json.") from None
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            msg = f"The tokenizer of {folder} has no fast form (tokenizer.json)."
            raise UnsupportedModelError(msg, remedy="Convert it with transformers, or use another model.")
        self._backend: Any = backend
        if self.has_chat_template:  # compiled now, not while the first client waits; not every template takes this chat
            with contextlib.suppress(InvalidRequestError):
                self.render_chat([{"role": "user", "content": "Hi"}])

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brought a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included."""
        return int(self._backend.get_vocab_size())

    def min_tokens(self, text: str) -> int:
        """Return how many tokens ``text`` has at least, without tokenizing it; 0 where nothing is proven."""
        return self._length_bound.min_tokens(text)

    @cached_property
    def _length_bound(self) -> LengthBound:
        return LengthBound(self._backend)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``, with the special tokens that the model expects at the start of a prompt."""
        return list(self._tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of what :meth:`render_chat` makes of ``messages``."""
        return self.encode_rendered(self.render_chat(messages))

    def encode_rendered(self, text: str) -> list[int]:
        """Return the tokens of a text that :meth:`render_chat` has made."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of a chat in the model's template, ready for the assistant's answer.

        Raises:
            InvalidRequestError: the model has no template, or the template refuses these messages.
        """
        if not self.has_chat_template:
            msg = "This model has no chat template."
            raise InvalidRequestError(msg, param="messages", remedy="Use /v1/completions with a prompt.")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
                )
            )
        except (OSError, MemoryError):  # not the template's doing
            raise
        except Exception as error:  # a template is the model's own program: it may raise anything
            msg = f"The model's chat template refused these messages: {error}"
            raise InvalidRequestError(msg, param="messages", remedy="Check the roles and their order.") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``, without special tokens unless they are wanted."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each of ``token_ids`` alone, special tokens too; U+FFFD for one within a character."""
        alone = [[token_id] for token_id in token_ids]
        return [str(text) for text in self._backend.decode_batch(alone, skip_special_tokens=False)]

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the UTF-8 bytes of a token, also of one within a character; None where the vocabulary hides them."""
        (text,) = self.token_texts([token_id])
        return text.encode() if _REPLACEMENT not in text else bytes_of_piece(str(self._backend.id_to_token(token_id)))

    def detokenizer(self, prompt_token_ids: Sequence[int]) -> Detokenizer:
        """Return a detokenizer for what follows ``prompt_token_ids``."""
        return Detokenizer(self._backend, prompt_token_ids)
