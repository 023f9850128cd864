"""What the ledger knows and what it costs: causes of misses, memory an entry, CPU time.

* causes: workloads with planted causes, through the real scheduler and core in virtual time, without a model: a time at
  the head of the prompt, a list in changing order, a salt a request, an answer that was changed, a pool that is too
  small, a pin that expires, a reset, requests that come together. Of each request that was to miss for a cause, whether
  most of what it computed is told with that one; and of all tokens that were computed, how many have exactly one.
* memory: what Python takes for a ledger that is full, by entry: of 20,000 blocks, and four times as many that are gone.
* curves: a trace's prompts through the real scheduler with a ledger that listens, one by one, and the live curve of
  ``/v1/cache/whatif`` against exact replays of the same prompts through the real cache, LRU, at 8 sizes; and what
  ghosts of other policies say against replays with those, at 2 sizes. mooncake_conversation.jsonl (12,031 requests, in
  blocks of 512) from the folder $PAGEFOLD_TRACES, else ../shared/traces beside the repository, or generated
  conversations without it; and a generated workload (blocks of 64). What the live curve only fills caches with does not
  count there either. Further traces can be named.
* cost: SmolLM2-135M-Instruct, 16 requests of 256 tokens which get 32 each, half of each prompt shared; the same engine
  with and without a ledger, which keeps what curves are made of, and an overview, the dashboard's, that listen; in
  pairs that change their order (ABBA). Process CPU time; output tokens a second of it, on over off, the median of the
  pairs; and what share of all CPU time is spent in the two themselves.

* load, tenants: see ``benchmarks/observed_load.py``.
* auto: what the policy finds that follows others, against the best single one: the trace named above, where it is, a
  workload that changes (six phases with nothing in common), and shared prompts; each prompt through the real cache.

    python benchmarks/observe.py [--only causes|load|tenants|memory|curves|cost|auto] [--sessions 40] [--pairs 6]
        [--requests 10000] [--traces FILE ...] [--json FILE]
"""

from __future__ import annotations

import gc
import statistics
import tracemalloc
from array import array
from pathlib import Path
from random import Random
from time import process_time, thread_time
from typing import TYPE_CHECKING

from auto_policy import measure_auto
from observed_load import measure_load, measure_tenants
from report import Row, machine, parser, print_report
from rich.progress import track

from pagefold.config import EngineConfig
from pagefold.curves.prompt_cache import PromptCache
from pagefold.engine.status import EngineStatus
from pagefold.events import CacheConfigured, PrefixLookup, RequestAdded, RequestFinished, fan_out, ignore
from pagefold.kv import KVCore, Namespace, make_policy
from pagefold.observe.ledger import GHOSTS_PER_BLOCK, MAX_BYTES_PER_ENTRY, Ledger
from pagefold.observe.overview import Overview
from pagefold.observe.whatif import TIMES, ghost_ratios, lru_curve_of, other_policies
from pagefold.request import Request, StopRule, WarmUp
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim import NullRunner
from pagefold.sim.clock import VirtualClock
from pagefold.sim.curves import lru_curve
from pagefold.sim.traces import parse_workload, read_trace, traces_folder
from pagefold.sim.traces.tokens import IdTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.events import Event
    from pagefold.observe.block_uses import Told
    from pagefold.sim.traces import Trace

BLOCK_SIZE = 16
NS = Namespace("m", "l", "d")
ASKED_OF_CPU = 0.99
ASKED_OF_CURVE = 0.01
TRACE, TRACE_BLOCK = "mooncake_conversation.jsonl", 512
CHECKED_TIMES = (1.0, 2.0)
GENERATED, GENERATED_BLOCK = ("chat:num_chats=2500", "agents:num_tasks=700"), 64
NUM_PROMPT_TOKENS, NUM_SHARED_TOKENS, NUM_OUTPUT_TOKENS, NUM_REQUESTS = 256, 128, 32, 16


class House:
    """A scheduler and core with a ledger, in virtual time."""

    def __init__(self, num_blocks: int) -> None:
        self.clock = VirtualClock()
        self.ledger = Ledger(self.clock)
        self.ledger(CacheConfigured({}, num_blocks, BLOCK_SIZE, "learned"))
        self.core = KVCore(num_blocks, block_size=BLOCK_SIZE, policy=make_policy("learned"), emit=self.ledger)
        self.scheduler = Scheduler(self.core, SchedulerLimits(16, 512), emit=self.ledger)
        self.runner = NullRunner()
        self.num_made = 0

    def send(self, tokens: Sequence[int], salt: str = "", warm_up: WarmUp | None = None, num_new: int = 8) -> str:
        """Queue a request, and return its name."""
        self.num_made += 1
        name = f"r{self.num_made}"
        namespace = Namespace(NS.model, NS.layout, NS.dtype, cache_salt=salt).key()
        how = SamplingParams(temperature=0.0, max_tokens=num_new)
        stop = StopRule(frozenset(), len(tokens) + num_new)
        request = Request(
            name,
            tokens,
            how,
            stop=stop,
            namespace=namespace,
            arrival_s=self.clock(),
            seed=self.num_made,
            warm_up=warm_up,
        )
        self.scheduler.add(request)
        return name

    def run(self) -> None:
        """Run all requests to their ends."""
        while self.scheduler.has_work:
            plan = self.scheduler.schedule(self.clock())
            self.clock.advance(0.05)
            self.scheduler.apply(self.runner.run(plan))

    def ask(self, tokens: Sequence[int], salt: str = "", warm_up: WarmUp | None = None, num_new: int = 8) -> str:
        """Serve one request."""
        name = self.send(tokens, salt, warm_up, num_new)
        self.run()
        return name


def fresh(random: Random, num: int) -> list[int]:
    """Return tokens that nobody has used."""
    return [random.randrange(1 << 30) for _ in range(num)]


# Each plants one cause, and returns the requests that must be told with it.


def changing_head(house: House, random: Random) -> list[str]:
    """A time at the head of the prompt."""
    rules = fresh(random, 600)
    names = [house.ask([*rules[:37], number, *rules[37:]]) for number in range(4)]
    return names[1:]


def changing_order(house: House, random: Random) -> list[str]:
    """Tools in changing order, before everything else."""
    head = fresh(random, 20)
    tools = [fresh(random, 60) for _ in range(6)]
    names = []
    for turn in range(4):
        turned = tools[turn:] + tools[:turn]
        names.append(house.ask([*head, *(token for tool in turned for token in tool)]))
    return names[1:]


def changed_answer(house: House, random: Random) -> list[str]:
    """A client that puts another answer into the history than the model gave."""
    told = house.ask(fresh(random, 300), num_new=200)
    (record,) = house.ledger.records(told)
    said = list(array("i", record.text))
    return [house.ask([*said[:310], *fresh(random, 180)])]


def salts(house: House, random: Random) -> list[str]:
    """A salt a request."""
    prompt = fresh(random, 400)
    names = [house.ask(prompt, salt=f"{random.random()}") for _ in range(4)]
    return names[1:]


def small_pool(house: House, random: Random) -> list[str]:
    """Others take the memory before the prompt comes back."""
    prompt = fresh(random, 480)
    house.ask(prompt)
    num_others = house.core.pool.num_blocks * BLOCK_SIZE // 480 + 1
    for _ in range(num_others):
        house.ask(fresh(random, 480))
    return [house.ask(prompt)]


def expired_pin(house: House, random: Random) -> list[str]:
    """A pin expires, and others take the memory."""
    prompt = fresh(random, 480)
    house.ask(prompt, warm_up=WarmUp(pin=True, ttl_s=5.0), num_new=1)
    house.clock.advance(10.0)
    num_others = house.core.pool.num_blocks * BLOCK_SIZE // 480 + 1
    for _ in range(num_others):
        house.ask(fresh(random, 480))
    return [house.ask(prompt)]


def reset(house: House, random: Random) -> list[str]:
    """Everything is forgotten between two turns."""
    prompt = fresh(random, 480)
    house.ask(prompt)
    house.core.forgetting.reset()
    return [house.ask(prompt)]


def together(house: House, random: Random) -> list[str]:
    """A burst on one prompt that is longer than a step."""
    prompt = fresh(random, 1200)
    names = [house.send(prompt) for _ in range(3)]
    house.run()
    return names[1:]


def new_text(house: House, random: Random) -> list[str]:
    """Nobody has sent it."""
    return [house.ask(fresh(random, 300))]


PLANTED: dict[str, tuple[str, ...]] = {
    "changing_head": ("differs",),
    "changing_order": ("differs",),
    "changed_answer": ("differs",),
    "salts": ("other_namespace",),
    "small_pool": ("evicted",),
    "expired_pin": ("pin_expired",),
    "reset": ("reset",),
    "together": ("computing",),
    "new_text": ("never_seen",),
}
"""What each plants."""

PLANTS: dict[str, Callable[[House, Random], list[str]]] = {
    "changing_head": changing_head,
    "changing_order": changing_order,
    "changed_answer": changed_answer,
    "salts": salts,
    "small_pool": small_pool,
    "expired_pin": expired_pin,
    "reset": reset,
    "together": together,
    "new_text": new_text,
}


def measure_causes(num_sessions: int) -> list[Row]:
    """Return how many planted causes are named, and how many tokens have one."""
    num_right = num_planted = num_tokens = num_told = 0
    wrong: dict[str, int] = {}
    for seed in track(range(num_sessions), "planted causes"):
        random = Random(seed)
        house = House(num_blocks=random.choice((160, 400)))
        for what in random.sample(sorted(PLANTS), len(PLANTS)):
            for name in PLANTS[what](house, random):
                (record,) = house.ledger.records(name)
                by_cause: dict[str, int] = {}
                for miss in record.misses or ():
                    by_cause[miss.cause.value] = by_cause.get(miss.cause.value, 0) + miss.num_tokens
                most = max(by_cause, key=lambda cause: by_cause[cause]) if by_cause else "nothing"
                num_planted += 1
                num_right += most in PLANTED[what]
                if most not in PLANTED[what]:
                    wrong[f"{what}: {most}"] = wrong.get(f"{what}: {most}", 0) + 1
        for record in house.ledger.all_records():
            if record.misses is not None:
                num_tokens += record.num_prompt_tokens - record.num_hit_tokens
                num_told += record.num_missed_tokens
    told = f"{num_right:,} of {num_planted:,}" + (f", not {wrong}" if wrong else "")
    return [
        Row("planted causes that are named", "all", told, num_right == num_planted, {"wrong": wrong}),
        Row(
            "computed tokens with one cause",
            "all",
            f"{num_told:,} of {num_tokens:,}",
            num_told == num_tokens,
            {"num_tokens": num_tokens},
        ),
    ]


def measure_memory() -> list[Row]:
    """Return what a full ledger takes."""
    num_blocks, random = 20_000, Random(0)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    ledger = Ledger()
    ledger(CacheConfigured({}, num_blocks, BLOCK_SIZE, "learned"))
    namespace = NS.key()
    for number in track(range((1 + GHOSTS_PER_BLOCK) * num_blocks * BLOCK_SIZE // 4096 * 2), "filling a ledger"):
        tokens = array("i", (random.randrange(1 << 30) for _ in range(4096)))
        name = f"r{number}"
        ledger(
            RequestAdded(
                (name,),
                (tokens,),
                4096,
                4097,
                namespace,
                0.0,
                None,
                0,
                has_prompt_logprobs=False,
                returns=False,
                pin=None,
            )
        )
        ledger(PrefixLookup(name, 4096, 0, after_preemption=False))
        ledger(RequestFinished(name, "length", 4096, 1))
    del tokens
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    num_entries = ledger.paths.capacity
    assert ledger.paths.num_paths == num_entries
    num_log_bytes = ledger.uses.num_bytes
    got = (after - before - num_log_bytes) / num_entries
    what = f"memory an entry, of {num_entries:,}, requests included"
    asked = f"<= {MAX_BYTES_PER_ENTRY} bytes"
    return [
        Row(what, asked, f"{got:.1f} bytes", got <= MAX_BYTES_PER_ENTRY, {"bytes": got}),
        Row("  and the log that curves are made of, however large the cache", "", f"{num_log_bytes / 1e6:.2f} MB"),
    ]


def the_traces(named: Sequence[Path]) -> list[tuple[Trace, int]]:
    """Return traces, each with the tokens of a block: those that are named, or two."""
    if named:
        return [(read_trace(path), TRACE_BLOCK) for path in named]
    folder = traces_folder()
    first = parse_workload(GENERATED[0]).trace(TRACE_BLOCK) if folder is None else read_trace(folder / TRACE)
    return [(first, TRACE_BLOCK), (parse_workload(GENERATED[1]).trace(GENERATED_BLOCK), GENERATED_BLOCK)]


def listened(trace: Trace, block_size: int, num_blocks: int) -> tuple[Told, int]:
    """Return what a ledger has noted of a trace's prompts, which a scheduler has served one by one.

    And the first of them that counts: those before fill caches, where the log has forgotten any.
    """
    longest = max(request.prompt_tokens for request in trace.requests)
    clock = VirtualClock()
    ledger = Ledger(clock)
    ledger(CacheConfigured({}, num_blocks, block_size, "lru"))
    core = KVCore(num_blocks + longest // block_size + 2, block_size=block_size, policy=make_policy("lru"), emit=ledger)
    scheduler = Scheduler(core, SchedulerLimits(1, longest + 1), emit=ledger)
    runner, made = NullRunner(), IdTokens()
    ends_s: list[float] = []
    how = SamplingParams(temperature=0.0, max_tokens=1)
    for index, request in enumerate(track(trace.requests, f"{trace.name}, live")):
        tokens = made.prompt(index, request)
        stop = StopRule(frozenset(), len(tokens) + 1)
        scheduler.add(Request(f"r{index}", tokens, how, stop=stop, namespace=NS.key(), arrival_s=clock(), seed=index))
        while scheduler.has_work:
            plan = scheduler.schedule(clock())
            clock.advance(0.05)
            scheduler.apply(runner.run(plan))
        ends_s.append(clock())
    assert not ledger.has_failed
    assert not ledger.uses.has_failed
    told = ledger.uses.told(None)
    begin_s = told.uses.counted[0].at_s
    return told, next(index for index, at_s in enumerate(ends_s) if at_s >= begin_s)


class Exact:
    """What the last prompts of a trace find in the real cache, in full blocks, behind all that came before them."""

    def __init__(self, trace: Trace, block_size: int, first: int) -> None:
        self._requests = trace.requests
        self._size = block_size
        self._first = first
        self._num_tokens = sum(one.prompt_tokens for one in trace.requests[first:])
        self._room = max(one.prompt_tokens for one in trace.requests) // block_size + 1

    def ratio(self, policy: str, num_blocks: int) -> float:
        """Return the share of their tokens that a policy finds with so many blocks."""
        cache, made = PromptCache(num_blocks, self._room, self._size, make_policy(policy)), IdTokens()
        num_found = 0
        for index, request in enumerate(self._requests):
            num_full = request.prompt_tokens // self._size * self._size
            found = cache.use(made.prompt(index, request)[:num_full].tobytes(), num_full) if num_full else 0
            num_found += found if index >= self._first else 0
        return num_found / self._num_tokens


def measure_curves(named: Sequence[Path]) -> list[Row]:
    """Return how far live curves are from exact ones."""
    return [row for trace, block_size in the_traces(named) for row in measure_curve(trace, block_size)]


def measure_curve(trace: Trace, block_size: int) -> list[Row]:
    """Return how far the live curve and the ghosts of one trace are from exact ones; the device has 1/16 of it."""
    device = lru_curve(trace.requests, block_size=block_size).num_blocks // 16
    told, first = listened(trace, block_size, device)
    exact = Exact(trace, block_size, first)
    begin = process_time()
    curve = lru_curve_of(told.uses, block_size)
    curve_s = process_time() - begin
    begin = process_time()
    found = ghost_ratios(told.uses, curve, other_policies("lru"), device)
    ghosts_s = process_time() - begin
    sizes = [device * part // 8 for part in (1, 2, 4, 8, 16, 32, 64, 128)]
    what = f"{trace.name}, blocks of {block_size}"
    errors = [abs(curve.at(size * block_size) - exact.ratio("lru", size)) for size in track(sizes, f"{what}, exact")]
    rows = [
        Row(
            f"live curve, {what}, {told.uses.rate:.1%} of them looked at, 8 sizes: largest error",
            f"<= {ASKED_OF_CURVE * 100:g} points",
            f"{max(errors) * 100:.2f} points",
            max(errors) <= ASKED_OF_CURVE,
            {"sizes": sizes, "errors": errors, "rate": told.uses.rate},
        ),
        Row("  to ask for it", "", f"{curve_s:.2f} s of CPU time"),
    ]
    for policy, ratios in track(found.items(), f"{what}, ghosts"):
        off = [
            abs(ratio - exact.ratio(policy, round(times * device))) for times, ratio in zip(TIMES, ratios, strict=True)
        ]
        got = f"{max(off) * 100:.2f} points"
        rows.append(Row(f"  ghosts of {policy}: largest error at 2 sizes", "", got, values={"errors": off}))
    rows.append(Row("  to ask for all of those", "", f"{ghosts_s:.2f} s of CPU time"))
    return rows


class Switch:
    """Sends events on, or not."""

    def __init__(self) -> None:
        self.to: Callable[[Event], None] = ignore
        self.spent_s = 0.0

    def __call__(self, event: Event) -> None:
        """Send one on, and note what that takes."""
        begin = thread_time()
        self.to(event)
        self.spent_s += thread_time() - begin


def measure_cost(num_pairs: int) -> list[Row]:
    """Return output tokens a second of CPU time, with a ledger over without."""
    from pagefold.engine.build import build_engine
    from pagefold.engine.planning import plan_engine

    switch = Switch()
    engine = build_engine(
        plan_engine(EngineConfig(model="smollm2-135m", kv_cache_memory_bytes=2**28, max_model_len=1024)),
        emit=switch,
        say=lambda _: None,
    )
    random = Random(0)
    core = engine.scheduler.core
    how = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    configured = CacheConfigured({}, core.pool.num_blocks, core.block_size, "learned")

    def seconds(*, listens: bool) -> float:
        engine.reset_prefix_cache()
        ledger = Ledger()
        overview = Overview(ledger)
        overview.watch(lambda: EngineStatus.of(engine.scheduler))
        for one in (ledger, overview):
            one(configured)
        switch.to = fan_out(ledger, overview) if listens else fan_out(ignore, ignore)
        shared = [random.randrange(1000, 40_000) for _ in range(NUM_SHARED_TOKENS)]
        own = NUM_PROMPT_TOKENS - NUM_SHARED_TOKENS
        prompts = [shared + [random.randrange(1000, 40_000) for _ in range(own)] for _ in range(NUM_REQUESTS)]
        gc.collect()
        switch.spent_s = 0.0
        begin = process_time()
        for number, prompt in enumerate(prompts):
            engine.add(f"r{number}", prompt, how)
        while engine.has_work:
            engine.step()
        spent_s = process_time() - begin
        if listens:
            shares.append(switch.spent_s / spent_s)
        return spent_s

    shares: list[float] = []
    seconds(listens=True)
    shares.clear()
    ratios = []
    for pair in track(range(num_pairs), "with and without"):
        order = (False, True, True, False) if pair % 2 else (True, False, False, True)
        spent = [(listens, seconds(listens=listens)) for listens in order]
        off = sum(one for listens, one in spent if not listens)
        on = sum(one for listens, one in spent if listens)
        ratios.append(off / on)
    got = statistics.median(ratios)
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    row = Row(
        "output tokens/s with ledger and overview, of without",
        f">= {ASKED_OF_CPU} x",
        f"{got:.4f} x ({spread})",
        got >= ASKED_OF_CPU,
        {"ratios": ratios},
    )
    share = statistics.median(shares)
    own = Row(
        "CPU time in ledger and overview, of all",
        f"<= {1 - ASKED_OF_CPU:.0%}",
        f"{share:.3%}",
        share <= 1 - ASKED_OF_CPU,
    )
    return [row, own]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    made = parser(__doc__)
    made.add_argument(
        "--only", choices=("causes", "load", "tenants", "memory", "curves", "cost", "auto"), help="a part of it"
    )
    made.add_argument("--sessions", type=int, default=40, help="of planted causes")
    made.add_argument("--requests", type=int, default=10_000, help="of two tenants; a fifth of them under load")
    made.add_argument("--pairs", type=int, default=6, help="of runs with and without")
    made.add_argument("--traces", type=Path, nargs="+", default=[], help="for curves, in place of the two named above")
    arguments = made.parse_args(argv)
    rows: list[Row] = []
    if arguments.only in (None, "causes"):
        rows += measure_causes(arguments.sessions)
    if arguments.only in (None, "load"):
        rows += measure_load(arguments.requests // 5)
    if arguments.only in (None, "tenants"):
        rows += measure_tenants(arguments.requests)
    if arguments.only in (None, "memory"):
        rows += measure_memory()
    if arguments.only in (None, "curves"):
        rows += measure_curves(arguments.traces)
    if arguments.only in (None, "cost"):
        rows += measure_cost(arguments.pairs)
    if arguments.only in (None, "auto"):
        rows += measure_auto()
    print_report("observe", rows, machine(), arguments.json)


if __name__ == "__main__":
    main()
