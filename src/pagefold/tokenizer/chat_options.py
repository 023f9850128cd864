"""ChatOptions: how a chat template is asked for a chat's text, beside the chat itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ChatOptions"]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a chat is put into text.

    Attributes:
        variables: more for the template to read, such as ``enable_thinking``; of JSON's types alone.
        add_generation_prompt: whether the text ends with the beginning of the assistant's answer.
        continue_final_message: the text ends within the last message, which the answer goes on with.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
