"""Whether a tier has a chunk: answered at once where the store knows, else asked on a thread and answered later."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.kv import BlockName
    from pagefold.store.protocol import BlockStore

__all__ = ["LaterLookups", "Lookups", "PromptLookups"]

_log = logging.getLogger(__name__)

_MOST_MISSES = 8
"""Of the chunks of a request that are asked for together, so many may be missing before the rest is taken as missing:
each costs a question of its own."""


class Lookups(Protocol):
    """Answers whether chunks are there. All methods are the scheduler's thread's."""

    def has(self, req_id: str, key: bytes) -> bool | None:
        """Return whether a request may have a chunk; None if that is not known yet. Waits for nothing."""

    def send(self) -> None:
        """Ask what :meth:`has` could not answer; once a step."""

    def failed(self, req_id: str, keys: Sequence[bytes]) -> None:
        """Say that chunks could not be brought for a request: it is not told of them again."""

    def forget(self, req_id: str) -> None:
        """Say that a request has ended."""

    def close(self) -> None:
        """End."""


class PromptLookups:
    """Of a store that answers at once. See :class:`Lookups`.

    Args:
        store: that is asked.
        name_of: returns what the store calls a chunk.
    """

    def __init__(self, store: BlockStore, name_of: Callable[[bytes], BlockName]) -> None:
        self._store = store
        self._name_of = name_of
        self._failed: dict[str, set[bytes]] = {}

    def has(self, req_id: str, key: bytes) -> bool | None:
        """Return whether the store has it."""
        if key in self._failed.get(req_id, ()):
            return False
        return _is_there(self._store, self._name_of, [key])[0]

    def send(self) -> None:
        """Nothing to do: all was answered."""

    def failed(self, req_id: str, keys: Sequence[bytes]) -> None:
        """Remember it, or the request would ask for them for ever."""
        self._failed.setdefault(req_id, set()).update(keys)

    def forget(self, req_id: str) -> None:
        """Forget what failed."""
        self._failed.pop(req_id, None)

    def close(self) -> None:
        """Nothing to do."""


class LaterLookups:
    """Of a store that must be asked over a network. See :class:`Lookups`.

    Each request asks for itself, and each of its chunks once: what it was told it is told again.

    Args:
        store: that is asked.
        name_of: returns what the store calls a chunk.
    """

    def __init__(self, store: BlockStore, name_of: Callable[[bytes], BlockName]) -> None:
        self._store = store
        self._name_of = name_of
        self._known: dict[str, dict[bytes, bool | None]] = {}
        self._asking: dict[str, list[bytes]] = {}
        self._questions: queue.SimpleQueue[dict[str, list[bytes]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[str, list[bytes], list[bool]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="pagefold-tier-look", daemon=True)
        self._thread.start()

    def has(self, req_id: str, key: bytes) -> bool | None:
        """Return what is known, and note what is to be asked."""
        self._take_answers()
        known = self._known.setdefault(req_id, {})
        if key not in known:
            known[key] = None
            self._asking.setdefault(req_id, []).append(key)
        return known[key]

    def send(self) -> None:
        """Ask."""
        self._take_answers()
        if self._asking:
            self._questions.put(self._asking)
            self._asking = {}

    def failed(self, req_id: str, keys: Sequence[bytes]) -> None:
        """Take them as missing."""
        known = self._known.get(req_id)
        if known is not None:
            known.update(dict.fromkeys(keys, False))

    def forget(self, req_id: str) -> None:
        """Forget what it was told; an answer that still comes is dropped."""
        self._known.pop(req_id, None)
        self._asking.pop(req_id, None)

    def close(self) -> None:
        """End the thread."""
        self._questions.put(None)
        self._thread.join()

    def _take_answers(self) -> None:
        while True:
            try:
                req_id, keys, found = self._answers.get_nowait()
            except queue.Empty:
                return
            known = self._known.get(req_id)
            if known is not None:
                for key, is_there in zip(keys, found, strict=True):
                    if known.get(key) is None and key in known:
                        known[key] = is_there

    def _work(self) -> None:
        while (asked := self._questions.get()) is not None:
            for req_id, keys in asked.items():
                self._answers.put((req_id, keys, _is_there(self._store, self._name_of, keys)))


def _is_there(store: BlockStore, name_of: Callable[[bytes], BlockName], keys: list[bytes]) -> list[bool]:
    """Return of each chunk whether the store probably has it; of a store that fails, that it has none."""
    found: list[bool] = []
    try:
        names = [name_of(key) for key in keys]
        num_missing = 0
        while len(found) < len(keys) and num_missing < _MOST_MISSES:
            num = store.count(names[len(found) :])
            found += [True] * num
            if len(found) < len(keys):
                found.append(False)
                num_missing += 1
    except Exception as error:  # noqa: BLE001 - whatever a store does, vLLM goes on without it
        _log.debug("the tier's store failed: %s", error)
    return found + [False] * (len(keys) - len(found))
