"""ServerProcess: the server as a process. It listens at once, starts the engine meanwhile, and drains at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import uvicorn

from pagefold.engine.engine_thread import EngineThread
from pagefold.errors import PagefoldError
from pagefold.events import fan_out
from pagefold.memory.native import have_few_arenas
from pagefold.observe.kv_event_metrics import KVEventMetrics
from pagefold.observe.ledger import Ledger
from pagefold.observe.metrics import Metrics
from pagefold.observe.overview import Overview
from pagefold.observe.switch_log import log_switches
from pagefold.server.app import create_app
from pagefold.server.connection import http_settings
from pagefold.server.late_engine import LateEngine
from pagefold.server.listener import AcceptFailures, raise_open_files
from pagefold.server.rates import rates_of
from pagefold.server.served import Served
from pagefold.server.warming import Warmer, tenants_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Coroutine, Generator, Sequence

    from pagefold.config import ServerConfig
    from pagefold.engine.engine import Engine
    from pagefold.events import Emit
    from pagefold.observe.kv_event_publisher import KVEventPublisher
    from pagefold.observe.traces import Traces
    from pagefold.server.body_checker import BodyChecker
    from pagefold.server.warm_schemas import WarmRequest

__all__ = ["ServerProcess", "WarmPrompt"]

_log = logging.getLogger(__name__)

_FLUSH_S = 5
"""How long clients may take to read the ends of their answers once the engine has drained."""


class WarmPrompt(NamedTuple):
    """A prompt to warm before the first request.

    Attributes:
        where: where the prompt was found, for people.
        asked: what to warm.
    """

    where: str
    asked: WarmRequest


class ServerProcess:
    """Serves one engine until a signal ends it.

    SIGTERM and SIGINT let running requests finish, for up to ``drain_s``, while new ones are refused with 503; a second
    signal stops at once.

    Args:
        model_name: what clients call the model.
        config: of the door.
        listener: from :func:`~pagefold.server.listener.listen`.
        start_engine: loads the model; called on a thread of its own with where the engine's events go.
        on_ready: called when requests are taken.
        warm: what to cache before requests are taken. A prompt that cannot be warmed is told to the log.
        traces: notes what happens to requests, and is closed at the end; None where nobody traces.
        kv_events: sends what becomes of blocks, and is closed at the end; None where nobody wants to know.
    """

    def __init__(  # noqa: PLR0913 - the parts that it holds together
        self,
        *,
        model_name: str,
        config: ServerConfig,
        listener: socket.socket,
        start_engine: Callable[[Emit], Engine],
        on_ready: Callable[[], None],
        warm: Sequence[WarmPrompt] = (),
        traces: Traces | None = None,
        kv_events: KVEventPublisher | None = None,
    ) -> None:
        self._model_name = model_name
        self._warm = warm
        self._config = config
        self._listener = listener
        self._start_engine = start_engine
        self._on_ready = on_ready
        self._metrics = Metrics(model_name)
        self._traces = traces
        self._kv_events = kv_events
        heard = (self._metrics.emit,) if traces is None else (self._metrics.emit, traces)
        self._ledger = Ledger(is_on=config.enable_explain, tell=fan_out(*heard))
        if kv_events is not None:
            heard = (*heard, kv_events)
            self._metrics.registry.register(KVEventMetrics(model_name, kv_events))
        self._overview = Overview(self._ledger)
        self._emit = fan_out(*heard, self._ledger, self._overview, log_switches)
        self._late = LateEngine()
        self._starter: threading.Thread | None = None
        self._engine: EngineThread | None = None
        self._failure: BaseException | None = None
        self._is_ending = False
        self._exit_code = 0
        self._tasks: set[asyncio.Task[None]] = set()
        app = create_app(
            self._late,
            model_name=model_name,
            config=config,
            metrics=self._metrics,
            ledger=self._ledger,
            overview=self._overview,
            traces=traces,
        )
        self._bodies: BodyChecker = app.state.checker
        self._server = _Server(
            http_settings(
                app,
                config,
                self._metrics.count_response,
                max_connections=raise_open_files(config.max_connections),
                timeout_graceful_shutdown=_FLUSH_S,
            )
        )

    def run(self) -> int:
        """Serve; return the exit code.

        Raises:
            PagefoldError: the engine could not be started.
        """
        have_few_arenas()
        try:
            asyncio.run(self._serve())
        finally:
            self._bodies.close()
            if self._traces is not None:
                self._traces.close()
            if self._kv_events is not None:
                self._kv_events.close()
        if self._failure is not None:
            raise self._failure
        return self._exit_code

    @property
    def is_starting(self) -> bool:
        """Whether the engine is still being started: true after :meth:`run` if a signal came before it was there."""
        return self._starter is not None and self._starter.is_alive()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(AcceptFailures(_log.error))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        self._starter = threading.Thread(target=self._start, args=(loop,), name="pagefold-start", daemon=True)
        self._starter.start()
        await self._server.serve(sockets=[self._listener])

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the engine; on a thread of its own."""
        engine: Engine | BaseException
        try:
            engine = self._start_engine(self._emit)
        except BaseException as error:  # noqa: BLE001 - raised again by run
            engine = error
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits for it
            loop.call_soon_threadsafe(self._arrive, engine)

    def _arrive(self, engine: Engine | BaseException) -> None:
        if self._is_ending:
            return
        if isinstance(engine, BaseException):
            self._failure = engine
            self._server.should_exit = True
            return
        max_requests = engine.scheduler.limits.max_num_seqs + self._config.max_queued_requests
        rates = rates_of(self._config.accounts, time.monotonic)
        self._engine = EngineThread(engine, max_requests=max_requests, rates=rates)
        self._engine.start()
        self._run_task(self._open(self._engine))

    async def _open(self, engine: EngineThread) -> None:
        """Warm the cache, and then take requests."""
        warmer = Warmer(Served(engine, self._model_name), tenants_of(self._config))
        for prompt in self._warm:
            try:
                await warmer.warm(prompt.asked)
            except PagefoldError as error:
                if self._is_ending:
                    return
                _log.warning("%s is not warmed: %s", prompt.where, error)
            except Exception:  # noqa: BLE001 - a server that does not come up for a prompt's sake helps nobody
                _log.exception("%s is not warmed", prompt.where)
        if not self._is_ending:
            self._late.arrive(engine)
            self._on_ready()
            self._bodies.start()

    def _on_signal(self, number: int) -> None:
        if self._is_ending:
            self._exit_code = 128 + number
            self._server.should_exit = self._server.force_exit = True
            self._drain(0.0)
            return
        self._is_ending = True
        self._late.close()
        self._drain(self._config.drain_s)

    def _drain(self, timeout_s: float) -> None:
        """Let the engine finish, and then end the server."""
        if self._engine is None:
            self._server.should_exit = True
            return
        self._run_task(self._end_engine(self._engine, timeout_s))

    def _run_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop holds tasks only weakly

    async def _end_engine(self, engine: EngineThread, timeout_s: float) -> None:
        await asyncio.to_thread(engine.drain, timeout_s)
        if engine.has_failed:
            self._exit_code = self._exit_code or 1
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Uvicorn, but signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
