"""What every route stands on: the engine, and what clients call its model."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagefold.errors import InvalidRequestError
from pagefold.server.errors import ContextLengthError, UnknownModelError
from pagefold.server.ignored import note_ignored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.requests import Request

    from pagefold.engine.client import EngineClient
    from pagefold.server.responses_schemas import InputMessage
    from pagefold.server.schemas import ChatMessage, RequestBody
    from pagefold.tokenizer import Tokenizer

__all__ = ["Served"]

_LONG_TEXT = 4_000
"""Characters. More of them are tokenized on another thread, so that streams do not stall; these take milliseconds."""


def _now() -> int:
    return int(time.time())


@dataclass(frozen=True, slots=True)
class Served:
    """One engine behind the door.

    Attributes:
        client: the engine.
        model_name: what clients call the model.
        created: when this server began, in seconds since 1970, as OpenAI tells time.
    """

    client: EngineClient
    model_name: str
    created: int = field(default_factory=_now)

    def admit(self, asked: RequestBody, request: Request) -> None:
        """Let a request in that names this model, or none, while the engine takes requests.

        Raises:
            UnknownModelError: it names another.
            EngineStoppedError: the engine is not there yet, or no more.
        """
        note_ignored(asked, request)
        if asked.model is not None:
            self.check_model(asked.model)
        self.client.ensure_ready()

    def check_model(self, model: str) -> None:
        """Check that ``model`` is the one that is here.

        Raises:
            UnknownModelError: it is not.
        """
        if model != self.model_name:
            msg = f"There is no model {ascii(model)[:80]} here."
            raise UnknownModelError(msg, remedy=f"This server has {self.model_name}.")

    async def encode(self, prompts: list[str] | list[list[int]], *, any_length: bool = False) -> list[list[int]]:
        """Return the tokens of each prompt.

        Raises:
            InvalidRequestError: they are texts, and the model has no tokenizer.
            ContextLengthError: one is certainly longer than the context, unless ``any_length`` will do.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [prompt for prompt in prompts if not isinstance(prompt, str)]
        tokenizer = self._tokenizer("prompt")

        def encode() -> list[list[int]]:
            for text in () if any_length else texts:
                self._refuse_if_too_long(text, tokenizer, "prompt")
            return [tokenizer.encode(text) for text in texts]

        return await _aside(sum(map(len, texts)), encode)

    async def encode_chat(
        self, messages: Sequence[ChatMessage | InputMessage], *, param: str = "messages", any_length: bool = False
    ) -> list[list[int]]:
        """Return the tokens of a chat in the model's template, as the only prompt. ``param`` is the field it came in.

        Raises:
            InvalidRequestError: the model has no template or no tokenizer, or the template refuses these messages.
            ContextLengthError: it is certainly longer than the context, unless ``any_length`` will do.
        """
        tokenizer = self._tokenizer(param)
        plain = [message.for_template() for message in messages]

        def encode() -> list[list[int]]:
            text = tokenizer.render_chat(plain)
            if not any_length:
                self._refuse_if_too_long(text, tokenizer, param)
            return [tokenizer.encode_rendered(text)]

        return await _aside(sum(len(message["content"]) for message in plain), encode)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token alone."""
        return self._tokenizer("prompt").token_texts(token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            InvalidRequestError: one of them is not in the vocabulary.
        """
        tokenizer = self._tokenizer("tokens")
        largest = max(token_ids, default=0)
        if largest >= tokenizer.vocab_size:
            msg = f"Token id {largest} is not in the model's vocabulary."
            raise InvalidRequestError(msg, param="tokens", remedy=f"Ids go from 0 to {tokenizer.vocab_size - 1}.")
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    def about_model(self) -> dict[str, Any]:
        """Return the model as ``/v1/models`` lists it; ``max_model_len`` as vLLM adds it."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "pagefold",
            "max_model_len": self.client.max_model_len,
        }

    def _refuse_if_too_long(self, text: str, tokenizer: Tokenizer, param: str) -> None:
        """Refuse before it is tokenized what cannot fit: tokenizing takes a second a megabyte."""
        max_model_len = self.client.max_model_len
        num_tokens = tokenizer.min_tokens(text)
        if num_tokens >= max_model_len:
            msg = (
                f"This model's maximum context length is {max_model_len} tokens. However, the {param} has "
                f"{len(text)} characters, which are at least {num_tokens} tokens."
            )
            raise ContextLengthError(msg, param=param, remedy=f"Please reduce the length of the {param}.")

    def _tokenizer(self, param: str) -> Tokenizer:
        if self.client.tokenizer is None:
            msg = "This model's folder has no tokenizer."
            raise InvalidRequestError(msg, param=param, remedy="Send token ids to /v1/completions.")
        return self.client.tokenizer


async def _aside(num_characters: int, encode: Callable[[], list[list[int]]]) -> list[list[int]]:
    """Run ``encode`` here, or on another thread if it would take long."""
    return encode() if num_characters < _LONG_TEXT else await asyncio.to_thread(encode)
