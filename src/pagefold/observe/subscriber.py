"""Subscriber: what listens to events and may fail without anybody else noticing: requests are served on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Mapping

    from pagefold.events import Event

__all__ = ["Subscriber"]


class Subscriber:
    """Notes events, each under its lock; readers come on other threads.

    Args:
        on: of each kind of event that tells anything, what notes it.
        log: where a failure goes.
        failure: what is said of it, with a place for the kind of event at which it was.

    Attributes:
        has_failed: a bug of ours has ended it.
    """

    def __init__(self, on: Mapping[type, Callable[[Any], None]], log: logging.Logger, failure: str) -> None:
        self._on = on
        self._log, self._failure = log, failure
        self._lock = threading.Lock()
        self.has_failed = False

    def __call__(self, event: Event) -> None:
        """Note an event, if it tells anything. Should that fail, nothing is noted any more: requests are served on."""
        note = self._on.get(type(event))
        if note is None or self.has_failed:
            return
        try:
            with self._lock:
                note(event)
        except Exception:  # noqa: BLE001 - whatever it is, requests are served
            self.has_failed = True
            self._log.exception(self._failure, type(event).__name__)
