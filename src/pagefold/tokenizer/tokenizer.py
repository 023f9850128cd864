"""Tokenizer: a model folder's own tokenizer and chat template, as transformers loads them, or as it would."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import uuid
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from pagefold.errors import InvalidRequestError, UnsupportedModelError
from pagefold.memory.cache_size import CacheSize
from pagefold.tokenizer.boundary import Boundary, Encoded, StablePrefix
from pagefold.tokenizer.chat_options import ChatOptions
from pagefold.tokenizer.detokenizer import Detokenizer
from pagefold.tokenizer.length_bound import LengthBound
from pagefold.tokenizer.message_ends import SAMPLE_CHAT, end_token_ids
from pagefold.tokenizer.pieces import bytes_of_piece
from pagefold.tokenizer.plain import load_plain_tokenizer

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

__all__ = ["Tokenizer"]

_NEXT_MESSAGES = (("user", "A"), ("user", "1"), ("assistant", "B"), ("assistant", "2"))
"""What may be said next: two that begin differently for each role, so that none of it is taken for the template's."""

_MAX_WORDS, _WORD_BYTES = 4096, 10 * 2**10
"""The library remembers the tokens of so many words. A word has fewer than 256 bytes, with at most 32 bytes of tokens
for each of them."""

_REPLACEMENT = "\ufffd"
"""What decoders make of bytes that are no whole character."""

_AS_USUAL = ChatOptions()

_MAX_DECODERS = 4

_RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"),
        *("conversation", "tokenize", "tokenizer_kwargs"),
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
        *("image_token", "additional_special_tokens", "extra_special_tokens"),
        *("range", "dict", "lipsum", "cycler", "joiner", "namespace", "raise_exception", "strftime_now"),
        *("self", "loop", "caller", "varargs", "kwargs", "context", "environment"),
    }
)

_MAX_REASON_CHARACTERS = 500
"""How much is told of what a template raises."""


class Tokenizer:
    """Encodes prompts and chats, and makes detokenizers.

    Args:
        folder: the model's.

    Raises:
        UnsupportedModelError: the folder's tokenizer cannot be loaded, or has no fast form.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = load_plain_tokenizer(folder) or _load_with_transformers(folder)
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            msg = f"The tokenizer of {folder} has no fast form (tokenizer.json)."
            raise UnsupportedModelError(msg, remedy="Convert it with transformers, or use another model.")
        self._backend: Any = backend
        self._showing: dict[frozenset[str], Any] = {frozenset(): backend}  # decoders, by which special tokens they show
        self._words_bytes = _bound_words(backend.model)
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

    def cache_size(self) -> CacheSize:
        """Return what the tokens of words that are remembered may take; the library does not tell what they do take."""
        return CacheSize("words", self._words_bytes, self._words_bytes)

    @cached_property
    def _length_bound(self) -> LengthBound:
        return LengthBound(self._backend)

    def to_json(self) -> str:
        """Return the tokenizer as the text of a ``tokenizer.json``."""
        return str(self._backend.to_str())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of ``text``, with the special tokens that the model expects at the start of a prompt."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_with_ends(self, text: str, *, add_special_tokens: bool = True) -> tuple[list[int], list[int]]:
        """Return the tokens of :meth:`encode`, and the character of ``text`` behind each; 0 of those added around."""
        found = self._tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
        return list(found["input_ids"]), [end for _, end in found["offset_mapping"]]

    def encode_parts(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of each of ``texts`` as a part of a longer one: without special tokens around it."""
        return [list(found.ids) for found in self._backend.encode_batch(texts, add_special_tokens=False)]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Return the tokens of what :meth:`render_chat` makes of ``messages`` and ``tools``."""
        return self.encode_rendered(self.render_chat(messages, tools))

    def encode_rendered(self, text: str) -> list[int]:
        """Return the tokens of a text that :meth:`render_chat` has made, which has its own special tokens."""
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def message_end_ids(self) -> frozenset[int]:
        """The special tokens that the chat template ends messages with; none where there is no template."""
        if self.has_chat_template:
            with contextlib.suppress(InvalidRequestError):  # not every template takes this chat
                text = self.render_chat(SAMPLE_CHAT)
                return end_token_ids(self._backend, text, [message["content"] for message in SAMPLE_CHAT])
        return frozenset()

    @property
    def tool_template(self) -> str | None:
        """The chat template that takes tools, or None if the model brought none."""
        templates = self._tokenizer.chat_template
        if isinstance(templates, dict):
            templates = templates.get("tool_use", templates.get("default"))
        return templates if isinstance(templates, str) and "tools" in _variables(templates) else None

    @cached_property
    def reserved_variables(self) -> frozenset[str]:
        """Names that no variable of a client's may have: they are the template's, or say how it is rendered."""
        return _RESERVED | inspect.signature(self._tokenizer.apply_chat_template).parameters.keys()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: ChatOptions = _AS_USUAL,
    ) -> str:
        """Return the text of a chat in the model's template, ready for the assistant's answer.

        Args:
            messages: in OpenAI's form, but for the arguments of calls, which are objects.
            tools: in OpenAI's form. None for a chat that has nothing to do with tools; empty for one that only tells
                of earlier calls.
            options: what else to ask of the template.

        Raises:
            InvalidRequestError: the model has no template, or the template refuses these messages, or variables.
        """
        if not self.has_chat_template:
            msg = "This model has no chat template."
            raise InvalidRequestError(msg, param="messages", remedy="Use /v1/completions with a prompt.")
        refused = sorted(self.reserved_variables.intersection(options.variables))
        if refused:
            msg = f"chat_template_kwargs has {refused[0]}, which is not the client's to set."
            raise InvalidRequestError(msg, param="chat_template_kwargs", remedy="Leave it out.")
        try:
            text = self._rendered(messages, tools, options)
        except (OSError, MemoryError, InvalidRequestError):  # not the template's doing
            raise
        except Exception as error:  # a template is the model's own program: it may raise anything
            reason = str(error)[:_MAX_REASON_CHARACTERS]
            if options.variables:
                self.render_chat(messages, tools, replace(options, variables={}))  # are the messages at fault?
                msg = f"The model's chat template refused chat_template_kwargs: {reason}"
                raise InvalidRequestError(
                    msg, param="chat_template_kwargs", remedy="Send values that it takes, or leave them out."
                ) from error
            msg = f"The model's chat template refused these messages: {reason}"
            raise InvalidRequestError(msg, param="messages", remedy="Check the roles and their order.") from error
        try:
            text.encode()
        except UnicodeEncodeError:
            msg = "The chat or its tools hold half of a surrogate pair, which is no text."
            raise InvalidRequestError(msg, param="messages", remedy="Send whole characters.") from None
        return text

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, options: ChatOptions
    ) -> str:
        """Return what the template makes of a chat, up to where the answer goes on."""
        chat = [dict(message) for message in messages]
        end = ""
        if options.continue_final_message:
            end = f"end{uuid.uuid4().hex}"  # nobody can have written it
            chat[-1]["content"] += end
        text = str(
            self._tokenizer.apply_chat_template(
                chat,
                tools=None if tools is None else [dict(tool) for tool in tools],
                tokenize=False,
                add_generation_prompt=options.add_generation_prompt and not options.continue_final_message,
                **options.variables,
            )
        )
        if not end:
            return text
        continued, found, _ = text.rpartition(end)
        if not found:
            msg = "The model's chat template leaves the last message out, or changes it: it cannot be continued."
            raise InvalidRequestError(msg, param="continue_final_message", remedy="Leave it out.")
        return continued

    def encode_prefix(self, text: str) -> StablePrefix:
        """Return the first tokens of :meth:`encode` that stay the same whatever follows ``text``; see ``boundary``."""
        return self._stable(text, add_special_tokens=True)

    def encode_rendered_prefix(self, text: str) -> StablePrefix:
        """Return the first tokens of :meth:`encode_rendered` that stay the same whatever follows ``text``."""
        return self._stable(text, add_special_tokens=False)

    def render_chat_prefix(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text with which every chat begins that goes on from ``messages``, whatever is said next.

        Where the template ends what it makes of ``messages`` is found by letting it go on in different ways.

        Raises:
            InvalidRequestError: as :meth:`render_chat`.
        """
        texts: list[str] = []
        for role, content in _NEXT_MESSAGES:
            try:
                texts.append(self.render_chat([*messages, {"role": role, "content": content}]))
            except InvalidRequestError:  # this role cannot follow; another may
                continue
        return _common_beginning(texts) if texts else self.render_chat(messages)

    def end_in_chat(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: ChatOptions = _AS_USUAL,
    ) -> int:
        """Return how many characters of ``text`` the first messages of its chat are, or a few more; 0 if unknown.

        Args:
            text: what :meth:`render_chat` made of the whole chat.
            messages: the first ones of it; none for its tools alone.
            tools: the first ones of its tools.
            options: as of the whole chat.

        Raises:
            InvalidRequestError: ``options`` have variables that the template does not take.
        """
        goes_on = replace(options, add_generation_prompt=False, continue_final_message=False)
        for role, content in _NEXT_MESSAGES:
            try:
                begun = self.render_chat([*messages, {"role": role, "content": content}], tools, goes_on)
            except InvalidRequestError:  # this role cannot follow; another may
                continue
            return len(_common_beginning([text, begun]))
        return 0

    @cached_property
    def _boundary(self) -> Boundary:
        return Boundary(self._backend)

    def _stable(self, text: str, *, add_special_tokens: bool) -> StablePrefix:
        def encode(text: str) -> Encoded:
            found = self._tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
            return Encoded(list(found["input_ids"]), found["offset_mapping"])

        return self._boundary.stable_prefix(text, encode)

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

    def token_id(self, text: str) -> int | None:
        """Return the token that ``text`` is, or None if it is not one."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def detokenizer(
        self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True, shown: Collection[str] = ()
    ) -> Detokenizer:
        """Return a detokenizer for what follows ``prompt_token_ids``.

        Args:
            prompt_token_ids: what comes before the output.
            skip_special_tokens: whether special tokens are no text.
            shown: special tokens that are part of the output's text all the same. The first output that shows some
                takes as long as loading the tokenizer.
        """
        special = self._special.intersection(shown) if shown else frozenset()
        backend = self._showing.get(special)
        if backend is None:
            backend = _showing(self._backend, special)
            if len(self._showing) == _MAX_DECODERS:
                self._showing = {frozenset(): self._backend}
            self._showing[special] = backend
        return Detokenizer(backend, prompt_token_ids, skip_special_tokens=skip_special_tokens)

    def shows(self, special_tokens: Collection[str]) -> bool:
        """Whether a detokenizer that shows these is there at once."""
        return self._special.intersection(special_tokens) in self._showing

    @cached_property
    def _special(self) -> frozenset[str]:
        added = self._backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)


def _showing(backend: Any, special: frozenset[str]) -> Any:  # noqa: ANN401 - tokenizers has no stubs
    """Return a tokenizer for which some special tokens are text."""
    from tokenizers import Tokenizer as Backend  # noqa: PLC0415 - not needed to import this module

    contents = json.loads(backend.to_str())
    for token in contents["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in special
    return Backend.from_str(json.dumps(contents))


def _load_with_transformers(folder: Path) -> Any:  # noqa: ANN401 - its classes have no common type
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds, and plain folders do without

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (ValueError, OSError, KeyError, TypeError) as error:
        msg = f"The tokenizer of {folder} cannot be loaded: {str(error).splitlines()[0]}"
        raise UnsupportedModelError(msg, remedy="Use a folder with a tokenizer.json.") from None


def _bound_words(model: Any) -> int:  # noqa: ANN401 - tokenizers has no stubs
    """Bound the words that a model of the library remembers; return the bytes that they may take."""
    resize = getattr(model, "_resize_cache", None)
    if resize is None:  # WordPiece and WordLevel remember none
        return 0
    resize(_MAX_WORDS)
    return _MAX_WORDS * _WORD_BYTES


@lru_cache(maxsize=8)  # a model's own are a few
def _variables(template: str) -> frozenset[str]:
    """Return the names that a template is given."""
    from jinja2 import Environment, TemplateSyntaxError, meta  # noqa: PLC0415 - as above

    extensions = ["jinja2.ext.loopcontrols", "jinja2.ext.do"]
    try:
        parsed = Environment(extensions=extensions).parse(template)  # noqa: S701 - nothing is rendered
    except TemplateSyntaxError:  # transformers' own extensions
        return frozenset(re.findall(r"\w+", template))
    return frozenset(meta.find_undeclared_variables(parsed))


def _common_beginning(texts: list[str]) -> str:
    first, last = min(texts), max(texts)  # all others lie between them
    end = next((at for at, letter in enumerate(first) if letter != last[at]), len(first))
    return first[:end]
