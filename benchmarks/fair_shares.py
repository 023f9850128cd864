"""Fair shares: the p95 TTFT of a tenant that stays within its share, beside one that sends 20 x its share, over alone.

Workload: two tenants of equal weights, Poisson arrivals, in virtual time on the real scheduler and cache; a step costs
what it does on a small CPU (40 ms, 0.3 ms a token computed, 1 us a token read). One tenant sends half its share of what
the server can do, the other 20 x its share. In three settings what is short is seats (``max_num_seqs``), blocks, or
tokens of a step. Prompts and outputs are exponential around their means. First come first served is beside it, with no
limit asked; and with it, how the served tokens were shared, how many requests made way, and the ratio did no request
wait for its first step: steps are longer and fuller beside somebody, whatever goes first. Where tokens are short,
what ideal sharing gives is beside it too: a server of the tenant's own, half as fast, over one that is as fast.

    python benchmarks/fair_shares.py [--seconds 600] [--seeds 3] [--json FILE]
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from report import Row, machine, parser, print_report

from pagefold.events import RequestPreempted
from pagefold.kv import KVCore, make_policy
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import SCHEDULING_POLICIES, Scheduler, SchedulerLimits
from pagefold.sim import LinearStepCost, NullRunner, VirtualClock

if TYPE_CHECKING:
    from pagefold.events import Event

COST = LinearStepCost(step_s=40e-3, token_s=0.3e-3, context_token_s=1e-6)
GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
BLOCK_SIZE = 16
BURST, GOOD = "burst", "good"
BURST_SHARE, GOOD_SHARE = 20.0, 0.5
"""What each sends, in its own shares: half of what the server can do, since their weights are equal."""
ASKED = 1.5


@dataclass(frozen=True)
class Setting:
    """A server on which one thing is short, and lengths of requests.

    Attributes:
        max_num_seqs, max_num_batched_tokens, num_blocks: the server's.
        num_prompt, num_output: mean tokens.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    num_prompt: int
    num_output: int


SETTINGS = {
    "seats": Setting(32, 256, 20_000, 200, 100),
    "blocks": Setting(256, 256, 2_000, 400, 100),
    "tokens": Setting(64, 256, 20_000, 1000, 20),
}


def p95(values: list[float]) -> float:
    """Return the 95th percentile."""
    return sorted(values)[int(0.95 * (len(values) - 1))]


@dataclass
class Outcome:
    """What came of a run.

    Attributes:
        ttfts_s: of each tenant's requests that got a first token, by tenant.
        computing_s: of these, from when their first step began.
        num_served: tokens computed and sampled, by tenant.
        num_made_way: preemptions for shares.
    """

    ttfts_s: dict[str, list[float]] = field(default_factory=lambda: {BURST: [], GOOD: []})
    computing_s: dict[str, list[float]] = field(default_factory=lambda: {BURST: [], GOOD: []})
    num_served: dict[str, int] = field(default_factory=lambda: {BURST: 0, GOOD: 0})
    num_made_way: int = 0

    def note(self, event: Event) -> None:
        """Count who makes way."""
        if isinstance(event, RequestPreempted) and event.cause == "share":
            self.num_made_way += 1

    def p95_s(self, tenant: str) -> float:
        """Return the 95th percentile of a tenant's TTFT."""
        return p95(self.ttfts_s[tenant])


def arrivals(setting: Setting, rates: dict[str, float], seconds: float, seed: int) -> list[Request]:
    """Return what tenants send, at ``rates`` requests a second: a tenant's are the same whoever is beside it."""
    requests: list[Request] = []
    for tenant, rate in rates.items():
        rng = Random(f"{seed} {tenant}")
        now, index = rng.expovariate(rate), 0
        while now < seconds:
            num_prompt = min(4 * setting.num_prompt, 1 + int(rng.expovariate(1 / setting.num_prompt)))
            num_output = min(4 * setting.num_output, 1 + int(rng.expovariate(1 / setting.num_output)))
            requests.append(
                Request(
                    f"{tenant}-{index}",
                    [rng.randrange(2**30) for _ in range(num_prompt)],
                    GREEDY,
                    stop=StopRule(frozenset(), num_prompt + num_output),
                    namespace=tenant.encode(),
                    tenant=tenant,
                    seed=len(requests),
                    arrival_s=now,
                )
            )
            now, index = now + rng.expovariate(rate), index + 1
    return sorted(requests, key=lambda request: request.arrival_s)


def run(setting: Setting, policy: str, requests: list[Request], seconds: float) -> Outcome:
    """Run requests as they come, until ``seconds`` are over and everybody has a first token who is not the burst."""
    outcome, clock, runner = Outcome(), VirtualClock(), NullRunner()
    core = KVCore(setting.num_blocks, block_size=BLOCK_SIZE, policy=make_policy("lru"), emit=outcome.note)
    limits = SchedulerLimits(setting.max_num_seqs, setting.max_num_batched_tokens)
    scheduler = Scheduler(core, limits, policy=SCHEDULING_POLICIES[policy](60.0), emit=outcome.note)
    coming = deque(requests)
    began_s: dict[Request, float] = {}
    num_good = sum(request.tenant == GOOD for request in requests)
    while clock() < seconds or (len(outcome.ttfts_s[GOOD]) < num_good and policy == "fair"):
        if not scheduler.has_work:
            if not coming:
                break
            clock.advance_to(coming[0].arrival_s)
        while coming and coming[0].arrival_s <= clock():
            scheduler.add(coming.popleft())
        plan = scheduler.schedule(clock())
        for request, num_tokens in zip(scheduler.in_step, plan.num_tokens, strict=True):
            outcome.num_served[request.tenant] += num_tokens
            began_s.setdefault(request, clock())
        result = runner.run(plan)
        clock.advance(COST(plan))
        for request in scheduler.apply(result):
            if request.times.first_token_s is None:
                request.times.first_token_s = clock()
                outcome.ttfts_s[request.tenant].append(clock() - request.arrival_s)
                outcome.computing_s[request.tenant].append(clock() - began_s[request])
    if policy != "fair":  # who waits still has waited that long at least
        waiting = [request for request in scheduler.waiting if request.tenant == GOOD]
        outcome.ttfts_s[GOOD] += [clock() - request.arrival_s for request in waiting]
    return outcome


def ideal_ttfts_s(setting: Setting, requests: list[Request], share: float) -> list[float]:
    """Return TTFTs of prompts that are computed one after another at a share of the full speed.

    It is what the ideal of fair sharing gives a tenant (generalized processor sharing; Parekh and Gallager 1993) while
    somebody else always has work: no step to wait for, and no output of anybody's in the way.
    """
    token_s = (COST.step_s / setting.max_num_batched_tokens + COST.token_s) / share
    end_s, ttfts_s = 0.0, []
    for request in requests:
        end_s = max(end_s, request.arrival_s) + token_s * request.num_prompt_tokens
        ttfts_s.append(end_s - request.arrival_s)
    return ttfts_s


def most_a_second(setting: Setting) -> float:
    """Return how many requests a second the server ends that has always enough to do."""
    requests = arrivals(setting, {BURST: 4.0}, 300.0, 0)
    for request in requests:
        request.times.arrival_s = 0.0
    outcome = run(setting, "fcfs", requests, 120.0)
    return len(outcome.ttfts_s[BURST]) / 120.0


def measure(name: str, setting: Setting, seconds: float, seeds: int) -> list[Row]:
    """Return the rows of a setting."""
    capacity = most_a_second(setting)
    rates = {GOOD: GOOD_SHARE * capacity / 2, BURST: BURST_SHARE * capacity / 2}
    rows: list[Row] = []
    for policy in ("fair", "fcfs"):
        alone, beside = Outcome(), Outcome()
        for seed in range(seeds):
            for outcome, among in ((alone, {GOOD: rates[GOOD]}), (beside, rates)):
                one = run(setting, policy, arrivals(setting, among, seconds, seed), seconds)
                outcome.num_made_way += one.num_made_way
                for tenant in (GOOD, BURST):
                    outcome.ttfts_s[tenant] += one.ttfts_s[tenant]
                    outcome.computing_s[tenant] += one.computing_s[tenant]
                    outcome.num_served[tenant] += one.num_served[tenant]
        ratio = beside.p95_s(GOOD) / alone.p95_s(GOOD)
        values: dict[str, object] = {
            "ratio": ratio,
            "alone_p95_s": alone.p95_s(GOOD),
            "beside_p95_s": beside.p95_s(GOOD),
            "num_requests": len(beside.ttfts_s[GOOD]),
            "capacity_requests_per_s": capacity,
            "served": beside.num_served,
            "num_made_way": beside.num_made_way,
        }
        asked = f"<= {ASKED} x" if policy == "fair" else ""
        got = f"{ratio:.2f} x ({alone.p95_s(GOOD):.2f} s -> {beside.p95_s(GOOD):.2f} s)"
        is_fair = policy == "fair"
        rows.append(
            Row(
                f"{name} short, {policy}: p95 TTFT beside a burst",
                asked,
                got,
                ratio <= ASKED if is_fair else None,
                values,
            )
        )
        if is_fair:
            share = beside.num_served[GOOD] / sum(beside.num_served.values())
            got = f"{share:.0%} of the tokens, {beside.num_made_way} made way"
            rows.append(Row(f"{name} short, fair: what it is served", "", got))
            least = p95(beside.computing_s[GOOD]) / alone.p95_s(GOOD)
            rows.append(Row(f"{name} short, fair: the ratio from its requests' first steps on", "", f"{least:.2f} x"))
    if name == "tokens":
        sent = [arrivals(setting, {GOOD: rates[GOOD]}, seconds, seed) for seed in range(seeds)]
        half, whole = (p95([s for each in sent for s in ideal_ttfts_s(setting, each, share)]) for share in (0.5, 1.0))
        rows.append(Row("tokens short, ideal sharing", "", f"{half / whole:.2f} x ({whole:.2f} s -> {half:.2f} s)"))
    return rows


def main() -> None:
    """Measure, and report."""
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=600.0, help="virtual seconds a run (600)")
    arguments.add_argument("--seeds", type=int, default=3, help="runs of each kind (3)")
    arguments.add_argument("--only", choices=sorted(SETTINGS), help="one setting")
    args = arguments.parse_args()
    rows: list[Row] = []
    for name, setting in SETTINGS.items():
        if args.only in (None, name):
            rows += measure(name, setting, args.seconds, args.seeds)
    print_report("fair_shares", rows, machine(), args.json)


if __name__ == "__main__":
    main()
