"""Diagnoses: what changed between a request and an earlier one of the same client, in the words of hosted APIs.

Anthropic's ``diagnostics.previous_message_id`` and OpenAI's ``prompt_cache_options.comparison_response_id`` name the
earlier one. What these APIs can say is which part of the request differs. What the cache did stands beside it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.server.fingerprint import section_between

if TYPE_CHECKING:
    from pagefold.server.explanations import Explanations
    from pagefold.server.fingerprint import Fingerprint, Section
    from pagefold.server.generation import Generation

__all__ = ["Diagnoses", "Diagnosis"]

_MOST_CHATS = 1024
"""Chats of a tenant that may be compared with: the last ones."""

_MOST_MESSAGE_BYTES = 2**20
"""What digests of their messages take, at most: eight bytes a message."""


class _Chat(NamedTuple):
    fingerprint: Fingerprint
    num_tokens: int


class Diagnosis(NamedTuple):
    """A request beside an earlier one.

    Attributes:
        is_found: whether the earlier one is remembered.
        section: what differs.
        num_missed_tokens: of the earlier prompt, that could have been found and were not.
        num_common_tokens: how many first tokens both have alike; None where that is forgotten.
        num_tokens: of the prompt.
        num_read: of it, that were found.
        misses: why tokens of it were computed, as ``/v1/explain`` tells it.
    """

    is_found: bool
    section: Section
    num_missed_tokens: int
    num_common_tokens: int | None
    num_tokens: int
    num_read: int
    misses: list[dict[str, Any]]

    def as_anthropic(self) -> dict[str, Any]:
        """Return it as the field ``diagnostics`` of a message."""
        reason: dict[str, Any] | None = None
        if not self.is_found:
            reason = {"type": "previous_message_not_found"}
        elif self.section == "options":
            reason = {"type": "unavailable"}
        elif self.section:
            what = "tools" if self.section == "tools_order" else self.section
            reason = {"type": f"{what}_changed", "cache_missed_input_tokens": self.num_missed_tokens}
        return {"cache_miss_reason": reason, "misses": self.misses}

    def as_openai(self) -> dict[str, Any]:
        """Return it as the field ``prompt_cache_diagnostics`` of a response."""
        told: dict[str, Any] = {"type": "cache_hit"}
        if not self.is_found:
            told = {"type": "comparison_response_not_found"}
        elif self.section == "options":
            told = {"type": "unavailable"}
        elif self.section:
            reason = "tools_changed" if self.section.startswith("tools") else "input_changed"
            num_common = self.num_read if self.num_common_tokens is None else self.num_common_tokens
            told = {"type": "cache_miss", "reason": reason, "cache_missed_tokens": self.num_tokens - num_common}
            if self.num_common_tokens is not None:
                told["comparison_reusable_tokens"] = num_common
        return {**told, "misses": self.misses}


class Diagnoses:
    """Remembers what the last chats consisted of, each tenant's apart.

    Args:
        explanations: know what the cache did.
    """

    def __init__(self, explanations: Explanations) -> None:
        self._explanations = explanations
        self._chats: dict[str, OrderedDict[str, _Chat]] = {}
        self._num_bytes: dict[str, int] = {}  # of their messages' digests
        self._lock = threading.Lock()

    def note(self, tenant: str, response_id: str, fingerprint: Fingerprint | None, num_tokens: int) -> None:
        """Remember a chat.

        Args:
            tenant: whose it is.
            response_id: by which it is asked for.
            fingerprint: of it.
            num_tokens: of its prompt.
        """
        if fingerprint is None:
            return
        with self._lock:
            chats = self._chats.setdefault(tenant, OrderedDict())
            chats[response_id] = _Chat(fingerprint, num_tokens)
            self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + len(fingerprint.messages)
            while len(chats) > _MOST_CHATS or self._num_bytes[tenant] > _MOST_MESSAGE_BYTES:
                _, chat = chats.popitem(last=False)
                self._num_bytes[tenant] -= len(chat.fingerprint.messages)

    def section(self, tenant: str, one_id: str, other_id: str) -> Section:
        """Return what of two of a tenant's chats differs; nothing where one of them is not remembered."""
        one, other = (self._chat(tenant, name) for name in (one_id, other_id))
        return "" if one is None or other is None else section_between(one.fingerprint, other.fingerprint)

    def diagnose(self, tenant: str, previous_id: str, generation: Generation) -> Diagnosis:
        """Return what changed between an earlier chat and one that has got its first token.

        Args:
            tenant: whose both are; others' are not found.
            previous_id: of the earlier one.
            generation: of the one that is answered.
        """
        own_id, use = generation.request_id, generation.prompt_use()
        previous = self._chat(tenant, previous_id)
        section: Section = ""
        num_missed, num_common = 0, None
        if previous is not None:
            section = self.section(tenant, previous_id, own_id)
            if not section and self._explanations.on_other_terms(previous_id, own_id, tenant):
                section = "options"
            num_shared = generation.num_in_blocks(min(previous.num_tokens, use.num_tokens))
            num_missed = max(0, num_shared - use.num_read)
            num_common = self._explanations.num_common_tokens(previous_id, own_id, tenant)
        misses = self._explanations.misses(own_id, tenant)
        return Diagnosis(previous is not None, section, num_missed, num_common, use.num_tokens, use.num_read, misses)

    def _chat(self, tenant: str, response_id: str) -> _Chat | None:
        with self._lock:
            chats = self._chats.get(tenant)
            return None if chats is None else chats.get(response_id)
