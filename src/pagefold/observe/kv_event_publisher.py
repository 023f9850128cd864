"""KVEventPublisher: sends KV events over ZeroMQ, as vLLM's ``ZmqEventPublisher`` does (0.32).

A batch is three frames: topic, number (8 bytes, big-endian), payload. The last batches are kept, and sent once more to
who asks for them at the replay endpoint. Who asks for what is kept no more is helped by a batch that says that nothing
is found, and then what is: it goes to all subscribers. So it does when batches had to be dropped, whose numbers are
missing. It does so once in some seconds at most: whoever asks meanwhile is helped by the next one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from pagefold.errors import ConfigError
from pagefold.index.wire import END_MARK, NUMBER_BYTES, encode_batch, number_frame
from pagefold.observe.kv_event_batch import BatchMaker
from pagefold.observe.kv_events import KVEvents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.config import KVEventsConfig
    from pagefold.events import Event
    from pagefold.kv import KeepRule

__all__ = ["KVEventPublisher", "SentCounts"]

_log = logging.getLogger(__name__)

_NUM_FRAMES_OF_ASKING = 3
_TURN_S = 0.05
"""How long the thread waits for a batch before it looks who asks for old ones."""
_PATIENCE_S = 5.0
"""How long closing waits for what is still to be sent."""
_LINGER_MS = 1000
_ANEW_EVERY_S = 5.0
"""All is told anew no more often: it stops the engine's thread for a moment, and whoever reaches the port can ask."""


class SentCounts(NamedTuple):
    """What has become of batches since the start.

    Attributes:
        num_sent: that were published.
        num_dropped: that were not, since too many waited; their numbers are missing.
        num_replayed: that were sent once more to who asked.
        num_told_anew: times that all blocks were told of anew.
        num_put_off: askings for that which had to wait, since it had just been done.
    """

    num_sent: int
    num_dropped: int
    num_replayed: int
    num_told_anew: int
    num_put_off: int


class KVEventPublisher:
    """Subscribes to an engine's events, and sends what they say of blocks. A thread of its own has the sockets.

    Args:
        config: where to.
        seed: what chains of hashes begin with.
        uses_int_hashes: whether hashes are told by their last 64 bits.

    Attributes:
        config: as above.
        endpoint: where events go; a port that was left open is filled in.
        replay_endpoint: where old ones can be asked for; empty for nowhere.

    Raises:
        ConfigError: an endpoint cannot be had.
    """

    def __init__(self, config: KVEventsConfig, *, seed: str, uses_int_hashes: bool) -> None:
        self.config = config
        self._topic = config.topic.encode()
        self._seed, self._uses_int_hashes = seed, uses_int_hashes
        self._context: zmq.Context[Any] = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint = ""
        try:
            self._events = self._open(zmq.PUB, config.endpoint, config.hwm, is_bound=config.listens)
            self.endpoint = self._events.getsockopt_string(zmq.LAST_ENDPOINT)
            if config.replay_endpoint is not None:
                self._replay = self._open(zmq.ROUTER, config.replay_endpoint, config.hwm, is_bound=True)
                self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._noted = KVEvents(config.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._num_sent = self._num_replayed = self._num_told_anew = self._num_put_off = self._num_failed = 0
        self._has_given_up = False
        self._num_healed = 0  # dropped batches of which the loss is made good
        self._is_anew_wanted = False
        self._anew_from_s = float("-inf")  # all may be told anew from then on
        self._maker: BatchMaker | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pagefold-kv-events", daemon=True)

    def begin(self, block_size: int, rules: Sequence[KeepRule]) -> None:
        """Begin to send: there is a cache now.

        Args:
            block_size: tokens a block.
            rules: what each cache group keeps.
        """
        self._maker = BatchMaker(block_size, rules, seed=self._seed, uses_int_hashes=self._uses_int_hashes)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Note an event."""
        self._noted(event)

    @property
    def counts(self) -> SentCounts:
        """What has become of batches."""
        return SentCounts(self._num_sent, self._num_dropped, self._num_replayed, self._num_told_anew, self._num_put_off)

    def close(self) -> None:
        """Send what is noted, for a short while at most, and end."""
        self._is_closing.set()
        if self._maker is None:
            self._context.destroy(linger=0)
        else:
            self._thread.join(_PATIENCE_S)

    # On its thread.

    def _run(self) -> None:
        try:
            while True:
                is_last = self._is_closing.is_set()
                while self._replay is not None and self._replay.poll(0):
                    self._answer(self._replay)
                num_left = self._noted.num_waiting + 1 if is_last else 1
                for _ in range(num_left):
                    self._send_next(0.0 if is_last else _TURN_S)
                if is_last:
                    break
        except Exception:  # noqa: BLE001 - whatever it is, requests are served
            _log.exception("KV events have failed: none are sent any more")
        finally:
            self._noted.end()  # else batches would be kept that nobody takes
            self._context.destroy(linger=_LINGER_MS)

    def _send_next(self, timeout_s: float) -> None:
        """Send a batch, if one comes in time."""
        if self._noted.has_failed and not self._has_given_up:  # a bug of ours: better nothing than what is not so
            self._has_given_up = True
            self._noted.give_up()
        noted = self._noted.take(timeout_s)
        if noted is not None:
            assert self._maker is not None, "begun"
            try:
                payload = encode_batch(self._maker.make(noted))
            except Exception:  # noqa: BLE001 - as below: its number is missing then
                self._num_failed += 1
                _log.exception("batch %d of KV events is left out", noted.number)
            else:
                self._kept.append((noted.number, payload))
                self._events.send_multipart((self._topic, number_frame(noted.number), payload))
                self._num_sent += 1
        has_room = not self._noted.num_waiting
        if self._is_anew_wanted or (self._num_dropped > self._num_healed and has_room):
            self._tell_anew()

    @property
    def _num_dropped(self) -> int:
        return self._noted.num_dropped + self._num_failed

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send what somebody asks for and is still kept, and then an end mark."""
        frames = replay.recv_multipart()
        if len(frames) != _NUM_FRAMES_OF_ASKING or len(frames[2]) != NUMBER_BYTES:
            _log.warning("somebody asks for KV events in %d frames that are no question", len(frames))
            return
        client, _, asked = frames
        first = int.from_bytes(asked, "big")
        for number, payload in self._kept:
            if number >= first:
                replay.send_multipart((client, b"", self._topic, number_frame(number), payload))
                self._num_replayed += 1
        replay.send_multipart((client, b"", b"", END_MARK, b""))
        if self._kept and first < self._kept[0][0]:
            self._is_anew_wanted = True
            self._num_put_off += time.monotonic() < self._anew_from_s

    def _tell_anew(self) -> None:
        """Tell all anew, or leave that to a later turn if it has just been done."""
        now_s = time.monotonic()
        if now_s < self._anew_from_s:
            return
        self._anew_from_s = now_s + _ANEW_EVERY_S
        self._is_anew_wanted = False
        self._num_healed = self._num_dropped
        self._num_told_anew += 1
        self._noted.tell_all()

    # Inside.

    def _open(self, kind: int, endpoint: str, hwm: int, *, is_bound: bool) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        try:
            socket.setsockopt(zmq.SNDHWM, hwm)
            socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            (socket.bind if is_bound else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            what = "listen on" if is_bound else "connect to"
            msg = f"KV events cannot {what} {endpoint}: {error.strerror}."
            raise ConfigError(msg, remedy="Choose another endpoint in --kv-events-config.") from error
        return socket
