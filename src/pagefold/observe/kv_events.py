"""KVEvents: a subscriber of events that notes which blocks can be found, and hands over what has changed, step by step.

On the engine's thread no more is done than to note nodes and their groups; what they are called to others is found
where batches are made (``kv_event_batch.py``), on another thread.

What is noted is what the tree has on the device: a block that leaves it is removed, though a tier behind may hold it.
"""

from __future__ import annotations

import logging
import time
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.events import (
    BlockEvicted,
    BlocksPublished,
    BlocksRegained,
    CacheReset,
    PathForgotten,
    PathsDistrusted,
    StepAbandoned,
    StepApplied,
)
from pagefold.observe.subscriber import Subscriber

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.events import Event
    from pagefold.kv.block import Node

__all__ = ["CLEARED", "Change", "KVEvents", "NotedBatch", "Place"]

_log = logging.getLogger(__name__)


class Place:
    """A place of a path that others may have been told of.

    Attributes:
        parent: the place before; None before the first.
        namespace: the exact key of its namespace.
        key: its packed tokens.
        depth: how many places lie before it.
        groups: the cache groups that have a block there, as bits, as far as that is noted.
        block_hash: what others call it; empty until somebody asks.
    """

    __slots__ = ("block_hash", "depth", "groups", "key", "namespace", "parent")

    def __init__(self, node: Node, parent: Place | None) -> None:
        self.parent = parent
        self.namespace = node.root.key
        self.key = node.key
        self.depth = node.depth
        self.groups = 0
        self.block_hash = b""


class Change(NamedTuple):
    """What has become of a place.

    Attributes:
        place: which one; None where all are gone.
        stored, removed: the cache groups that have a block there now, and those that have none any more, as bits.
    """

    place: Place | None
    stored: int = 0
    removed: int = 0


CLEARED = Change(None)
"""No block is found any more."""


class NotedBatch(NamedTuple):
    """What has changed in a step.

    Attributes:
        number: of the batch, from 0. Numbers that are missing were dropped.
        at_s: when, in seconds since 1970.
        changes: in their order.
    """

    number: int
    at_s: float
    changes: list[Change]


class KVEvents(Subscriber):
    """Notes what can be found. Events come on the engine's thread; another one takes batches.

    Args:
        max_queue_size: so many batches may wait to be taken; what comes then is dropped.
        clock: seconds since 1970.
        is_begun: whether a batch that says that nothing is found comes first, as it does from who begins.

    Attributes:
        num_dropped: batches.
    """

    def __init__(
        self, max_queue_size: int = 100_000, clock: Callable[[], float] = time.time, *, is_begun: bool = True
    ) -> None:
        on: dict[type, Callable[[Any], None]] = {
            BlockEvicted: self._on_node,
            BlocksPublished: self._on_nodes,
            BlocksRegained: self._on_nodes,
            CacheReset: self._on_cache_reset,
            PathForgotten: self._on_node,
            PathsDistrusted: self._on_paths_distrusted,
            StepAbandoned: self._on_step,
            StepApplied: self._on_step,
        }
        super().__init__(on, _log, "KV events have failed at %s: none are sent any more")
        self._clock = clock
        self._places: dict[Node, Place] = {}
        self._changes: list[Change] = []
        self._batches: Queue[NotedBatch] = Queue(max_queue_size)
        self._next = 0
        self.num_dropped = 0
        if is_begun:
            self._changes.append(CLEARED)
            self._hand_over()

    @property
    def num_waiting(self) -> int:
        """How many batches wait to be taken."""
        return self._batches.qsize()

    def take(self, timeout_s: float = 0.0) -> NotedBatch | None:
        """Return the next batch; None if there is none for so many seconds.

        What was noted outside of steps is in one too.
        """
        try:
            return self._batches.get(timeout=timeout_s) if timeout_s else self._batches.get_nowait()
        except Empty:
            with self._lock:
                self._hand_over()
        try:
            return self._batches.get_nowait()
        except Empty:
            return None

    def tell_all(self) -> None:
        """Let the next batch tell of everything anew, for those who have missed something."""
        with self._lock:
            self._hand_over()
            self._changes.append(CLEARED)
            self._changes += [Change(place, place.groups) for place in self._places.values() if place.groups]
            self._hand_over()

    def give_up(self) -> None:
        """Let the next batch say that nothing is found, and none come after it: what was noted may be wrong."""
        with self._lock:
            self.has_failed = True
            self._places.clear()
            self._changes = [CLEARED]
            self._hand_over()

    def end(self) -> None:
        """Note nothing any more, and keep nothing: nobody takes batches from now on."""
        with self._lock:
            self.has_failed = True
            self._places.clear()
            self._changes.clear()
            while self.num_waiting:
                self._batches.get_nowait()

    # Inside.

    def _on_nodes(self, event: BlocksPublished | BlocksRegained) -> None:
        for node in event.nodes:
            self._note(node)

    def _on_node(self, event: BlockEvicted | PathForgotten) -> None:
        if event.node is not None:
            self._note(event.node)

    def _on_paths_distrusted(self, event: PathsDistrusted) -> None:
        for node in reversed(event.nodes):  # they are still in the tree, and leave it now
            self._drop(node)

    def _on_cache_reset(self, event: CacheReset) -> None:  # noqa: ARG002 - it tells nothing but that
        self._places.clear()
        self._changes.append(CLEARED)
        self._hand_over()

    def _on_step(self, event: Event) -> None:  # noqa: ARG002 - it is over
        self._hand_over()

    def _note(self, node: Node) -> None:
        """Note which groups have a block at a node."""
        if not node.attached:
            self._drop(node)
            return
        if not node.committed:  # what goes of it nobody was told of, and the rest will be published
            return
        place = self._places.get(node) or self._place(node)
        groups = 0
        for group, block in enumerate(node.blocks):
            if block is not None:
                groups |= 1 << group
        stored, removed = groups & ~place.groups, place.groups & ~groups
        if stored or removed:
            place.groups = groups
            self._changes.append(Change(place, stored, removed))

    def _drop(self, node: Node) -> None:
        """Note that a node is gone."""
        place = self._places.pop(node, None)
        if place is not None and place.groups:
            self._changes.append(Change(place, 0, place.groups))
            place.groups = 0

    def _place(self, node: Node) -> Place:
        """Return the place of a node of which nothing is noted, and note those before it."""
        path: list[Node] = []
        at: Node | None = node
        while at is not None and at.parent is not None and at not in self._places:
            path.append(at)
            at = at.parent
        place = None if at is None else self._places.get(at)
        for one in reversed(path):
            place = self._places[one] = Place(one, place)
        assert place is not None, "a root has no block"
        return place

    def _hand_over(self) -> None:
        """Let what has changed be taken, if anything has."""
        if not self._changes:
            return
        batch = NotedBatch(self._next, self._clock(), self._changes)
        self._next += 1
        self._changes = []
        try:
            self._batches.put_nowait(batch)
        except Full:
            self.num_dropped += 1
