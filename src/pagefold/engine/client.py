"""EngineClient: the engine as an event loop sees it, and the thread that runs it.

The engine stays on one thread of its own (kernels release the GIL). Requests and cancellations go in through a queue;
what a step produced comes out with one call into the event loop a step, however many requests it served.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pagefold.engine.outputs import OutputDelta
from pagefold.errors import EngineStoppedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from pagefold.engine.engine import Engine
    from pagefold.request import SamplingParams
    from pagefold.tokenizer import Tokenizer

__all__ = ["EngineClient", "EngineStatus", "EngineThread"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine is doing now.

    Attributes:
        num_running, num_waiting: requests.
        kv_cache_usage: share of blocks held by requests, 0 to 1.
        num_free_blocks, num_cached_blocks, num_blocks: of the pool. ``free + cached == all`` when nothing runs.
        is_healthy: False after a failure that the engine does not survive.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_free_blocks: int
    num_cached_blocks: int
    num_blocks: int
    is_healthy: bool


class EngineClient(Protocol):
    """What the server knows of an engine."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""

    def ensure_ready(self) -> None:
        """Return if it takes requests now.

        Raises:
            EngineStoppedError: it does not; the message says why.
        """

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Refuse what can never be served, before anything is streamed.

        Raises:
            InvalidRequestError: with the field at fault.
            EngineStoppedError: the engine takes no more requests.
        """

    def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        tenant: str = "",
        cache_salt: str = "",
    ) -> AsyncGenerator[OutputDelta, None]:
        """Yield what each step adds, to the last delta, which has a ``finish_reason``.

        Closing the generator early, or cancelling who awaits it, ends the request and frees its blocks.

        Raises:
            InvalidRequestError, EngineStoppedError: as :meth:`check`.
        """

    def status(self) -> EngineStatus:
        """Return what it is doing now."""


class _Stream:
    """The event loop's end of one request."""

    __slots__ = ("deltas", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.deltas: asyncio.Queue[OutputDelta | Exception] = asyncio.Queue()


class EngineThread:
    """An :class:`EngineClient` that runs an engine on a thread of its own.

    Args:
        engine: nobody else may call it from now on.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # touched by the engine's thread only
        self._gate = threading.Lock()  # no request may be queued behind the command to drain: nobody would take it
        self._takes_requests = True
        self._is_draining = False
        self._must_stop = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="pagefold-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """See :class:`EngineClient`."""
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """See :class:`EngineClient`."""
        return self._engine.capacity.max_model_len

    def status(self) -> EngineStatus:
        """See :class:`EngineClient`. Plain reads of ints, so any thread may ask."""
        scheduler = self._engine.scheduler
        core = scheduler.core
        return EngineStatus(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=core.usage,
            num_free_blocks=core.pool.num_free,
            num_cached_blocks=core.pool.num_cached,
            num_blocks=core.pool.num_blocks,
            is_healthy=self._failure is None and self._thread.is_alive(),
        )

    @property
    def has_failed(self) -> bool:
        """Whether it died of a bug."""
        return self._failure is not None

    def ensure_ready(self) -> None:
        """See :class:`EngineClient`."""
        if self._failure is not None:
            msg = f"The engine has failed: {self._failure}."
            raise EngineStoppedError(msg, remedy="Restart the server.")
        if not self._takes_requests:
            msg = "The server is shutting down and takes no more requests."
            raise EngineStoppedError(msg, remedy="Try another replica, or again later.")

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> None:
        """See :class:`EngineClient`."""
        self.ensure_ready()
        self._engine.check(prompt_token_ids, sampling)

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        tenant: str = "",
        cache_salt: str = "",
    ) -> AsyncGenerator[OutputDelta, None]:
        """See :class:`EngineClient`."""
        self.check(prompt_token_ids, sampling)
        stream = _Stream(asyncio.get_running_loop())

        def add() -> None:
            try:
                self._engine.add(request_id, prompt_token_ids, sampling, tenant=tenant, cache_salt=cache_salt)
            except Exception as error:  # noqa: BLE001 - whoever asked is told
                failure = error  # Python forgets `error` where this clause ends
                _call(stream.loop, lambda: stream.deltas.put_nowait(failure))
            else:
                self._streams[request_id] = stream

        with self._gate:
            self.ensure_ready()
            self._commands.put(add)
        has_ended = False
        try:
            while not has_ended:
                delta = await stream.deltas.get()
                if isinstance(delta, Exception):
                    has_ended = True
                    raise delta
                has_ended = delta.finish_reason is not None
                yield delta
        finally:
            if not has_ended:
                self._commands.put(lambda: self._abort(request_id, stream))

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests, let those that are here finish, and stop. Blocks.

        After ``timeout_s`` what still runs is ended with ``abort``. True when all that was here has finished.
        """
        with self._gate:
            self._takes_requests = False
            self._commands.put(self._begin_draining)
        self._thread.join(min(timeout_s, threading.TIMEOUT_MAX))
        has_finished = not self._thread.is_alive()
        if not has_finished:
            self._commands.put(self._stop)
            self._thread.join()
        return has_finished and self._failure is None

    # On the engine's thread.

    def _run(self) -> None:
        try:
            while not self._must_stop:
                self._take_commands()
                if self._engine.has_work:
                    self._deliver(self._engine.step())
                elif self._is_draining and self._commands.empty():
                    return
                else:
                    self._commands.get()()
        except Exception as error:  # noqa: BLE001 - a bug of ours: everybody is told, nobody waits for ever
            _log.exception("the engine's thread has failed")
            self._failure = error
            self._fail_all(error)

    def _take_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, OutputDelta]]] = {}
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            if delta.finish_reason is not None:
                del self._streams[delta.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, delta))
        for loop, pairs in by_loop.items():
            _call(loop, lambda pairs=pairs: [stream.deltas.put_nowait(delta) for stream, delta in pairs])  # type: ignore[misc]

    def _abort(self, request_id: str, stream: _Stream) -> None:
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._engine.abort(request_id)

    def _begin_draining(self) -> None:
        self._is_draining = True

    def _stop(self) -> None:
        for request_id, stream in list(self._streams.items()):
            self._engine.abort(request_id)
            last = OutputDelta(request_id, "", (), 0, "abort", "The server shut down.")
            _call(stream.loop, lambda stream=stream, last=last: stream.deltas.put_nowait(last))  # type: ignore[misc]
        self._streams.clear()
        self._must_stop = True

    def _fail_all(self, error: Exception) -> None:
        msg = f"The engine has failed: {error}."
        stopped = EngineStoppedError(msg, remedy="Restart the server.")
        while True:
            for stream in self._streams.values():
                _call(stream.loop, lambda stream=stream: stream.deltas.put_nowait(stopped))  # type: ignore[misc]
            self._streams.clear()
            if self._must_stop or (self._is_draining and self._commands.empty()):
                return
            self._commands.get()()  # requests that were queued meanwhile learn it too


def _call(loop: asyncio.AbstractEventLoop, what: Callable[[], object]) -> None:
    """Run ``what`` in the event loop; nobody is there to be told when the loop has closed."""
    try:
        loop.call_soon_threadsafe(what)
    except RuntimeError:
        _log.debug("the event loop has closed")
