"""How many requests run at once: by formula where each is at its full length, by the real scheduler where it is not.

A running request is shorter than it will be, so a server runs more at once than would fit at their full lengths, and
preempts now and then. How many exactly follows from admission, growth and preemption together: the planner asks the
scheduler and the cache themselves, with a runner that computes nothing.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING

from pagefold.events import RequestFinished, RequestPreempted
from pagefold.kv import KEEP_ALL, KVCore, make_policy
from pagefold.request import Request, StopRule
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim import NullRunner
from pagefold.sim.traces.request import GREEDY_TO_LENGTH

if TYPE_CHECKING:
    from pagefold.kv import CacheLayout, KeepRule
    from pagefold.plan.workload import Lengths, Workload

__all__ = ["Pool", "Reached", "Rounding", "reach"]

_POINTS = 4096
"""Moments of requests' lives that a mean over them looks at, all requests together."""

_MAX_REQUEST_STEPS = 600_000
_MOST_COSTLY_GROUPS = 4
"""A step of a request takes longer where there are several groups; of up to so many, fewer steps are simulated."""

_GENERATIONS = 12
_LIFETIMES = 4
"""How often the simulated machine is filled anew at least, and how many lives of a request it runs at least; the first
third of the steps is not counted."""

_LEAST, _MOST = 32, 128
"""Requests at once that are simulated at least, and at most: a larger pool is simulated in a smaller likeness."""

_QUEUE = 4
"""Requests that wait before each step, at least; where outputs are short, twice as many as end in a step."""


class Rounding:
    """Blocks and bytes that requests of a workload take, on average.

    Args:
        layout: of the KV of the device that binds.
        workload: the requests.
        num_new: how many tokens a step writes of one request, beside what windows keep; None for what any engine needs
            at least.

    Attributes:
        full_blocks: of a request at its full length, as a server counts it before it starts.
        mean_blocks: of a running request, over its life.
        mean_bytes: the same before rounding to blocks.
        shared_blocks: whole blocks of the prefix that requests share; they are there once.
        full_own_blocks, mean_own_blocks: what a request takes beside them.
    """

    def __init__(self, layout: CacheLayout, workload: Workload, num_new: int | None = None) -> None:
        points = max(4, _POINTS // len(workload.lengths))
        sizes = [group.block_size for group in layout.groups if group.keeps.window is None]

        def shared_blocks(lengths: Lengths) -> int:
            shared = min(workload.prefix_len, lengths.prompt - 1)
            return sum(shared // size for size in sizes)

        def weighted(lengths: Lengths) -> float:
            return lengths.output * shared_blocks(lengths)

        self.shared_blocks = max(shared_blocks(lengths) for lengths in workload.lengths)
        spared = workload.prefix_share * workload.mean(shared_blocks)
        mean_spared = workload.prefix_share * workload.mean(weighted) / workload.mean_output
        self.full_blocks = workload.mean(lambda lengths: layout.num_blocks_for(sum(lengths), num_new))
        self.mean_blocks, self.mean_bytes, self.mean_tokens = _over_life(layout, workload, points)
        self.full_own_blocks = max(1.0, self.full_blocks - spared)
        self.mean_own_blocks = max(1.0, self.mean_blocks - mean_spared)

    def waste(self, layout: CacheLayout) -> float:
        """Return the share of the memory that running requests hold without a token in it."""
        return 1 - self.mean_bytes / (self.mean_blocks * layout.bytes_per_block)


def _over_life(layout: CacheLayout, workload: Workload, points: int) -> tuple[float, float, float]:
    """Return means over the steps of all requests: (blocks, bytes, tokens)."""
    blocks = num_bytes = tokens = steps = 0.0
    for prompt, output in workload.lengths:
        num_points = min(output, points)
        for point in range(num_points):
            held = prompt + int((point + 0.5) * output / num_points)
            weight = output / num_points
            blocks += weight * layout.num_blocks_for(held)
            num_bytes += weight * layout.num_bytes_for(held)
            tokens += weight * held
            steps += weight
    return blocks / steps, num_bytes / steps, tokens / steps


@dataclass(frozen=True, slots=True)
class Pool:
    """What requests are admitted into.

    Attributes:
        num_blocks: blocks.
        block_size: tokens a block.
        max_num_seqs: sequences at once; None for as many as fit.
        max_num_batched_tokens: tokens computed in one step.
        rules: what each cache group keeps; all have blocks of ``block_size``.
        admission: the rule of admission, by its name in ``--admission``. Other engines let in whose prompt fits.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int | None
    max_num_batched_tokens: int
    rules: tuple[KeepRule, ...] = (KEEP_ALL,)
    admission: str = "prompt"

    def likeness(self, scale: float, shrink: float, longest: int) -> Pool:
        """Return a pool for so many times fewer requests, that are so many times shorter; the longest fits into it."""
        num_seqs = None if self.max_num_seqs is None else max(1, round(self.max_num_seqs / scale))
        num_tokens = max(round(self.max_num_batched_tokens / scale), 1)
        rules = tuple(_shrunk(rule, shrink) for rule in self.rules)
        least = sum(rule.num_blocks_for(longest, num_tokens, self.block_size) for rule in rules)
        num_blocks = max(round(self.num_blocks / scale / shrink), least)
        return Pool(num_blocks, self.block_size, num_seqs, num_tokens, rules, self.admission)


@dataclass(frozen=True, slots=True)
class Reached:
    """How many requests run at once while others always wait.

    Attributes:
        mean: over steps, at their ends; where all outputs are of one token, and so nobody is left then, within them.
        peak: of any step.
        preemptions_per_request: how often a request gives its blocks back.
    """

    mean: float
    peak: float
    preemptions_per_request: float


def _shrunk(rule: KeepRule, shrink: float) -> KeepRule:
    """Return a rule for sequences that are so many times shorter."""
    if rule.window is None:
        return rule
    return replace(rule, window=max(1, round(rule.window / shrink)), num_sinks=round(rule.num_sinks / shrink))


@lru_cache(maxsize=64)
def reach(pool: Pool, workload: Workload, *, footprint: float, with_sharing: bool) -> Reached:
    """Run the workload on the real scheduler and cache, with requests always waiting, until the numbers are steady.

    Args:
        pool: the memory and the limits.
        workload: requests; they come in an order that is drawn once.
        footprint: blocks of a running request on average, which tells how large a likeness is needed.
        with_sharing: whether prompts begin alike as the workload says; else each is its own.

    A pool for many requests is simulated in a smaller likeness: the share of it that is in use hardly depends on size.
    Long outputs are simulated by shorter ones in a pool that is smaller by as much: a step then stands for several. The
    same question has the same answer, which is kept: techniques and remedies ask again and again.
    """
    num_steps = _MAX_REQUEST_STEPS / min(len(pool.rules), _MOST_COSTLY_GROUPS)
    shrink = max(1.0, _LEAST * _GENERATIONS * workload.mean_output / num_steps)
    if shrink > 1:
        workload = workload.shrunk(shrink)
    expected = pool.num_blocks / max(footprint, 1e-9)
    if pool.max_num_seqs is not None:
        expected = min(expected, pool.max_num_seqs)
    affordable = num_steps / (_GENERATIONS * max(1.0, workload.mean_output))
    simulated = min(expected, max(_LEAST, min(_MOST, affordable)))
    scale = expected / simulated if expected > simulated else 1.0
    small = pool.likeness(scale, shrink, workload.longest + 1)
    return _simulate(small, workload, simulated, scale, with_sharing=with_sharing)


def _simulate(pool: Pool, workload: Workload, expected: float, scale: float, *, with_sharing: bool) -> Reached:
    seen: Counter[type[object]] = Counter()

    def watch(event: object) -> None:
        seen[type(event)] += 1

    num_seqs = min(pool.max_num_seqs or pool.max_num_batched_tokens, pool.max_num_batched_tokens)
    # What is preempted finds its own blocks again, and nothing else comes back: the cheapest policy will do.
    core = KVCore(pool.num_blocks, block_size=pool.block_size, rules=pool.rules, policy=make_policy("lru"))
    limits = SchedulerLimits(num_seqs, pool.max_num_batched_tokens)
    scheduler = Scheduler(core, limits, admission=pool.admission, emit=watch)
    runner = NullRunner()
    rng = Random(0)  # noqa: S311 - a workload, no secret
    shared = workload.prefix_len if with_sharing else 0
    first = shared
    wanted = max(round(_GENERATIONS * expected), 24)
    running: list[int] = []
    num_waiting = max(_QUEUE, math.ceil(2 * expected / max(1.0, workload.mean_output)))
    num_requests = 0
    is_one_step = all(lengths.output == 1 for lengths in workload.lengths)
    while seen[RequestFinished] < wanted or len(running) < _LIFETIMES * workload.mean_output:
        while len(scheduler.waiting) < num_waiting:
            lengths = rng.choice(workload.lengths)
            begins_alike = shared if rng.random() < workload.prefix_share else 0
            scheduler.add(_request(num_requests, rng.getrandbits(32), lengths, begins_alike, first))
            first = (first + lengths.prompt) % 2**30
            num_requests += 1
        plan = scheduler.schedule(0.0)
        within = len(scheduler.running)
        scheduler.apply(runner.run(plan))
        running.append(within if is_one_step else len(scheduler.running))
    steady = running[len(running) // 3 :]
    preemptions = seen[RequestPreempted] / seen[RequestFinished]
    return Reached(scale * sum(steady) / len(steady), scale * max(running), preemptions)


def _request(index: int, seed: int, lengths: Lengths, shared: int, first: int) -> Request:
    shared = min(shared, lengths.prompt - 1)
    prompt = array("i", range(shared))
    prompt.extend(range(first + shared, first + lengths.prompt))
    stop = StopRule(frozenset(), lengths.prompt + lengths.output)
    return Request(f"r{index}", prompt, GREEDY_TO_LENGTH, stop=stop, seed=seed, arrival_s=0.0)
