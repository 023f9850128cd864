"""Fingerprint: what a chat consisted of, as digests. Of two it can be said which part of the request differs."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagefold.tokenizer import ChatOptions

__all__ = ["Fingerprint", "Section", "fingerprint_of", "section_between"]

Section: TypeAlias = Literal["", "tools_order", "tools", "system", "messages", "options"]
"""What differs of two requests: the order of the tools or these themselves, what comes before the chat, the chat, or
how the template is asked to write it. Nothing, where the one goes on from the other."""

_DIGEST_BYTES = 8
_SYSTEM = ("system", "developer")


class Fingerprint(NamedTuple):
    """The parts of a chat.

    Attributes:
        tools: digest of them, in order.
        sorted_tools: digest of them, whatever their order.
        system: digest of the messages of the system before all others.
        messages: digests of all others, one behind the other.
        options: digest of how the template is asked to write them.
    """

    tools: bytes
    sorted_tools: bytes
    system: bytes
    messages: bytes
    options: bytes


def fingerprint_of(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, options: ChatOptions
) -> Fingerprint:
    """Return the fingerprint of a chat, as its template is told it.

    Args:
        messages: of the chat.
        tools: that it may call.
        options: of the template.
    """
    first = next((at for at, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages))
    own = [_digest(tool) for tool in tools or ()]
    return Fingerprint(
        _digest_of(b"".join(own)),
        _digest_of(b"".join(sorted(own))),
        _digest(list(messages[:first])),
        b"".join(_digest(message) for message in messages[first:]),
        _digest_of(repr(options).encode()),
    )


def section_between(one: Fingerprint, other: Fingerprint) -> Section:
    """Return the first part, as prompts have them, in which ``other`` does not go on from ``one``."""
    if one.tools != other.tools:
        return "tools_order" if one.sorted_tools == other.sorted_tools else "tools"
    if one.system != other.system:
        return "system"
    if not other.messages.startswith(one.messages):
        return "messages"
    return "options" if one.options != other.options else ""


def _digest(part: object) -> bytes:
    return _digest_of(json.dumps(part, separators=(",", ":")).encode())


def _digest_of(packed: bytes) -> bytes:
    return blake2b(packed, digest_size=_DIGEST_BYTES).digest()
