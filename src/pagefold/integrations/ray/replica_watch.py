"""ReplicaWatch: who wants to know which replicas take requests.

It is a module of its own since Ray copies the module of a request router by value, with all that is in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["tell_watchers", "watch_replicas"]

_watchers: list[Callable[[frozenset[str]], None]] = []


def watch_replicas(watcher: Callable[[frozenset[str]], None]) -> None:
    """Have ``watcher`` told the names of all replicas that take requests, whenever they change, in this process."""
    _watchers.append(watcher)


def tell_watchers(names: frozenset[str]) -> None:
    """The replicas that take requests are these now."""
    for watcher in _watchers:
        watcher(names)
