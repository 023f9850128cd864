"""What every route stands on: the engine, and what clients call its model."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pagefold.errors import InvalidRequestError
from pagefold.server.chat_prompt import ChatCut, ChatPrompt
from pagefold.server.context_length import check_text, check_tokens
from pagefold.server.disconnect import stays
from pagefold.server.errors import UnknownModelError
from pagefold.server.fingerprint import fingerprint_of
from pagefold.server.ignored import note_ignored
from pagefold.server.keys import account_of
from pagefold.server.reasoning.formats import FORMATS as REASONING_FORMATS
from pagefold.server.reasoning.thinking import NO_THINKING, thinking_of
from pagefold.server.text_workers import TextWorkers
from pagefold.server.tools.formats import FORMATS, format_of_template
from pagefold.tokenizer import ChatOptions, StablePrefix

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request
    from starlette.types import Receive

    from pagefold.adapters import LoadedAdapter
    from pagefold.engine.client import EngineClient
    from pagefold.request import Caller
    from pagefold.server.chat_schemas import ChatMessage
    from pagefold.server.reasoning.thinking import Thinking
    from pagefold.server.schemas import CachedRequest, RequestBody
    from pagefold.server.structured_fields import Structured
    from pagefold.server.tools.formats import ToolFormat
    from pagefold.server.tools.schemas import Tool
    from pagefold.server.warm_schemas import WarmRequest
    from pagefold.structured.grammar import Grammar
    from pagefold.tokenizer import Tokenizer

__all__ = ["Served"]

_MESSAGE_CHARACTERS = 20
"""What a template is guessed to put around a message."""

_LONG_CHAT = 4_000
"""Characters that a chat counts as where they are not counted: it is worked on aside."""

_AS_USUAL = ChatOptions()

_MOST_NAMED = 16
"""So many adapters an error names."""

_NUM_TOGETHER = 2**14
"""Tokens that are decoded in one piece: the library holds the interpreter while it hands them over."""


def _now() -> int:
    return int(time.time())


@dataclass(frozen=True, slots=True)
class Served:
    """One engine behind the door.

    Attributes:
        client: the engine.
        model_name: what clients call the model.
        tool_call_parser: the form in which the model writes calls of tools, or None for what its chat template says.
        reasoning_parser: the form in which it marks its thinking, or None where that is not told from answers.
        created: when this server began, in seconds since 1970, as OpenAI tells time.
        workers: turn texts into tokens, and back. Every method that asks them takes the ``receive`` of the client who
            waits: when he goes away, it raises ``ClientGoneError``.
    """

    client: EngineClient
    model_name: str
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    created: int = field(default_factory=_now)
    workers: TextWorkers = field(default_factory=TextWorkers)

    def admit(self, asked: RequestBody, request: Request) -> None:
        """Let a request in that names this model, or none, while the engine takes requests.

        Raises:
            UnknownModelError: it names another.
            EngineStoppedError: the engine is not there yet, or no more.
        """
        note_ignored(asked, request)
        if asked.model not in {None, self.model_name}:
            self.client.ensure_ready()  # which adapters there are, is known then
            self.check_model(asked.model)
        self.client.ensure_ready()

    def check_model(self, model: str) -> None:
        """Check that ``model`` is the one that is here, or an adapter of it.

        Raises:
            UnknownModelError: it is neither.
        """
        if model != self.model_name and model not in self.adapters:
            msg = f"There is no model {ascii(model)[:80]} here."
            names = ", ".join([self.model_name, *sorted(self.adapters)[:_MOST_NAMED]])
            raise UnknownModelError(msg, remedy=f"This server has {names}.")

    @property
    def adapters(self) -> dict[str, LoadedAdapter]:
        """The adapters that requests may name, by name."""
        return {one.name: one for one in self.client.adapters}

    def name_of(self, asked: RequestBody) -> str:
        """Return what clients call the model that a request names: the model, or an adapter of it."""
        return self.model_name if asked.model is None else asked.model

    def caller_of(self, asked: CachedRequest, request: Request) -> Caller:
        """Return who asks, on what terms, and with which adapter."""
        caller = asked.caller(account_of(request.scope))
        return replace(caller, adapter=self.adapter_of(asked.model))

    def adapter_of(self, model: str | None) -> str:
        """Return the adapter that a request is computed with, by the model that it names; empty for none."""
        return "" if model is None or model == self.model_name else model

    async def encode(
        self,
        prompts: list[str] | list[list[int]],
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        times: int = 1,
        receive: Receive = stays,
    ) -> list[list[int]]:
        """Return the tokens of each prompt. Of a text that will be truncated, ``times`` as many as fit are too many.

        ``param`` is the field that they came in.

        Raises:
            InvalidRequestError: they are texts, and the model has no tokenizer.
            ContextLengthError: one is certainly longer than the context.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:
            return [prompt for prompt in prompts if not isinstance(prompt, str)]
        tokenizer = self._tokenizer(param)

        def check() -> None:
            for text in texts:
                check_text(text, tokenizer, self.client.context, param, times)

        size = sum(map(len, texts))
        await self.workers.run(size, [check], receive)
        encode = partial(tokenizer.encode, add_special_tokens=add_special_tokens)
        return await self.workers.run(size, [partial(encode, text) for text in texts], receive)

    async def prepare_chat(  # noqa: PLR0913 - a chat, by name
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        options: ChatOptions = _AS_USUAL,
        param: str = "messages",
        add_special_tokens: bool = False,
        times: int = 1,
        cuts: Sequence[ChatCut] = (),
        receive: Receive = stays,
    ) -> ChatPrompt:
        """Return a chat in the model's template. ``param`` is the field it came in.

        Of a chat that will be truncated, ``times`` as many tokens as fit are too many.

        ``cuts`` are places in the chat of which it is wanted how many tokens are before them.

        Raises:
            InvalidRequestError: the model has no template or no tokenizer, or the template refuses these messages,
                or knows nothing of tools.
            ContextLengthError: it is certainly longer than the context.
        """
        tokenizer = self._tokenizer(param)

        def encode() -> ChatPrompt:
            plain = [message.for_template() for message in messages]
            told = _told(tools, plain, tokenizer)
            text = tokenizer.render_chat(plain, told, options)
            check_text(text, tokenizer, self.client.context, param, times)
            if cuts:
                ends = [_end_of(cut, text, told, options, tokenizer) for cut in cuts]
                token_ids, behind = tokenizer.encode_with_ends(text, add_special_tokens=add_special_tokens)
                cut_tokens = tuple(bisect_right(behind, end) if end else 0 for end in ends)
            else:
                token_ids, cut_tokens = tokenizer.encode(text, add_special_tokens=add_special_tokens), ()
            continued = plain[-1]["content"] if options.continue_final_message else ""
            thinking = self._thinking(text, continued, tokenizer)
            return ChatPrompt(token_ids, thinking, fingerprint_of(plain, told, options), cut_tokens)

        (chat,) = await self.workers.run(_LONG_CHAT if tools else _num_characters(messages), [encode], receive)
        marks = [mark for mark, _ in chat.thinking.token_ids]
        if not tokenizer.shows(marks):  # made once, as long as the server runs; it takes as long as loading a tokenizer
            await asyncio.to_thread(tokenizer.detokenizer, (), shown=marks)
        return chat

    def _thinking(self, prompt: str, continued: str, tokenizer: Tokenizer) -> Thinking:
        if self.reasoning_parser is None:
            return NO_THINKING
        return thinking_of(REASONING_FORMATS[self.reasoning_parser], prompt, continued, tokenizer)

    def tool_format(self) -> ToolFormat:
        """Return how the model writes calls of tools.

        Raises:
            InvalidRequestError: its template does not say it in a way that is known here.
        """
        if self.tool_call_parser is not None:
            return FORMATS[self.tool_call_parser]
        found = format_of_template(self._tokenizer("tools").tool_template or "")
        if found is None:
            msg = "This model's chat template takes no tools, or asks for calls in a form that is not known here."
            remedy = f"Leave tools out, or start the server with --tool-call-parser ({', '.join(FORMATS)})."
            raise InvalidRequestError(msg, param="tools", remedy=remedy)
        return found

    async def compile(self, structured: Structured | None) -> Grammar | None:
        """Return the grammar of what an output must look like.

        Raises:
            InvalidRequestError: it does not compile; names the field that asks for it.
        """
        if structured is None:
            return None
        try:
            return await self.client.compile_grammar(structured.params)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, param=structured.field, remedy=error.remedy) from None

    async def encode_prefix(self, asked: WarmRequest) -> StablePrefix:
        """Return what to warm of a prompt: token ids as they are, texts and chats up to where they may go on.

        Raises:
            InvalidRequestError, ContextLengthError: as :meth:`encode` and :meth:`prepare_chat`; or no token is certain
                to stay.
        """
        prompt = asked.prompt
        if isinstance(prompt, list):
            return StablePrefix(prompt, len(prompt))
        param = "prompt" if asked.messages is None else "messages"
        tokenizer = self._tokenizer(param)
        messages = asked.messages or ()

        def encode() -> StablePrefix:
            plain = [message.for_template() for message in messages]
            text = tokenizer.render_chat_prefix(plain) if prompt is None else prompt
            check_text(text, tokenizer, self.client.context, param)
            return tokenizer.encode_rendered_prefix(text) if prompt is None else tokenizer.encode_prefix(text)

        (found,) = await self.workers.run(len(prompt or "") + _num_characters(messages), [encode], stays)
        if not found.token_ids:
            msg = (
                f"Whatever follows may change all {found.num_tokens} tokens of the {param}: none can be cached for it."
            )
            raise InvalidRequestError(msg, param=param, remedy="Add some words, or send token ids.")
        return found

    async def token_texts(self, token_ids: Sequence[int], *, receive: Receive = stays) -> list[str]:
        """Return the text of each token alone."""
        tokenizer = self._tokenizer("prompt")
        parts = [token_ids[first : first + _NUM_TOGETHER] for first in range(0, len(token_ids), _NUM_TOGETHER)]
        texts = await self.workers.run(
            len(token_ids), [partial(tokenizer.token_texts, part) for part in parts], receive
        )
        return [text for part in texts for text in part]

    async def decode(self, token_ids: Sequence[int], *, receive: Receive = stays) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            InvalidRequestError: one of them is not in the vocabulary.
            ContextLengthError: they are more than the context.
        """
        tokenizer = self._tokenizer("tokens")
        check_tokens(len(token_ids), self.client.context, "tokens")
        largest = max(token_ids, default=0)
        if largest >= tokenizer.vocab_size:
            msg = f"Token id {largest} is not in the model's vocabulary."
            raise InvalidRequestError(msg, param="tokens", remedy=f"Ids go from 0 to {tokenizer.vocab_size - 1}.")
        decode = partial(tokenizer.decode, token_ids, skip_special_tokens=False)
        (text,) = await self.workers.run(len(token_ids), [decode], receive)
        return text

    def about_model(self) -> dict[str, Any]:
        """Return the model as ``/v1/models`` lists it; ``max_model_len`` as vLLM adds it."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "pagefold",
            "max_model_len": self.client.max_model_len,
        }

    def about_adapter(self, adapter: LoadedAdapter) -> dict[str, Any]:
        """Return an adapter as ``/v1/models`` lists it; ``root`` and ``parent`` as vLLM adds them."""
        return {**self.about_model(), "id": adapter.name, "root": adapter.path, "parent": self.model_name}

    def about(self, model: str) -> dict[str, Any]:
        """Return the model, or an adapter of it, by its name.

        Raises:
            UnknownModelError: there is none of that name.
        """
        self.check_model(model)
        adapter = self.adapters.get(model)
        return self.about_model() if adapter is None else self.about_adapter(adapter)

    def _tokenizer(self, param: str) -> Tokenizer:
        if self.client.tokenizer is None:
            msg = "This model's folder has no tokenizer."
            raise InvalidRequestError(msg, param=param, remedy="Send token ids to /v1/completions.")
        return self.client.tokenizer


def _end_of(
    cut: ChatCut, text: str, tools: Sequence[Mapping[str, Any]] | None, options: ChatOptions, tokenizer: Tokenizer
) -> int:
    """Return the character of a chat's text at which a place in it lies; 0 for unknown."""
    messages = [message.for_template() for message in cut.messages]
    return tokenizer.end_in_chat(text, messages, None if tools is None else tools[: cut.num_tools], options)


def _num_characters(messages: Sequence[ChatMessage]) -> int:
    """Return about how many characters a chat has. Calls of tools are written out first: they count as long."""
    if any("tool_calls" in message.model_fields_set for message in messages):
        return _LONG_CHAT
    return sum(message.num_characters for message in messages) + _MESSAGE_CHARACTERS * len(messages)


def _told(
    tools: Sequence[Tool], messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer
) -> list[dict[str, Any]] | None:
    """Return what a chat template is told of tools; None where neither they nor earlier calls are there."""
    if not tools and not any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        return None
    if tokenizer.tool_template is None:
        msg = "The chat template of this model takes no tools."
        raise InvalidRequestError(msg, param="tools" if tools else "messages", remedy="Use another model.")
    return [tool.for_template() for tool in tools]
