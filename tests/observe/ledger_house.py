"""A scheduler and its core with a ledger that listens, in virtual time, and a runner that computes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import CacheConfigured, fan_out
from pagefold.kv import KVCore, Namespace, audit
from pagefold.kv.policies import make_policy
from pagefold.observe.ledger import Ledger
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim.clock import VirtualClock
from pagefold.sim.null_runner import NullRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.events import Event
    from pagefold.observe.misses import Miss
    from pagefold.request import SessionRef, WarmUp

NS = Namespace(model="m").key()


class House:
    """All of it; a step takes a second.

    Args:
        num_blocks: of the device.
        block_size: tokens a block.
        listen: is told events too.
        ledger_blocks: for how many the ledger is made; for ``num_blocks`` if not given.
        core: settings of the core.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        policy: str = "lru",
        listen: Callable[[Event], None] | None = None,
        ledger_blocks: int | None = None,
        **core: object,
    ) -> None:
        self.clock = VirtualClock()
        self.ledger = Ledger(lambda: self.clock.now_s)
        self.ledger(CacheConfigured({}, ledger_blocks or num_blocks, block_size, policy))
        self.events: list[Event] = []
        emit = fan_out(self.ledger, self.events.append, *(() if listen is None else (listen,)))
        self.core = KVCore(
            num_blocks, block_size=block_size, policy=make_policy(policy, num_blocks, emit), emit=emit, **core
        )  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.core, SchedulerLimits(max_num_seqs, max_num_batched_tokens), emit=emit)
        self.runner = NullRunner()
        self.emit = emit
        self.num_made = 0

    def send(
        self,
        tokens: Sequence[int],
        namespace: bytes = NS,
        *,
        max_tokens: int = 1,
        prompt_logprobs: int | None = None,
        warm_up: WarmUp | None = None,
        session: SessionRef | None = None,
        returns_in_s: float | None = None,
        name: str | None = None,
    ) -> str:
        """Queue a request, and return its id."""
        name = name or f"r{self.num_made}"
        self.num_made += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        stop = StopRule(frozenset(), len(tokens) + max_tokens)
        self.scheduler.add(
            Request(
                name,
                tokens,
                sampling,
                stop=stop,
                namespace=namespace,
                arrival_s=self.clock.now_s,
                seed=self.num_made,
                warm_up=warm_up,
                session=session,
                returns_in_s=returns_in_s,
            )
        )
        return name

    def step(self) -> None:
        """Run a step."""
        plan = self.scheduler.schedule(self.clock.now_s)
        self.clock.advance(1.0)
        if plan.num_rows:
            self.scheduler.apply(self.runner.run(plan))
        audit(self.core)
        assert not self.ledger.has_failed

    def run(self) -> None:
        """Run to the end."""
        for _ in range(1000):
            if not self.scheduler.has_work:
                return
            self.step()
        assert not self.scheduler.has_work, "it does not end"

    def ask(self, tokens: Sequence[int], namespace: bytes = NS, **terms: object) -> str:
        """Serve a request from beginning to end, and return its id."""
        name = self.send(tokens, namespace, **terms)  # type: ignore[arg-type]
        self.run()
        return name

    def misses(self, name: str) -> list[Miss]:
        """Return why its tokens were computed."""
        (record,) = self.ledger.records(name)
        assert record.misses is not None
        return list(record.misses)

    def causes(self, name: str) -> list[tuple[int, int, str]]:
        """Return the same as positions and causes."""
        return [(miss.start, miss.end, miss.cause.value) for miss in self.misses(name)]
