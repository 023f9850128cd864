"""Request fields of OpenAI's and vLLM's APIs that would change an answer and that Pagefold does not have yet.

A client that sends one is told so, instead of getting an answer to another question. Fields that are in neither this
table nor ``schemas`` are ignored.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["IN_CHAT", "IN_CHAT_MESSAGES", "IN_COMPLETIONS", "IN_MESSAGES", "IN_RESPONSES", "refuse_unsupported"]

_IN_BOTH: dict[str, tuple[Any, ...]] = {
    # vLLM's
    "spaces_between_special_tokens": (True,),
    "guided_whitespace_pattern": (),
    "structural_tag": (),
    "kv_transfer_params": (),
}

IN_COMPLETIONS = _IN_BOTH | {
    "suffix": ("",),
    "prompt_embeds": (),
    "add_special_tokens": (True,),
}
"""Fields of /v1/completions, each with the values of it that mean nothing; null always does."""

IN_CHAT = _IN_BOTH | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "echo": (False,),
    "chat_template": (),
    "documents": ([],),
    "add_special_tokens": (False,),
}
"""Fields of /v1/chat/completions, likewise."""

IN_CHAT_MESSAGES: dict[str, tuple[Any, ...]] = {"function_call": (), "audio": ()}
"""Fields of the messages of chats, likewise."""

IN_RESPONSES: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "context_management": ([],),
    "moderation": (),
    "modalities": (["text"],),
}
"""Fields of /v1/responses, likewise."""

IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": ({}, {"edits": []}),
    "mcp_servers": ([],),
    "speed": ("standard",),
}
"""Fields of /v1/messages, likewise."""


class _Reason(NamedTuple):
    """Why a field is not taken, and what to do instead.

    Attributes:
        what: the former, after the field's name.
        remedy: the latter.
    """

    what: str
    remedy: str


_AS_TOOLS = "is OpenAI's older form of tools, and not supported"
_ONLY_TEXT = "asks for more than text, and this server's models take and write text only"

_REASONS: Mapping[str, _Reason] = MappingProxyType(
    {
        "chat_template": _Reason(
            "is not taken from clients and not supported: a template is a program, and the model's own is run",
            "Leave it out. What a template reads goes into chat_template_kwargs; /v1/completions takes any text.",
        ),
        "documents": _Reason("is not supported", "Put the documents' text into a message."),
        "functions": _Reason(_AS_TOOLS, "Send tools."),
        "function_call": _Reason(_AS_TOOLS, "Send tools with tool_choice, and calls in messages as tool_calls."),
        "modalities": _Reason(_ONLY_TEXT, 'Leave it out, or send ["text"].'),
        "audio": _Reason(_ONLY_TEXT, "Leave it out."),
    }
)


def refuse_unsupported(fields: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Check that no field asks for what is not there.

    Raises:
        InvalidRequestError: one does; names it.
    """
    for name, meaningless in unsupported.items():
        value = fields.get(name)
        if value is None or any(type(value) is type(other) and value == other for other in meaningless):
            continue
        remedy = "Leave it out."
        if meaningless:
            remedy = f"Leave it out, or send {meaningless[0]!r}."
        reason = _REASONS.get(name, _Reason("is not supported yet", remedy))
        message = f"{name} {reason.what}."
        raise InvalidRequestError(message, param=name, remedy=reason.remedy)
