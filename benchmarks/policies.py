"""Eviction policies: what each finds of a real trace and of generated ones, against LRU and against Belady's bound.

Workloads: mooncake_conversation.jsonl (12,031 requests of a chat service in an hour) from the folder $PAGEFOLD_TRACES,
else ../shared/traces beside the repository; and the generators of ``pagefold.sim.traces``, as named below. Without the
file only the generated ones are run, and the table says so.

All by ``replay_cache_only``: prompts one after another through the real core, blocks of 512 tokens for the trace and of
64 for what is generated (the default, LRU and the bound only); outputs are not cached. Decisions are timed with 100,000
blocks cached: evicting one and offering its parent, as a full cache does for each block that a prompt needs, the median
of batches. And the longest that the policy ever holds up a prompt of one block: all its calls for one of 20,000 prompts
in a full cache of 100,000 blocks, each of them evictable, in CPU time, without Python's own garbage collector.

    python benchmarks/policies.py [--quick] [--jobs N] [--json FILE]
"""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TYPE_CHECKING

from report import Row, machine, parser, print_report

from pagefold.kv import DEFAULT_POLICY, POLICIES, KVCore, make_policy
from pagefold.sim.cache_only import BELADY, replay_cache_only, reuse_oracle
from pagefold.sim.traces import parse_workload, read_trace, traces_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.kv import EvictionPolicy
    from pagefold.sim.traces import TraceRequest

TRACE = "mooncake_conversation.jsonl"
TRACE_BLOCK = 512
TRACE_SIZES = (500_000, 1_540_000, 3_000_000, 5_100_000, 10_200_000, 25_000_000)
ASKED = {3_000_000: 0.20, 1_540_000: 0.14}
GENERATED = (
    "chat:num_chats=2500",
    "chat:num_chats=2500,turn_gap_s=5-120,num_turns=1-9",
    "shared:num_requests=8000,num_prompts=300",
    "agents:num_tasks=700",
    "retrieval:num_requests=8000,num_documents=3000",
    "bursts:num_bursts=150",
)
GENERATED_BLOCK = 64
GENERATED_SHARES = (0.01, 0.03, 0.1)
LEAST_OF_LRU = 0.99
HINT_ERROR = 0.1
HINTED_SIZE, HINTED_ASKED = 3_000_000, 0.25
NUM_BLOCKS = 100_000
NUM_PAUSES = 20_000
PAUSE_MS = {DEFAULT_POLICY: 5.0}
DECISION_US = {"learned": 20.0, "auto": None}
REPLAY_S = {"lru": 10.0, DEFAULT_POLICY: 40.0}


@dataclass(frozen=True)
class Job:
    """One replay: of a workload by name, with a policy and a size; with hints that are wrong with that probability."""

    workload: str
    policy: str
    cache_tokens: int
    hint_error: float | None = None


@dataclass(frozen=True)
class Found:
    """What a replay found, and the seconds of CPU time that it took."""

    ratio: float
    seconds: float


@cache
def requests_of(workload: str) -> Sequence[TraceRequest]:
    """Return the requests of the trace or of a generator."""
    if workload != TRACE:
        return parse_workload(workload).trace().requests
    folder = traces_folder()
    if folder is None or not (folder / TRACE).is_file():
        return ()
    return read_trace(folder / TRACE).requests


def policies_for(workload: str) -> Sequence[str]:
    """Return what is compared: all on the trace; the default, LRU and the bound on what is generated."""
    return (*POLICIES, BELADY) if workload == TRACE else (DEFAULT_POLICY, "lru", BELADY)


def replay(job: Job) -> Found:
    """Run one replay."""
    requests = requests_of(job.workload)
    size = TRACE_BLOCK if job.workload == TRACE else GENERATED_BLOCK
    hints = None
    if job.hint_error is not None:
        rng = Random(0)
        hints = [
            [true != (rng.random() < job.hint_error) for true in each]
            for each in reuse_oracle(requests, block_size=size)
        ]
    begin = time.process_time()
    report = replay_cache_only(requests, policy=job.policy, block_size=size, cache_tokens=job.cache_tokens, hints=hints)
    return Found(report.token_hit_ratio, time.process_time() - begin)


def decision_us(policy: str) -> float:
    """Return the median microseconds of an eviction with 100,000 blocks cached: prompts of 32, some used twice."""
    core = KVCore(NUM_BLOCKS, block_size=1, policy=make_policy(policy))
    rng = Random(0)
    for prompt in range(NUM_BLOCKS // 32):
        for _ in range(1 + (rng.random() < 0.3)):
            packed = array("i", range(prompt * 32, prompt * 32 + 32)).tobytes()
            table, start = core.acquire(core.match(b"", packed, 32))
            assert core.extend(table, start, 32)
            promise = core.publishing.promise(table, packed, 32)
            if promise is not None:
                core.publishing.commit(promise)
            core.release(table)
    taken = []
    for _ in range(200):
        begin = time.perf_counter()
        core.blocks.reclaim(100)
        taken.append((time.perf_counter() - begin) / 100)
    return statistics.median(taken) * 1e6


class Timed:
    """A policy whose calls are timed: seconds of CPU time in all of them since ``taken`` was last set to 0."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.taken = 0.0

    def __getattr__(self, name: str) -> Callable[..., object]:
        call = getattr(self.policy, name)

        def timed(*arguments: object) -> object:
            begin = time.thread_time()
            try:
                return call(*arguments)
            finally:
                self.taken += time.thread_time() - begin

        self.__dict__[name] = timed
        return timed


def pauses_ms(policy: str) -> list[float]:
    """Return the milliseconds that each of 20,000 prompts waits for the policy: one block each, a third came before."""
    timed = Timed(make_policy(policy))
    core = KVCore(NUM_BLOCKS + 1, block_size=1, policy=timed)
    rng = Random(0)
    waited = []
    gc.disable()
    for prompt in range(NUM_BLOCKS + NUM_PAUSES):
        timed.taken = 0.0
        name = rng.randrange(prompt) if prompt and rng.random() < 0.3 else prompt
        packed = array("i", [name]).tobytes()
        table, start = core.acquire(core.match(b"", packed, 1))
        assert core.extend(table, start, 1)
        promise = core.publishing.promise(table, packed, 1)
        if promise is not None:
            core.publishing.commit(promise)
        core.release(table)
        waited.append(timed.taken * 1e3)
    gc.enable()
    return sorted(waited[-NUM_PAUSES:])


def ratio_rows(found: dict[Job, Found], workload: str, sizes: Sequence[int]) -> list[Row]:
    """Return a row a size: what each policy found; and one with the least share of LRU that the default found."""
    rows = []
    least = 2.0
    for size in sizes:
        ratios = {name: found[Job(workload, name, size)].ratio for name in policies_for(workload)}
        default, lru = ratios[DEFAULT_POLICY], ratios["lru"]
        least = min(least, default / lru if lru else 1.0)
        asked = ASKED.get(size) if workload == TRACE else None
        others = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items() if name != DEFAULT_POLICY)
        rows.append(
            Row(
                f"{workload}, {size:,} tokens: token hit ratio of {DEFAULT_POLICY} ({others})",
                "" if asked is None else f">= {asked:.2f}",
                f"{default:.4f}",
                None if asked is None else default >= asked,
                {"workload": workload, "cache_tokens": size, **ratios},
            )
        )
    rows.append(
        Row(
            f"{workload}: {DEFAULT_POLICY} / LRU, the least of all sizes",
            f">= {LEAST_OF_LRU}",
            f"{least:.3f}",
            least >= LEAST_OF_LRU,
            {"workload": workload, "least": least},
        )
    )
    return rows


def main() -> None:
    """Measure, and report."""
    arguments = parser(__doc__)
    arguments.add_argument("--quick", action="store_true", help="the trace only, at the two sizes asked for")
    arguments.add_argument("--jobs", type=int, default=2, help="processes at once (2)")
    args = arguments.parse_args()
    sizes: dict[str, Sequence[int]] = {}
    if requests_of(TRACE):
        sizes[TRACE] = tuple(ASKED) if args.quick else TRACE_SIZES
    for workload in () if args.quick else GENERATED:
        asked = sum(request.prompt_tokens for request in requests_of(workload))
        sizes[workload] = tuple(int(share * asked) for share in GENERATED_SHARES)
    jobs = [
        Job(workload, policy, size)
        for workload in sizes
        for size in sizes[workload]
        for policy in policies_for(workload)
    ]
    hinted = Job(TRACE, DEFAULT_POLICY, HINTED_SIZE, HINT_ERROR)
    if TRACE in sizes:
        jobs.append(hinted)
    rows = []
    for policy in POLICIES:
        asked_us = DECISION_US.get(policy, 5.0)
        took_us = decision_us(policy)
        rows.append(
            Row(
                f"an eviction with 100,000 blocks, {policy}",
                "" if asked_us is None else f"<= {asked_us:g} us",
                f"{took_us:.2f} us",
                None if asked_us is None else took_us <= asked_us,
                {"policy": policy, "us": took_us},
            )
        )
    for policy in POLICIES:
        waited = pauses_ms(policy)
        longest, median = waited[-1], statistics.median(waited)
        asked_ms = PAUSE_MS.get(policy)
        rows.append(
            Row(
                f"what a prompt of one block waits for the policy, 100,000 blocks, {policy}: the longest of "
                f"{NUM_PAUSES:,} (99.9 %: {waited[-NUM_PAUSES // 1000]:.2f} ms, median: {median * 1e3:.0f} us)",
                "" if asked_ms is None else f"<= {asked_ms:g} ms",
                f"{longest:.2f} ms",
                None if asked_ms is None else longest <= asked_ms,
                {"policy": policy, "longest_ms": longest, "median_ms": median},
            )
        )
    with ProcessPoolExecutor(args.jobs) as pool:
        found = dict(zip(jobs, pool.map(replay, jobs), strict=True))
    for workload, its_sizes in sizes.items():
        rows += ratio_rows(found, workload, its_sizes)
    if TRACE in sizes:
        hint = found[hinted].ratio
        rows.append(
            Row(
                f"{TRACE}, {HINTED_SIZE:,} tokens, hints right for {1 - HINT_ERROR:.0%} of accesses",
                f">= {HINTED_ASKED}",
                f"{hint:.4f}",
                hint >= HINTED_ASKED,
                {"ratio": hint},
            )
        )
        for policy, asked_s in REPLAY_S.items():
            took_s = max(each.seconds for job, each in found.items() if job.workload == TRACE and job.policy == policy)
            rows.append(
                Row(
                    f"{TRACE}, one size, cache only, {policy}: the slowest",
                    f"<= {asked_s:g} s",
                    f"{took_s:.1f} s",
                    took_s <= asked_s,
                    {"policy": policy, "seconds": took_s},
                )
            )
    else:
        rows.append(Row(f"{TRACE} was not found: set PAGEFOLD_TRACES", "", "skipped"))
    print_report("policies", rows, machine(), args.json)


if __name__ == "__main__":
    main()
