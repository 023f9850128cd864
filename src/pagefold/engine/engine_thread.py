"""EngineThread: an engine on a thread of its own (kernels release the GIL).

Requests and cancellations go in through a queue; what a step produced comes out with one call into the event loop a
step, however many requests it served.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from pagefold.engine.outputs import OutputDelta
from pagefold.engine.queue_bound import QueueBound
from pagefold.engine.status import EngineStatus
from pagefold.engine.together import Together
from pagefold.engine.token_rates import NO_RATES
from pagefold.engine.token_stream import Taken, TokenStream
from pagefold.errors import EngineStoppedError, PagefoldError, QueueFullError, RateLimitError
from pagefold.request import ANYBODY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.adapters import LoadedAdapter
    from pagefold.engine.engine import Engine
    from pagefold.engine.foresight import Foreseen
    from pagefold.engine.intake import Intake
    from pagefold.engine.pins import PinReport
    from pagefold.engine.quota_report import QuotaStatus
    from pagefold.engine.token_rates import AnyRates
    from pagefold.events import RefusalReason
    from pagefold.memory.limit import Limit
    from pagefold.request import Caller, EndedSession, SessionRef
    from pagefold.sampling import SamplingParams
    from pagefold.structured.grammar import Grammar
    from pagefold.structured.params import StructuredOutputsParams
    from pagefold.tokenizer import Tokenizer

__all__ = ["EngineThread"]

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_NUM_COMPILERS = 2
_LOOK_S = 0.02
"""How often it is looked whether the last request of an adapter that is unloaded has ended."""


class EngineThread:
    """An :class:`~pagefold.engine.client.EngineClient` that runs an engine on a thread of its own.

    Args:
        engine: nobody else may call it from now on.
        max_requests: how many may be here at once, those that wait included, each sample counted; None for any number.
        rates: who may use how many tokens.
    """

    def __init__(self, engine: Engine, *, max_requests: int | None = None, rates: AnyRates = NO_RATES) -> None:
        self._engine = engine
        self._rates = rates
        self._end_s = 0.0  # until then it may write to slow tiers what is cached, once it drains
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, TokenStream] = {}  # touched by the engine's thread only
        self._gate = threading.Lock()  # no request may be queued behind the command to drain: nobody would take it
        self._queue = QueueBound(max_requests)  # those in the queue of commands included; under the gate
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
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return self._engine.tokenizer

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return self._engine.adapters.loaded

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> LoadedAdapter:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        self.ensure_ready()
        adapters = self._engine.adapters
        read = await asyncio.to_thread(adapters.read, name, path, in_place=in_place)
        return await self._ask(lambda: adapters.install(read))

    async def unload_adapter(self, name: str) -> LoadedAdapter:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        unloaded = await self._ask(lambda: self._engine.begin_unload(name))
        while self._engine.adapters.is_here(unloaded) and self._thread.is_alive():  # noqa: ASYNC110 - of another thread
            await asyncio.sleep(_LOOK_S)
        self._ensure_alive()
        return unloaded

    @property
    def max_model_len(self) -> int:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return self._engine.capacity.max_model_len

    def check_kind(self, caller: Caller) -> None:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        self._engine.limits.kind_of(caller)

    @property
    def context(self) -> Limit:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return self._engine.capacity.context

    @property
    def cached_block_size(self) -> int | None:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        core = self._engine.scheduler.core
        return core.block_size if core.publishes else None

    def status(self) -> EngineStatus:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        is_healthy = self._failure is None and self._thread.is_alive()
        engine = self._engine
        return EngineStatus.of(
            engine.scheduler,
            is_healthy=is_healthy,
            caches=engine.cache_sizes(),
            tier_uses=engine.tier_uses(),
            kinds=engine.limits.kinds,
            adapters=engine.adapters.status(engine.scheduler),
        )

    @property
    def has_failed(self) -> bool:
        """Whether the engine died of a bug."""
        return self._failure is not None

    def ensure_ready(self) -> None:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        self._ensure_alive()
        if not self._takes_requests:
            msg = "The server is shutting down and takes no more requests."
            raise EngineStoppedError(msg, remedy="Try another replica, or again later.")

    def _ensure_alive(self) -> None:
        if self._failure is not None:
            raise _stopped(self._failure)

    async def compile_grammar(self, params: StructuredOutputsParams) -> Grammar:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        with self._gate:  # once it drains, the compilers take nothing more
            self.ensure_ready()
            compiling = self._compilers.submit(self._engine.compile_grammar, params)
        return await asyncio.wrap_future(compiling)

    def submit(  # noqa: PLR0913 - a request, by name
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        caller: Caller = ANYBODY,
        grammar: Grammar | None = None,
        *,
        together: Together | None = None,
    ) -> TokenStream:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        self._engine.check(prompt_token_ids, sampling, caller)
        num_prompt_tokens = len(prompt_token_ids)
        num_samples = sampling.num_samples
        loop = asyncio.get_running_loop()
        with_whom = together or Together(num_prompt_tokens)
        is_judged = self._engine.scheduler.guardrails.shedder.is_on
        stream = TokenStream(
            loop,
            num_samples,
            lambda stream: self._commands.put(lambda: abort(stream)),
            None if caller.warm_up is not None else caller.tenant,
            is_taken=not is_judged,
        )

        def give_back() -> None:
            with_whom.charge.give_back(num_prompt_tokens)

        def add() -> None:
            try:
                self._ensure_alive()
                times = self._engine.add(request_id, prompt_token_ids, sampling, caller, grammar, together=with_whom)
            except Exception as error:  # noqa: BLE001 - whoever asked is told
                failure = error  # Python forgets `error` where this clause ends
                with self._gate:  # nothing has ended, so it says nothing of when room will be
                    self._queue.turn_away(num_samples)
                give_back()
                _call(stream.loop, lambda: stream.deltas.put_nowait(failure))
            else:
                self._streams[request_id] = stream
                stream.on_end = lambda: give_back() if times.scheduled_s is None else None
                if is_judged:
                    _call(stream.loop, lambda: stream.deltas.put_nowait(Taken()))

        def abort(stream: TokenStream) -> None:
            if self._streams.get(request_id) is stream:
                self._forget(request_id)
                self._engine.abort(request_id)

        with self._gate:
            self.ensure_ready()
            try:
                self._enter(stream, with_whom)
            except (QueueFullError, RateLimitError) as error:
                reason: RefusalReason = "queue_full" if isinstance(error, QueueFullError) else "token_rate"
                self._commands.put(lambda: self._engine.tell_refused(request_id, reason))
                raise
            self._commands.put(add)
        return stream

    def _enter(self, stream: TokenStream, with_whom: Together) -> None:
        """Count a request in, and charge who pays; neither where it is refused. Under the gate."""
        self._queue.enter(stream.num_samples)
        try:
            if stream.payer is not None:
                with_whom.charge.enter(self._rates, stream.payer)
        except RateLimitError:
            self._queue.turn_away(stream.num_samples)
            raise

    async def reset_prefix_cache(self) -> int:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return await asyncio.shield(self._reset())  # what was begun is finished, though nobody waits for it

    async def _reset(self) -> int:
        num_freed, finish = await self._ask(self._engine.begin_reset)
        await asyncio.to_thread(finish)
        return num_freed

    async def foresee(self, prompt_token_ids: Sequence[int], caller: Caller = ANYBODY) -> Foreseen:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return await self._ask(lambda: self._engine.foresee(prompt_token_ids, caller))

    def intake(self) -> Intake:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        self.ensure_ready()
        return self._engine.intake

    async def pins(self) -> PinReport:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return await self._ask(self._engine.pins)

    async def quotas(self) -> tuple[QuotaStatus, ...]:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return await self._ask(self._engine.quotas)

    async def unpin(self, pin_id: str) -> bool:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return await self._ask(lambda: self._engine.unpin(pin_id))

    async def end_session(self, session: SessionRef) -> EndedSession | None:
        """See :class:`~pagefold.engine.client.EngineClient`."""
        return await self._ask(lambda: self._engine.end_session(session))

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
        """Have ``command`` called on the engine's thread, between steps, and return what it returns.

        Where it refuses, whoever asks is told, and the engine goes on.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Answer] = loop.create_future()

        def answer() -> None:
            if self._failure is not None:
                error = _stopped(self._failure)
                _call(loop, lambda: None if done.cancelled() else done.set_exception(error))
                return
            try:
                told = command()
            except Exception as error:
                why = error  # Python forgets `error` where this clause ends
                _call(loop, lambda: None if done.cancelled() else done.set_exception(why))
                if isinstance(error, PagefoldError):
                    return  # it was refused
                raise
            _call(loop, lambda: None if done.cancelled() else done.set_result(told))

        with self._gate:
            self.ensure_ready()
            self._commands.put(answer)
        return await done

    # On the engine's thread.

    def _forget(self, request_id: str) -> None:
        """Tell a stream's reader nothing more."""
        stream = self._streams.pop(request_id)
        stream.on_end()
        self._count_end(stream.num_samples)

    def _count_end(self, num_samples: int) -> None:
        """So many samples, of one request, are not here any more."""
        with self._gate:
            self._queue.leave(num_samples)

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
        num_made: dict[str, int] = {}  # tokens, by tenant
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:
                continue
            if delta.is_last:
                self._forget(delta.request_id)
            by_loop.setdefault(stream.loop, []).append((stream, delta))
            if stream.payer is not None:
                num_made[stream.payer] = num_made.get(stream.payer, 0) + len(delta.token_ids)
        for tenant, num_tokens in num_made.items():
            self._rates.spend(tenant, num_tokens)
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
        stopped = _stopped(error)
        while True:
            for stream in self._streams.values():
                _call(stream.loop, lambda stream=stream: stream.deltas.put_nowait(stopped))  # type: ignore[misc]
            self._streams.clear()
            if self._must_stop or (self._is_draining and self._commands.empty()):
                return
            self._commands.get()()  # requests that were queued meanwhile learn it too


def _stopped(failure: Exception) -> EngineStoppedError:
    why = failure.message if isinstance(failure, PagefoldError) else f"{failure}."
    return EngineStoppedError(f"The engine has failed: {why}", remedy="Restart the server.")


def _look_up() -> None:
    """The command that only wakes the engine's thread: something has come from a slow tier."""


def _call(loop: asyncio.AbstractEventLoop, what: Callable[[], object]) -> None:
    """Run ``what`` in the event loop; nobody is there to be told when the loop has closed."""
    try:
        loop.call_soon_threadsafe(what)
    except RuntimeError:
        _log.debug("the event loop has closed")
