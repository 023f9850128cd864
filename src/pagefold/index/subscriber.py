"""KVEventSubscriber: hears one replica's events over ZeroMQ, and keeps the index up to date.

A thread of its own has the sockets. What comes is three frames: topic, number (8 bytes, big-endian), payload. What was
missed is asked for at the replay endpoint, as vLLM's publisher answers it (0.32, ``distributed/kv_events.py``): a
number is sent, and the batches from there on come back, and then an end mark.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from pagefold.errors import ConfigError
from pagefold.index.order import EventOrder, Numbered
from pagefold.index.wire import END_MARK, NUMBER_BYTES, number_frame

try:
    import zmq
except ImportError:
    _missing = "To hear KV events, pyzmq must be installed."
    raise ConfigError(_missing, remedy='pip install "pagefold[events]"') from None

if TYPE_CHECKING:
    from types import TracebackType

    from pagefold.index.order import EventCounts
    from pagefold.index.prefix_index import PrefixIndex

__all__ = ["KVEventSubscriber"]

_log = logging.getLogger(__name__)

_NUM_FRAMES = 3
_TURN_MS = 100
"""How long the thread waits before it looks whether it is to end."""


class KVEventSubscriber:
    """Hears one replica.

    Args:
        index: what is told.
        replica: its name there.
        endpoint: where its publisher is, as ``tcp://10.0.0.3:5557``; with ``*`` in it the subscriber listens, and the
            publisher is the one that connects.
        replay_endpoint: where it answers who missed something; None for nowhere: then what is missed is lost.
        topic: only events of topics that begin so.
        replay_timeout_s: how long an answer may take to begin, and to go on, in seconds.
        idle_s: after so many seconds without events the publisher is asked whether it is still there.

    Raises:
        ConfigError: an endpoint is none, or cannot be had.
    """

    def __init__(  # noqa: PLR0913 - by name
        self,
        index: PrefixIndex,
        replica: str,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        replay_timeout_s: float = 2.0,
        idle_s: float = 5.0,
    ) -> None:
        self._index = index
        self._replica = replica
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_s = replay_timeout_s
        self._idle_s = idle_s
        self._context: zmq.Context[Any] = zmq.Context()
        self._events = self._context.socket(zmq.SUB)
        try:
            self._events.setsockopt(zmq.LINGER, 0)
            self._events.setsockopt(zmq.RCVHWM, 0)  # what waits is bounded by what the publisher keeps for us
            self._events.setsockopt(zmq.IPV6, int("[" in endpoint))
            self._events.setsockopt(zmq.SUBSCRIBE, topic.encode())
            self._monitor = self._events.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            (self._events.bind if "*" in endpoint else self._events.connect)(endpoint)
            self._endpoint = self._events.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            msg = f"Cannot hear KV events at {endpoint}: {error.strerror}."
            raise ConfigError(msg, remedy="An endpoint is written as tcp://host:5557.") from error
        self._order = EventOrder(index, replica, self._ask)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pagefold-events-{replica}", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> EventCounts:
        """What has come so far."""
        return self._order.counts

    @property
    def endpoint(self) -> str:
        """Where it listens or has connected to; a port that was left open is filled in."""
        return self._endpoint

    @property
    def is_alive(self) -> bool:
        """Whether it still hears: False once it is closed, or a bug of ours has ended it."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End it. What the index has of the replica stays, and is not known any more."""
        self._is_closing.set()
        self._thread.join()

    def __enter__(self) -> KVEventSubscriber:  # noqa: PYI034 - it is not made to be subclassed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # On its thread.

    def _run(self) -> None:
        try:
            self._hear()
        except Exception:  # noqa: BLE001 - a bug of ours, told by is_alive
            _log.exception("events of %s are heard no more", self._replica)
        finally:
            self._index.doubt(self._replica)
            self._events.disable_monitor()
            self._context.destroy(linger=0)

    def _hear(self) -> None:
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        quiet_since_s = float("-inf")  # what was sent before we listened is asked for at once
        while not self._is_closing.is_set():
            ready = dict(poller.poll(_TURN_MS))
            if self._monitor in ready:
                self._monitor.recv_multipart()
                self._order.disconnect()
            if self._events in ready:
                self._take(self._events.recv_multipart())
                quiet_since_s = time.monotonic()
            elif self._replay_endpoint is not None and time.monotonic() - quiet_since_s >= self._idle_s:
                self._order.check()
                quiet_since_s = time.monotonic()

    def _take(self, frames: list[bytes]) -> None:
        """Take what was published, if it is a batch."""
        if len(frames) != _NUM_FRAMES or len(frames[1]) != NUMBER_BYTES or frames[1] == END_MARK:
            self._order.note_bad()
            return
        self._order.take(Numbered(int.from_bytes(frames[1], "big"), frames[2]))

    def _ask(self, first: int) -> list[Numbered] | None:
        """Ask the publisher for its batches from ``first`` on; None if it does not answer to the end."""
        if self._replay_endpoint is None:
            return None
        socket = self._context.socket(zmq.DEALER)  # a new one each time: no answer of before is in the way
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.IPV6, int("[" in self._replay_endpoint))
            socket.connect(self._replay_endpoint)
            socket.send_multipart([b"", number_frame(first)])
            batches: list[Numbered] = []
            while not self._is_closing.is_set() and socket.poll(int(self._replay_timeout_s * 1000)):
                frames = socket.recv_multipart()[1:]  # the first is the empty one that REQ sockets want
                if len(frames) != _NUM_FRAMES or len(frames[1]) != NUMBER_BYTES:
                    self._order.note_bad()
                elif frames[1] == END_MARK:
                    return batches
                else:
                    batches.append(Numbered(int.from_bytes(frames[1], "big"), frames[2]))
        except zmq.ZMQError as error:
            _log.warning("%s cannot be asked at %s: %s", self._replica, self._replay_endpoint, error)
        finally:
            socket.close(linger=0)
        return None
