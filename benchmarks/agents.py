"""Agents' sessions in a quarter of the memory that they would fill: how many prompt tokens are computed.

40 agents work side by side (``AgentSessionsWorkload``): each turn's prompt is the last one, its answer and what a tool
said, which takes 1 to 60 seconds; every 10 turns the client compacts what was said; some turns call a sub-agent. A
closed loop on a virtual clock: the real scheduler and cache, and a runner that computes nothing. The pool holds a
quarter of the longest prompt and answer of every session together.

Compared are prompt tokens that are computed, what is computed again after preemptions included:

    LRU          clients say nothing of sessions, the least recently used goes first
    default      the same with the default policy
    told         clients name their sessions, and say when they will be back
    learned      they name their sessions only: how long tools take is learned
    all memory   what is left where nothing is ever evicted
    Belady       the cache alone, by the rule that knows the future; requests in the order in which the told ones came
    holding      the same where a request holds its blocks while it runs, as on any server: one request at a time

Of memory that is superseded (compacted away, or of a session that has ended) is counted how often a block was evicted
for memory, and whether it was one of these as long as there were any.

    python benchmarks/agents.py [--sessions 40] [--memory 0.25] [--seeds 5] [--json FILE]
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from report import Row, machine, parser, print_report
from rich.console import Console

from pagefold.events import BlockEvicted, Event, RequestAdded, fan_out
from pagefold.kv import KVCore, make_policy
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim import LinearStepCost, NullRunner, Tally, VirtualClock, replay, replay_cache_only
from pagefold.sim.belady import next_uses
from pagefold.sim.traces.segments import as_trace

if TYPE_CHECKING:
    from pagefold.sim.report import Report

BLOCK_SIZE = 16
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 64, 512
ASKED_OVER_LRU, ASKED_OVER_TOLD = 0.5, 1.1

console = Console(stderr=True)


@dataclass
class Evictions:
    """What went for memory.

    Attributes:
        core: whose blocks.
        num_superseded: that were superseded.
        num_before_them: that were not, though some that were could have gone.
        arrivals: ids of requests with the times at which they came.
    """

    core: KVCore | None = None
    num_superseded: int = 0
    num_before_them: int = 0
    arrivals: dict[str, float] = field(default_factory=dict)

    def __call__(self, event: Event) -> None:
        """Count ``event``."""
        if isinstance(event, RequestAdded):
            self.arrivals[event.sample_ids[0]] = event.arrival_s
        if not isinstance(event, BlockEvicted) or event.cause != "allocation":
            return
        assert self.core is not None
        if event.rule == "superseded":
            self.num_superseded += 1
        else:
            self.num_before_them += self.core.blocks.expectations.superseded() is not None

    @property
    def share_first(self) -> float:
        """Share of evictions that were of superseded blocks, of those for which there were any."""
        return self.num_superseded / max(1, self.num_superseded + self.num_before_them)


def run(turns: list[Any], num_blocks: int, policy: str) -> tuple[Report, Evictions]:
    """Serve all turns, each when its client comes with it."""
    tally, evictions = Tally(), Evictions()
    emit = fan_out(tally, evictions)
    core = KVCore(num_blocks, block_size=BLOCK_SIZE, policy=make_policy(policy, num_blocks, tally), emit=emit)
    evictions.core = core
    scheduler = Scheduler(core, SchedulerLimits(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS), emit=emit)
    report = replay(turns, scheduler, NullRunner(), VirtualClock(), LinearStepCost(), tally=tally)
    return report, evictions


def belady(turns: list[Any], num_blocks: int) -> int:
    """Return how many prompt tokens the cache alone would leave to be computed, if it knew the future."""
    whole = [replace(each, segments=(*each.segments, each.answer)) for each in turns]
    found = replay_cache_only(
        as_trace(whole, BLOCK_SIZE), policy="belady", block_size=BLOCK_SIZE, cache_tokens=num_blocks * BLOCK_SIZE
    )
    return sum(each.prompt_tokens for each in turns) - found.num_hit_tokens


def holding(turns: list[Any], num_blocks: int) -> int:
    """Return the same of a cache that is full of what the running request holds and of what is used again soonest.

    One request runs at a time, and takes room only from others; so no server of requests one at a time finds more.
    """
    traced = as_trace([replace(each, segments=(*each.segments, each.answer)) for each in turns], BLOCK_SIZE)
    paths = [each.prefix_ids for each in traced]
    cached: dict[int, int] = {}  # block -> its next use
    heap: list[tuple[int, int, int]] = []  # (-next use, -depth, block); stale where cached says otherwise
    num_computed = 0
    for turn, path, uses in zip(turns, paths, next_uses(paths), strict=True):
        num_found = next((at for at, block in enumerate(path) if block not in cached), len(path))
        num_computed += max(0, turn.prompt_tokens - num_found * BLOCK_SIZE)
        cached.update(dict.fromkeys(path, -1))
        while len(cached) > num_blocks:
            after, _, block = heappop(heap)
            if cached.get(block) == -after:
                del cached[block]
        for depth, (block, use) in enumerate(zip(path, uses, strict=True)):
            cached[block] = use
            heappush(heap, (-use, -depth, block))
    return num_computed


def measure(num_sessions: int, memory: float, seed: int) -> dict[str, float]:
    """Return the figures of one seed."""
    from pagefold.sim.traces.agents import AgentSessionsWorkload, most_live_tokens, without_returns, without_sessions

    turns = AgentSessionsWorkload(num_sessions=num_sessions, seed=seed).generate()
    live = most_live_tokens(turns)
    num_blocks = int(memory * live) // BLOCK_SIZE
    figures: dict[str, float] = {"asked": sum(each.prompt_tokens for each in turns), "blocks": num_blocks}
    ways = {
        "LRU": (without_sessions(turns), num_blocks, "lru"),
        "default": (without_sessions(turns), num_blocks, "default"),
        "told": (turns, num_blocks, "default"),
        "learned": (without_returns(turns), num_blocks, "default"),
        "all memory": (without_sessions(turns), 40 * live // BLOCK_SIZE, "lru"),
    }
    for name, way in ways.items():
        report, evictions = run(*way)
        if name == "told":
            came = evictions.arrivals
        figures[name] = report.num_computed_tokens
        figures[f"{name}: superseded"] = evictions.num_superseded
        figures[f"{name}: first"] = evictions.share_first
        console.print(f"  seed {seed}, {name}: {report.num_computed_tokens:,} tokens computed", highlight=False)
    as_told = sorted((replace(each, arrival_s=came[each.name]) for each in turns), key=lambda each: each.arrival_s)
    figures["Belady"] = belady(as_told, num_blocks)
    figures["holding"] = holding(as_told, num_blocks)
    return figures


def rows_of(seeds: list[dict[str, float]]) -> list[Row]:
    """Return what all seeds come to."""

    def ratio(name: str, over: str) -> list[float]:
        return [each[name] / each[over] for each in seeds]

    def median(name: str) -> float:
        return statistics.median(each[name] for each in seeds)

    rows = [
        Row(f"{name}: prompt tokens computed", "", f"{median(name):,.0f}",
            values={"tokens": [each[name] for each in seeds]})
        for name in ("LRU", "default", "told", "learned", "all memory", "Belady", "holding")
    ]  # fmt: skip
    for name in ("told", "learned"):
        got = ratio(name, "LRU")
        worst = f" (worst {max(got):.2f})"
        rows.append(Row(f"{name} over LRU without sessions", f"<= {ASKED_OVER_LRU} x",
                        f"{statistics.median(got):.2f} x{worst}", statistics.median(got) <= ASKED_OVER_LRU,
                        {"ratios": got}))  # fmt: skip
    bound = ratio("holding", "LRU")
    rows.append(Row("holding over LRU: the least that any rule could reach", "", f"{statistics.median(bound):.2f} x",
                    values={"ratios": bound}))  # fmt: skip
    got = ratio("learned", "told")
    rows.append(Row("learned pauses over told ones", f"<= {ASKED_OVER_TOLD} x", f"{statistics.median(got):.2f} x",
                    statistics.median(got) <= ASKED_OVER_TOLD, {"ratios": got}))  # fmt: skip
    first = min(min(each["told: first"], each["learned: first"]) for each in seeds)
    num = sum(each["told: superseded"] + each["learned: superseded"] for each in seeds)
    rows.append(Row(f"superseded blocks that went before any other, of {num:,.0f}", "100 %", f"{first:.1%}",
                    first == 1.0 and num > 0))  # fmt: skip
    return rows


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--sessions", type=int, default=40)
    arguments.add_argument("--memory", type=float, default=0.25, help="share of what all sessions would fill")
    arguments.add_argument("--seeds", type=int, default=5)
    args = arguments.parse_args()
    if find_spec("pagefold.sim.traces.agents") is None:
        arguments.exit(0, "left out: this checkout generates no agents' sessions\n")
    seeds = [measure(args.sessions, args.memory, seed) for seed in range(args.seeds)]
    print_report("agents", rows_of(seeds), machine(), args.json)


if __name__ == "__main__":
    main()
