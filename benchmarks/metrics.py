"""What metrics cost: CPU time a token and a request that an engine spends more because somebody counts.

Workload: the real engine and scheduler over a runner that computes nothing, so that what is left is their own work; 32
and 200 requests of 64 prompt tokens, which get 129 tokens each. With and without metrics, in pairs that change their
order (ABBA); process CPU time, medians of the differences. Asked is a tenth of what scheduler and core may take. When a
token came is noted in any case, also if nobody counts: that is measured alone. A request's own events are measured with
requests of one token.

Beside it, in the same run: ``prometheus_client``'s own histogram, told of each token's latency by itself; and a reading
of ``/metrics``, which holds the engine up for no longer than it takes to collect it.

    python benchmarks/metrics.py [--repeats 20] [--json FILE]
"""

from __future__ import annotations

import gc
import statistics
from array import array
from time import process_time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram
from report import Row, machine, parser, print_report

from pagefold.engine.engine import Engine
from pagefold.engine.limits import ModelLimits
from pagefold.engine.status import EngineStatus
from pagefold.events import ignore
from pagefold.kv import KVCore, Namespace
from pagefold.memory.capacity import Capacity
from pagefold.observe.metrics import Metrics
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.scheduler.times import tell_tokens
from pagefold.sim import NullRunner

if TYPE_CHECKING:
    from pagefold.events import Emit

NUM_RUNNING = (32, 200)
NUM_PROMPT_TOKENS = 64
NUM_OUTPUT_TOKENS = 129
NUM_SHORT = 1000
ASKED_TOKEN_US = 0.3
VOCAB_SIZE = 1 << 30


def make_engine(num_running: int, emit: Emit) -> Engine:
    """Return an engine with memory for so many requests of the workload."""
    num_blocks = num_running * (NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS + 16) // 16 + 16
    core = KVCore(num_blocks, emit=emit)
    return Engine(
        scheduler=Scheduler(core, SchedulerLimits(num_running, num_running * NUM_PROMPT_TOKENS), emit=emit),
        runner=NullRunner(),
        tokenizer=None,
        limits=ModelLimits(VOCAB_SIZE, (), Namespace("m", "l", "d")),
        capacity=Capacity(0, 0, num_blocks, 16, num_blocks * 16, num_blocks),
        emit=emit,
    )


def seconds(num_requests: int, num_prompt_tokens: int, num_new: int, emit: Emit) -> float:
    """Return the CPU seconds that so many requests at once take, from the first to the last."""
    engine = make_engine(num_requests, emit)
    how = SamplingParams(temperature=0.0, max_tokens=num_new)
    prompts = [array("i", range(index * 64, index * 64 + num_prompt_tokens)) for index in range(num_requests)]
    gc.collect()
    begin = process_time()
    for index, prompt in enumerate(prompts):
        engine.add(f"r{index}", prompt, how)
    while engine.has_work:
        engine.step()
    return process_time() - begin


def extra_us(num_requests: int, num_prompt_tokens: int, num_new: int, repeats: int) -> tuple[list[float], list[float]]:
    """Return, of each pair of runs, what metrics cost and what the run cost without them: microseconds a token."""
    scale = 1e6 / (num_requests * num_new)
    costs: list[float] = []
    bases: list[float] = []
    for repeat in range(repeats + 1):
        emits: list[Emit] = [ignore, Metrics("m").emit]
        order = (0, 1) if repeat % 2 else (1, 0)
        took = [0.0, 0.0]
        for which in order:
            took[which] = seconds(num_requests, num_prompt_tokens, num_new, emits[which]) * scale
        if repeat:  # the first pair warms up
            costs.append(took[1] - took[0])
            bases.append(took[0])
    return costs, bases


def noting_us(repeats: int) -> list[float]:
    """Return what it takes to note that a token came and tell nobody, in microseconds, with 200 requests running."""
    stop = StopRule(frozenset(), 1 << 30)
    requests = [Request(f"r{index}", [index], SamplingParams(), stop=stop) for index in range(200)]
    num_steps = 100
    took: list[float] = []
    for _ in range(repeats):
        begin = process_time()
        for step in range(num_steps):
            tell_tokens(ignore, requests, float(step), 16)
        took.append((process_time() - begin) * 1e6 / (num_steps * len(requests)))
    return took


def one_by_one_us(repeats: int) -> list[float]:
    """Return what ``prometheus_client``'s histogram takes for a token, in microseconds."""
    bounds = [0.01 * 1.5**power for power in range(19)]
    histogram = TheirHistogram("x", "x", ("model_name", "engine"), buckets=bounds, registry=CollectorRegistry())
    series = histogram.labels("m", "0")
    num = 20_000
    took: list[float] = []
    for _ in range(repeats):
        begin = process_time()
        for _ in range(num):
            series.observe(0.045)
        took.append((process_time() - begin) * 1e6 / num)
    return took


def reading_ms(repeats: int) -> tuple[list[float], list[float]]:
    """Return what collecting and the whole of a reading take, with 200 requests running."""
    metrics = Metrics("m")
    engine = make_engine(200, metrics.emit)
    for index in range(200):
        engine.add(f"r{index}", [index] * NUM_PROMPT_TOKENS, SamplingParams(max_tokens=NUM_OUTPUT_TOKENS))
    for _ in range(8):
        engine.step()
    metrics.watch(lambda: EngineStatus.of(engine.scheduler))
    held: list[float] = []
    whole: list[float] = []
    for _ in range(repeats):
        begin = process_time()
        metrics.read()
        held.append((process_time() - begin) * 1e3)
        begin = process_time()
        metrics.render()
        whole.append((process_time() - begin) * 1e3)
    return held, whole


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=20)
    args = arguments.parse_args()
    rows: list[Row] = []
    for num_running in NUM_RUNNING:
        costs, bases = extra_us(num_running, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS, args.repeats)
        cost, base = statistics.median(costs), statistics.median(bases)
        rows.append(
            Row(
                f"{num_running} running: metrics, a token",
                asked=f"<= {ASKED_TOKEN_US} us",
                got=f"{cost:.2f} us (engine and scheduler without: {base:.2f} us)",
                ok=cost <= ASKED_TOKEN_US,
                values={"us": costs, "without_us": bases},
            )
        )
    noting = noting_us(args.repeats)
    rows.append(
        Row(
            "  in any case: noting that a token came",
            asked="",
            got=f"{statistics.median(noting):.2f} us",
            values={"us": noting},
        )
    )
    theirs = one_by_one_us(args.repeats)
    rows.append(
        Row(
            "  peer: prometheus_client's histogram, told one by one",
            asked="",
            got=f"{statistics.median(theirs):.2f} us",
            values={"us": theirs},
        )
    )
    costs, bases = extra_us(NUM_SHORT, 1, 1, args.repeats)
    cost = statistics.median(costs)
    rows.append(
        Row(
            "metrics, a request of one token",
            asked="",
            got=f"{cost:.1f} us (without: {statistics.median(bases):.1f} us)",
            values={"us": costs, "without_us": bases},
        )
    )
    held, whole = reading_ms(args.repeats)
    rows.append(
        Row(
            "a reading of /metrics: collected, of all",
            asked="",
            got=f"{statistics.median(held):.2f} of {statistics.median(whole):.2f} ms",
            values={"held_ms": held, "whole_ms": whole},
        )
    )
    print_report("metrics", rows, machine(), args.json)


if __name__ == "__main__":
    main()
