"""Request fields of OpenAI's and vLLM's APIs that would change an answer and that Pagefold does not have yet.

A client that sends one is told so, instead of getting an answer to another question. Fields that are in neither this
table nor ``schemas`` are ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["IN_CHAT", "IN_COMPLETIONS", "IN_RESPONSES", "refuse_unsupported"]

_IN_BOTH: dict[str, tuple[Any, ...]] = {
    # vLLM's
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
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
"""Field of /v1/completions to the values that mean nothing; null always does."""

IN_CHAT = _IN_BOTH | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "echo": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
}
"""The same for /v1/chat/completions."""


IN_RESPONSES: dict[str, tuple[Any, ...]] = {
    # Nothing is kept between requests.
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "include": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "text": ({"format": {"type": "text"}}, {}),
    "reasoning": ({},),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "context_management": ([],),
    "modalities": (["text"],),
}
"""The same for /v1/responses."""


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
        message = f"{name} is not supported yet."
        raise InvalidRequestError(message, param=name, remedy=remedy)
