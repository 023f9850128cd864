"""ResponseStore: responses that clients can go on from, bounded in bytes and number; each tenant sees its own."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any, NamedTuple

from pagefold.memory.cache_size import CacheSize

__all__ = ["ResponseStore", "StoredResponse"]

_MAX_RESPONSES = 10_000
_ENTRY_BYTES = 1_024
"""What an entry costs beside its JSON, rounded up."""


class StoredResponse(NamedTuple):
    """What is kept of a response, as JSON: its size is known to the byte, and the garbage collector sees two objects.

    Attributes:
        response: as the client got it.
        items: of the whole conversation: what was asked and answered up to and with this response.
    """

    response: bytes
    items: bytes

    @property
    def num_bytes(self) -> int:
        """How much memory it takes."""
        return len(self.response) + len(self.items) + _ENTRY_BYTES


class _Shelf(OrderedDict[str, StoredResponse]):
    """The responses of one tenant, the one that nobody has used for longest first."""

    num_bytes = 0

    def place(self, response_id: str, stored: StoredResponse) -> None:
        self[response_id] = stored
        self.num_bytes += stored.num_bytes

    def take_away(self, response_id: str) -> None:
        self.num_bytes -= self.pop(response_id).num_bytes


class ResponseStore:
    """Keeps responses until there is no more room for them; used in the event loop only.

    When bytes are short, the tenant whose responses take most of them loses the one that was not used for longest; when
    there are too many, the tenant that has most does. So nobody can push out what others keep. Every entry holds its
    whole conversation, so that none leans on another.

    Args:
        max_bytes: that all entries may take; 0 keeps nothing.
        max_responses: how many there may be.
    """

    def __init__(self, max_bytes: int, max_responses: int = _MAX_RESPONSES) -> None:
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._shelves: dict[str, _Shelf] = {}

    @property
    def is_on(self) -> bool:
        """Whether the store ever keeps anything."""
        return self._max_bytes > 0

    @property
    def num_responses(self) -> int:
        """How many are kept."""
        return sum(len(shelf) for shelf in self._shelves.values())

    @property
    def num_bytes(self) -> int:
        """How much memory they take."""
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def size(self) -> CacheSize:
        """Return what it keeps beside what it may keep."""
        return CacheSize("responses", self.num_bytes, self._max_bytes)

    def put(self, tenant: str, response: dict[str, Any], items: list[dict[str, Any]]) -> bool:
        """Keep ``response`` for ``tenant``; return whether there is room for it at all.

        Args:
            tenant: who alone will find it.
            response: as the client gets it, with its ``id``.
            items: of the whole conversation.
        """
        stored = StoredResponse(_as_json(response), _as_json(items))
        if stored.num_bytes > self._max_bytes:
            return False
        self._shelves.setdefault(tenant, _Shelf()).place(response["id"], stored)
        while self.num_bytes > self._max_bytes:
            self._shrink(max(self._shelves, key=lambda name: self._shelves[name].num_bytes))
        while self.num_responses > self._max_responses:
            self._shrink(max(self._shelves, key=lambda name: len(self._shelves[name])))
        return self.get(tenant, response["id"]) is not None

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Return a response of ``tenant``, which is used by that; None if there is no such."""
        shelf = self._shelves.get(tenant)
        if shelf is None or response_id not in shelf:
            return None
        shelf.move_to_end(response_id)
        return shelf[response_id]

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response of ``tenant``; return whether there was one."""
        if self.get(tenant, response_id) is None:
            return False
        self._take_away(tenant, response_id)
        return True

    def _shrink(self, tenant: str) -> None:
        self._take_away(tenant, next(iter(self._shelves[tenant])))

    def _take_away(self, tenant: str, response_id: str) -> None:
        shelf = self._shelves[tenant]
        shelf.take_away(response_id)
        if not shelf:
            del self._shelves[tenant]


def _as_json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")
