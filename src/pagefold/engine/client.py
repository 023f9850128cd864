"""EngineClient: the engine as an event loop sees it, and the thread that runs it.

The engine stays on one thread of its own (kernels release the GIL). Requests and cancellations go in through a queue;
what a step produced comes out with one call into the event loop a step, however many requests it served.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from pagefold.engine.outputs import OutputDelta
from pagefold.errors import EngineStoppedError, QueueFullError
from pagefold.request import ANYBODY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pagefold.engine.engine import Engine
    from pagefold.engine.pins import PinReport
    from pagefold.memory.cache_size import CacheSize
    from pagefold.request import Caller
    from pagefold.sampling import SamplingParams
    from pagefold.scheduler import Scheduler
    from pagefold.structured.grammar import Grammar
    from pagefold.structured.params import StructuredOutputsParams
    from pagefold.tokenizer import Tokenizer

__all__ = ["EngineClient", "EngineStatus", "EngineThread", "TokenStream"]

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_NUM_COMPILERS = 2
_NUM_ENDS = 32
_MAX_RETRY_AFTER_S = 60


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine is doing now; by default nothing, and it has no memory yet.

    Attributes:
        num_running, num_waiting: requests.
        kv_cache_usage: share of blocks held by requests, 0 to 1.
        num_free_blocks, num_cached_blocks, num_blocks: of the pool. ``free + cached == all`` when nothing runs.
        num_pinned_blocks: how many of them pins keep, whether or not somebody uses them.
        num_wasted_slots: slots in blocks of running requests that hold no token.
        kv_waste: their share of all slots in blocks held by requests, 0 to 1.
        num_unsaved_blocks: of the host's memory, that no slow tier was given yet.
        tiers_fast: of each slow tier whether it is thought to bring a block sooner than the block is computed.
        is_healthy: False after a failure that the engine does not survive.
        num_deferred: how many of those that wait could not run yet: slow tiers bring their blocks.
        caches: what else is kept, each with its bound.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_blocks: int = 0
    num_pinned_blocks: int = 0
    num_wasted_slots: int = 0
    kv_waste: float = 0.0
    num_unsaved_blocks: int = 0
    tiers_fast: Mapping[str, bool] = field(default_factory=dict)
    is_healthy: bool = True
    num_deferred: int = 0
    caches: tuple[CacheSize, ...] = ()

    @property
    def num_for_capacity(self) -> int:
        """How many of those that wait wait for a place or for memory."""
        return self.num_waiting - self.num_deferred

    @classmethod
    def of(cls, scheduler: Scheduler, *, is_healthy: bool = True, caches: Sequence[CacheSize] = ()) -> EngineStatus:
        """Look at ``scheduler`` and its core. Plain reads, so any thread may."""
        core = scheduler.core
        slow = core.slow
        num_wasted_slots = scheduler.num_wasted_slots
        num_deferred = len(scheduler.fetching)
        return cls(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + num_deferred,
            num_deferred=num_deferred,
            caches=tuple(caches),
            kv_cache_usage=core.usage,
            num_free_blocks=core.pool.num_free,
            num_cached_blocks=core.pool.num_cached,
            num_blocks=core.pool.num_blocks,
            num_pinned_blocks=core.pins.num_blocks,
            num_wasted_slots=num_wasted_slots,
            kv_waste=min(1.0, num_wasted_slots / max(1, core.num_active * core.block_size)),
            num_unsaved_blocks=len(slow.host.unsaved),
            tiers_fast={tier: slow.arbiter.is_fast(tier) for tier in tuple(slow.arbiter.links)},
            is_healthy=is_healthy,
        )


class EngineClient(Protocol):
    """What the server knows of an engine."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""

    @property
    def cached_block_size(self) -> int | None:
        """How many tokens a block of the prefix cache holds; None where prefixes are not cached."""

    def ensure_ready(self) -> None:
        """Return if it takes requests now.

        Raises:
            EngineStoppedError: it does not; the message says why.
        """

    async def compile_grammar(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar of what an output must look like, for :meth:`submit`.

        Raises:
            InvalidRequestError: it does not compile, or takes too much.
        """

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        caller: Caller = ANYBODY,
        grammar: Grammar | None = None,
    ) -> TokenStream:
        """Queue a request; its stream must be closed, also when it was never read. Called in an event loop.

        Raises:
            InvalidRequestError: it can never be served; with the field at fault.
            EngineStoppedError: the engine takes no more requests.
            QueueFullError: too many wait already.
        """

    async def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; return how many blocks became free.

        Raises:
            EngineStoppedError: the engine takes no more commands.
            TierError: a slow tier could not forget.
        """

    async def pins(self) -> PinReport:
        """Return what is pinned now.

        Raises:
            EngineStoppedError: the engine takes no more commands.
        """

    async def unpin(self, pin_id: str) -> bool:
        """Take a pin away; its blocks stay cached. False if there is no such pin.

        Raises:
            EngineStoppedError: the engine takes no more commands.
        """

    def status(self) -> EngineStatus:
        """Return what it is doing now."""


class TokenStream:
    """What each step adds to one request: an async iterator that ends behind the delta that ``is_last``.

    A reader that is slower than the engine gets what has come meanwhile as one delta, and so catches up. Deltas with
    logprobs come one by one.

    Raises:
        InvalidRequestError, EngineStoppedError: the engine refused the request, or failed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, num_samples: int, abort: Callable[[TokenStream], None]) -> None:
        self.loop = loop
        self.num_samples = num_samples
        self.deltas: asyncio.Queue[OutputDelta | Exception] = asyncio.Queue()
        self._held: deque[list[OutputDelta] | Exception] = deque()  # taken from the queue; a list is told as one
        self._growing: dict[int, list[OutputDelta]] = {}  # the lists of ``_held`` that may grow, by sample
        self._abort = abort
        self._has_ended = False

    def __aiter__(self) -> TokenStream:
        """Return itself: there is one reader."""
        return self

    async def __anext__(self) -> OutputDelta:
        """Return the next delta."""
        if self._has_ended:
            raise StopAsyncIteration
        if not self._held:
            self._hold(await self.deltas.get())
        while not self.deltas.empty():
            self._hold(self.deltas.get_nowait())
        first = self._held.popleft()
        if isinstance(first, Exception):
            self._has_ended = True
            raise first
        if self._growing.get(first[0].index) is first:
            del self._growing[first[0].index]
        delta = OutputDelta.merged(first)
        self._has_ended = delta.is_last
        return delta

    def _hold(self, arrived: OutputDelta | Exception) -> None:
        """Put what has arrived to what waits of its sample, or else behind all: each sample's deltas stay in order."""
        if isinstance(arrived, Exception):
            self._held.append(arrived)
        elif arrived.can_merge and arrived.index in self._growing:
            self._growing[arrived.index].append(arrived)
        else:
            self._held.append(alone := [arrived])
            self._growing.pop(arrived.index, None)
            if arrived.can_merge:
                self._growing[arrived.index] = alone

    def close(self) -> None:
        """Stop reading: a request that has not ended ends now, and gives its blocks back. Again does nothing."""
        if not self._has_ended:
            self._has_ended = True
            self._abort(self)


class EngineThread:
    """An :class:`EngineClient` that runs an engine on a thread of its own.

    Args:
        engine: nobody else may call it from now on.
        max_requests: how many may be here at once, those that wait included, each sample counted; None for any number.
    """

    def __init__(self, engine: Engine, *, max_requests: int | None = None) -> None:
        self._engine = engine
        self._end_s = 0.0  # until then it may write to slow tiers what is cached, once it drains
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._max_requests = max_requests
        self._streams: dict[str, TokenStream] = {}  # touched by the engine's thread only
        self._gate = threading.Lock()  # no request may be queued behind the command to drain: nobody would take it
        self._num_requests = 0  # each sample counted, those in the queue of commands included; under the gate
        self._ends_s: deque[float] = deque(maxlen=_NUM_ENDS)  # when the last requests ended; under the gate
        self._takes_requests = True
        self._is_draining = False
        self._must_stop = False
        self._failure: Exception | None = None
        self._compilers = ThreadPoolExecutor(_NUM_COMPILERS, "pagefold-compiler")  # threads start when they are needed
        self._thread = threading.Thread(target=self._run, name="pagefold-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._engine.tiering.wake_by(lambda: self._commands.put(_look_up))
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """See :class:`EngineClient`."""
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """See :class:`EngineClient`."""
        return self._engine.capacity.max_model_len

    @property
    def cached_block_size(self) -> int | None:
        """See :class:`EngineClient`."""
        core = self._engine.scheduler.core
        return core.block_size if core.publishes else None

    def status(self) -> EngineStatus:
        """See :class:`EngineClient`."""
        is_healthy = self._failure is None and self._thread.is_alive()
        return EngineStatus.of(self._engine.scheduler, is_healthy=is_healthy, caches=self._engine.cache_sizes())

    @property
    def has_failed(self) -> bool:
        """Whether the engine died of a bug."""
        return self._failure is not None

    def ensure_ready(self) -> None:
        """See :class:`EngineClient`."""
        if self._failure is not None:
            msg = f"The engine has failed: {self._failure}."
            raise EngineStoppedError(msg, remedy="Restart the server.")
        if not self._takes_requests:
            msg = "The server is shutting down and takes no more requests."
            raise EngineStoppedError(msg, remedy="Try another replica, or again later.")

    async def compile_grammar(self, params: StructuredOutputsParams) -> Grammar:
        """See :class:`EngineClient`."""
        with self._gate:  # once it drains, the compilers take nothing more
            self.ensure_ready()
            compiling = self._compilers.submit(self._engine.compile_grammar, params)
        return await asyncio.wrap_future(compiling)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        caller: Caller = ANYBODY,
        grammar: Grammar | None = None,
    ) -> TokenStream:
        """See :class:`EngineClient`."""
        self._engine.check(prompt_token_ids, sampling, caller)
        num_samples = sampling.num_samples
        loop = asyncio.get_running_loop()
        stream = TokenStream(loop, num_samples, lambda stream: self._commands.put(lambda: abort(stream)))

        def add() -> None:
            try:
                self._engine.add(request_id, prompt_token_ids, sampling, caller, grammar)
            except Exception as error:  # noqa: BLE001 - whoever asked is told
                failure = error  # Python forgets `error` where this clause ends
                self._count_end(num_samples)
                _call(stream.loop, lambda: stream.deltas.put_nowait(failure))
            else:
                self._streams[request_id] = stream

        def abort(stream: TokenStream) -> None:
            if self._streams.get(request_id) is stream:
                self._forget(request_id)
                self._engine.abort(request_id)

        with self._gate:
            self.ensure_ready()
            self._ensure_room(num_samples)
            self._num_requests += num_samples
            self._commands.put(add)
        return stream

    async def reset_prefix_cache(self) -> int:
        """See :class:`EngineClient`."""
        return await asyncio.shield(self._reset())  # what was begun is finished, though nobody waits for it

    async def _reset(self) -> int:
        num_freed, finish = await self._ask(self._engine.begin_reset)
        await asyncio.to_thread(finish)
        return num_freed

    async def pins(self) -> PinReport:
        """See :class:`EngineClient`."""
        return await self._ask(self._engine.pins)

    async def unpin(self, pin_id: str) -> bool:
        """See :class:`EngineClient`."""
        return await self._ask(lambda: self._engine.unpin(pin_id))

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests, let those that are here finish, write what slow tiers are to keep, and stop. Blocks.

        After ``timeout_s`` what still runs is ended with ``abort``. True when all that was here has finished.
        """
        self._end_s = time.monotonic() + timeout_s
        with self._gate:
            self._takes_requests = False
            self._compilers.shutdown(wait=False)
            self._commands.put(self._begin_draining)
        self._thread.join(min(timeout_s, threading.TIMEOUT_MAX))
        has_finished = not self._thread.is_alive()
        if not has_finished:
            self._commands.put(self._stop)
            self._thread.join()
        return has_finished and self._failure is None

    async def _ask(self, command: Callable[[], _Answer]) -> _Answer:
        """Have ``command`` called on the engine's thread, between steps, and return what it returns."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Answer] = loop.create_future()

        def answer() -> None:
            if self._failure is not None:
                error = EngineStoppedError(f"The engine has failed: {self._failure}.", remedy="Restart the server.")
                _call(loop, lambda: None if done.cancelled() else done.set_exception(error))
                return
            try:
                told = command()
            except Exception as error:
                bug = error  # Python forgets `error` where this clause ends
                _call(loop, lambda: None if done.cancelled() else done.set_exception(bug))
                raise
            _call(loop, lambda: None if done.cancelled() else done.set_result(told))

        with self._gate:
            self.ensure_ready()
            self._commands.put(answer)
        return await done

    def _ensure_room(self, num_samples: int) -> None:
        if self._max_requests is None or self._num_requests + num_samples <= self._max_requests:
            return
        retry_after_s = self._seconds_an_end()
        msg = "The queue is full."  # how full all is, and of what, is no tenant's business
        raise QueueFullError(msg, retry_after_s=retry_after_s, remedy=f"Try again in {retry_after_s} s.")

    def _seconds_an_end(self) -> int:
        """Estimate when the next request ends, from the last ones."""
        if len(self._ends_s) < 2:  # noqa: PLR2004 - a span has two ends
            return 1
        seconds = (time.monotonic() - self._ends_s[0]) / (len(self._ends_s) - 1)
        return min(max(1, round(seconds)), _MAX_RETRY_AFTER_S)

    # On the engine's thread.

    def _forget(self, request_id: str) -> None:
        self._count_end(self._streams.pop(request_id).num_samples)

    def _count_end(self, num_samples: int) -> None:
        with self._gate:
            self._num_requests -= num_samples
            self._ends_s.append(time.monotonic())

    def _run(self) -> None:
        try:
            while not self._must_stop:
                self._take_commands()
                if self._engine.has_work:
                    self._deliver(self._engine.step())
                elif self._is_draining and self._commands.empty() and not self._engine.has_requests:
                    break
                else:
                    self._wait()
                    if self._engine.has_requests:  # one that waited for blocks may be ready, or its time be up
                        self._deliver(self._engine.step())
            self._engine.close(lambda: self._end_s - time.monotonic())
        except Exception as error:  # noqa: BLE001 - a bug of ours: everybody is told, nobody waits for ever
            _log.exception("the engine's thread has failed")
            self._failure = error
            self._fail_all(error)
            self._engine.close()

    def _wait(self) -> None:
        """Nothing runs: take the next command when it comes, or return when something else is due."""
        wait_s = self._engine.idle()
        try:
            command = self._commands.get(timeout=min(wait_s, threading.TIMEOUT_MAX))
        except queue.Empty:
            return
        command()

    def _take_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _deliver(self, deltas: list[OutputDelta]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[TokenStream, OutputDelta]]] = {}
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            if delta.is_last:
                self._forget(delta.request_id)
            by_loop.setdefault(stream.loop, []).append((stream, delta))
        for loop, pairs in by_loop.items():
            _call(loop, lambda pairs=pairs: [stream.deltas.put_nowait(delta) for stream, delta in pairs])  # type: ignore[misc]

    def _begin_draining(self) -> None:
        self._is_draining = True

    def _stop(self) -> None:
        for request_id, stream in list(self._streams.items()):
            self._engine.abort(request_id)
            last = OutputDelta(request_id, "", (), 0, "abort", "The server shut down.", is_last=True)
            _call(stream.loop, lambda stream=stream, last=last: stream.deltas.put_nowait(last))  # type: ignore[misc]
            self._forget(request_id)
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


def _look_up() -> None:
    """The command that only wakes the engine's thread: something has come from a slow tier."""


def _call(loop: asyncio.AbstractEventLoop, what: Callable[[], object]) -> None:
    """Run ``what`` in the event loop; nobody is there to be told when the loop has closed."""
    try:
        loop.call_soon_threadsafe(what)
    except RuntimeError:
        _log.debug("the event loop has closed")
