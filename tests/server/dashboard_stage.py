"""Ten minutes of chats behind a real app, in a second: the real scheduler and core in virtual time, without a model.

What a dashboard shows of it is the same in every run, so it can be drawn for the docs.
"""

from __future__ import annotations

import threading
from random import Random
from typing import TYPE_CHECKING

import uvicorn

from pagefold.config import ServerConfig
from pagefold.engine.status import EngineStatus
from pagefold.events import CacheConfigured, FirstToken, OutputFinished, PrefixLookup, RequestFinished, fan_out
from pagefold.kv import HostTier, KVCore, Namespace
from pagefold.kv.policies import make_policy
from pagefold.observe.ledger import Ledger
from pagefold.observe.metrics import Metrics
from pagefold.observe.overview import Overview
from pagefold.request import Request, StopRule, WarmUp
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.server import create_app
from pagefold.server.connection import http_settings
from pagefold.server.late_engine import LateEngine
from pagefold.server.listener import listen
from pagefold.sim.clock import VirtualClock
from pagefold.sim.null_runner import NullRunner

if TYPE_CHECKING:
    import socket
    from array import array

    from pagefold.events import Event

NS = Namespace(model="m").key()
NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 640, 960, 16
DURATION_S, STEP_S, TOKEN_S = 700.0, 0.06, 0.0008


class _Watched(LateEngine):
    """No engine, but what it would do."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def status(self) -> EngineStatus:
        return EngineStatus.of(self._scheduler)


class Stage:
    """The app, on a port of its own; ``close`` it.

    Args:
        model_name: what the page shows.
        door: of the server.
        port: that it listens on; 0 for one that is free.
    """

    def __init__(self, model_name: str = "smollm2-135m", door: ServerConfig | None = None, port: int = 0) -> None:
        self._clock = VirtualClock()
        self._clock.advance(50_000.0)
        self._random = Random(5)
        config = door or ServerConfig()
        ledger = Ledger(self._clock, is_on=config.enable_explain)
        overview = Overview(ledger, self._clock)
        self._emit = fan_out(ledger, overview, self._note)
        self._emit(CacheConfigured({}, NUM_BLOCKS, BLOCK_SIZE, "learned"))
        core = KVCore(
            NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            policy=make_policy("learned"),
            host=HostTier(NUM_HOST_BLOCKS),
            emit=self._emit,
        )
        self._scheduler = Scheduler(core, SchedulerLimits(12, 512), emit=self._emit)
        self._let_in: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._requests: dict[str, Request] = {}
        overview.watch(lambda: EngineStatus.of(self._scheduler))
        self._play()
        metrics = Metrics(model_name)
        self.app = create_app(
            _Watched(self._scheduler),
            model_name=model_name,
            config=config,
            metrics=metrics,
            ledger=ledger,
            overview=overview,
        )
        self._server = uvicorn.Server(http_settings(self.app, config, metrics.count_response))
        listener: socket.socket = listen("127.0.0.1", port)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(60.0)
        self.app.state.checker.close()

    def _play(self) -> None:
        """Chats with four system prompts come and go; one of them has the time at its head."""
        random, clock, begin_s = self._random, self._clock, self._clock.now_s
        rules = [[random.randrange(1 << 30) for _ in range(num)] for num in (620, 410, 280, 350)]
        self._send(rules[2], 1, warm_up=WarmUp(pin=True))
        due: list[tuple[float, list[int] | array[int], int]] = []
        next_s = clock.now_s
        number = 0
        while clock.now_s < begin_s + DURATION_S:
            if clock.now_s >= next_s:
                which = random.choices(range(4), (6, 4, 2, 1))[0]
                head = [number, *rules[which]] if which == 3 else rules[which]
                number += 1
                due.append((clock.now_s, head, random.randint(0, 4)))
                is_busy = 180 < clock.now_s - begin_s < 330 or clock.now_s - begin_s > 560
                next_s += random.expovariate(1 / 1.7 if is_busy else 1 / 6.0)
            for turn in [turn for turn in due if turn[0] <= clock.now_s]:
                due.remove(turn)
                _, before, num_left = turn
                tokens = [*before, *self._words(20, 120)]
                num_new = random.randint(20, 110)
                request = self._send(tokens, num_new)
                if num_left:
                    later_s = clock.now_s + random.uniform(15, 70)
                    due.append((later_s, request.token_ids, num_left - 1))  # they grow until then
            if not self._scheduler.has_work:
                clock.advance(0.25)
                continue
            plan = self._scheduler.schedule(clock.now_s)
            clock.advance(STEP_S + TOKEN_S * len(plan.token_ids))
            if plan.num_rows:
                for request in self._scheduler.apply(self._runner.run(plan)):
                    self._first.setdefault(request.request_id, clock.now_s)

    _runner = NullRunner()

    def _words(self, least: int, most: int) -> list[int]:
        return [self._random.randrange(1 << 30) for _ in range(self._random.randint(least, most))]

    def _send(self, tokens: list[int], num_new: int, warm_up: WarmUp | None = None) -> Request:
        name = f"chatcmpl-{self._random.getrandbits(64):016x}-0"
        request = Request(
            name,
            tokens,
            SamplingParams(temperature=0.0, max_tokens=num_new),
            stop=StopRule(frozenset(), len(tokens) + num_new),
            namespace=NS,
            arrival_s=self._clock.now_s,
            seed=self._random.getrandbits(30),
            warm_up=warm_up,
        )
        self._requests[name] = request
        self._scheduler.add(request)
        return request

    def _note(self, event: Event) -> None:
        """Tell what an engine tells of requests."""
        now_s = self._clock.now_s
        if isinstance(event, PrefixLookup):
            self._let_in.setdefault(event.request_id, event.planned_s)
        if not isinstance(event, RequestFinished):
            return
        arrival_s = self._requests.pop(event.request_id).arrival_s
        let_in_s = self._let_in.pop(event.request_id, now_s)
        first_s = self._first.pop(event.request_id, now_s)
        self._emit(FirstToken(event.request_id, first_s - arrival_s, event.num_prompt_tokens, 0, 0))
        self._emit(
            OutputFinished(
                event.request_id,
                event.finish_reason,
                event.num_prompt_tokens,
                0,
                event.num_output_tokens,
                e2e_s=now_s - arrival_s,
                queue_s=let_in_s - arrival_s,
                prefill_s=first_s - let_in_s,
                decode_s=now_s - first_s,
            )
        )
