"""A server under more load than it can take: how many requests are served well, and what becomes of the others.

Open loop: requests come at their times, whatever became of those before. Arrivals are Poisson's, and bursty ones (gaps
with a gamma distribution, three times as uneven). Lengths are those of the Azure LLM inference trace of 2023
(``--trace``, or ``azure_conv_2023.csv`` from ``$PAGEFOLD_TRACES``; generated ones where there is none), each halved and
cut at 4,096. Clients bound outputs by the power of two that is at least twice as long, 128 at least; how long one is,
nobody knows.

A request is good if its first token comes within ``--ttft`` seconds, 99 of 100 gaps between its tokens are within
``--itl``, and it ends. *Saturation* is the highest rate at which nine of ten requests are good, first come first
served and admitted when their prompts fit (``prompt``): found by halving, with Poisson's arrivals.

    goodput   good requests at 1.2 x saturation, by how requests are admitted: with all that they may sample reserved
              (``max_tokens``), when their prompts fit (``prompt``), by predicted outputs (``predicted``); the last two
              with the targets as guardrails too; also how many were preempted, how many predictions held, and, over
              HTTP, vLLM's CPU build with the same bytes of KV, as it comes and with steps as short as ours
    overload  good requests at 3 x saturation for 10 minutes over those at saturation; unanswered requests, leaked
              blocks; in the simulator without guardrails too
    itl       gaps between tokens while prompts of 4,000 tokens come, how much later these begin than alone, and
              what capping them costs

``--in sim``: the real scheduler and cache on a virtual clock, a step of 8 ms and 20 us a token, KV for 24,000 tokens;
it is the same on any machine. ``--in http``: ``pagefold serve`` in a process of its own, with a random model of two
layers, and clients that stream; figures depend on the machine, which nobody else should use.

What this checkout lacks is left out, and said.

    python benchmarks/load.py [--in sim|http] [--only PART] [--setting WORD] [--trace PATH] [--rate R] [--seconds S]
        [--seeds N] [--ttft S] [--itl S] [--json FILE]
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import load_http
import load_sim
from load_traffic import Lengths, Outcome, Sent, Targets, bursty, goodput, percentile, poisson, read_lengths
from report import Row, machine, parser, print_report
from rich.console import Console

from pagefold.sim.traces import traces_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from load_http import HttpRun
    from load_sim import Run

PARTS = ("goodput", "overload", "itl")
TRACE = "azure_conv_2023.csv"
ASKED_GOOD = 0.9
OVER, OVERLOAD = 1.2, 3.0
OVERLOAD_S = 600.0
LONG_PROMPT = 4000
SEARCHES = 7

console = Console(stderr=True)


@dataclass(frozen=True)
class Setting:
    """How a server is set.

    Attributes:
        name: for people.
        admission: how requests are let in.
        guardrails: targets in milliseconds, by the names of their flags' fields; empty for none.
        is_peer: whether it is vLLM.
        flags: more of vLLM's.
    """

    name: str
    admission: str = "prompt"
    guardrails: dict[str, float] = field(default_factory=dict)
    is_peer: bool = False
    flags: tuple[str, ...] = ()


PROMPT = Setting("prompt: today's first come first served")
RESERVED = Setting("max_tokens: all that may be sampled is reserved", "max_tokens")
PREDICTED = Setting("predicted: by predicted outputs", "predicted")
PEER = Setting("vLLM's CPU build, the same bytes of KV", is_peer=True)
# As ours has it on a CPU: long steps are long gaps for who decodes.
PEER_SHORT = Setting("vLLM, steps of at most 512 tokens", is_peer=True, flags=("--max-num-batched-tokens=512",))


@dataclass(frozen=True)
class Bench:
    """What is measured, and where.

    Attributes:
        is_http: whether on a real server.
        lengths: of requests.
        targets: what is good.
        seconds: of one run.
        seeds: of arrivals.
        only: words of which one is in the name of a setting whose goodput is measured; empty for all settings.
    """

    is_http: bool
    lengths: Lengths
    targets: Targets
    seconds: float
    seeds: range
    only: list[str]

    def lacks(self, setting: Setting) -> str:
        """Return what this checkout lacks of a setting; empty where it has all."""
        if setting.is_peer:
            if not self.is_http:
                return "vLLM needs a real server: --in http"
            return "" if load_http.PEER.exists() else "vLLM is not installed: make peers"
        if not load_sim.has_admission(setting.admission):
            return f"this checkout has no admission {setting.admission!r}"
        if setting.guardrails and not load_sim.has_guardrails():
            return "this checkout has no guardrails"
        return ""

    def serve(self, sent: list[Sent], setting: Setting) -> Run | HttpRun:
        """Serve ``sent``."""
        console.print(f"  {setting.name}: {len(sent):,} requests", highlight=False)
        if not self.is_http:
            how = load_sim.Machine(admission=setting.admission, guardrails=dict(setting.guardrails))
            return load_sim.run(sent, how)
        flags = [f"--{name.replace('_', '-')}={value:g}" for name, value in setting.guardrails.items()]
        if setting.admission != "prompt" or load_sim.has_admission(""):
            flags.append(f"--admission={setting.admission}")
        return load_http.serve(sent, [*setting.flags] if setting.is_peer else flags, is_peer=setting.is_peer)

    def guardrails(self) -> dict[str, float]:
        """Return the targets as guardrails."""
        return {"target_ttft_ms": 1e3 * self.targets.ttft_s, "target_itl_ms": 1e3 * self.targets.itl_s}


def share_good(bench: Bench, outcomes: list[Outcome]) -> float:
    """Return the share of good requests."""
    return sum(outcome.is_good(bench.targets) for outcome in outcomes) / max(1, len(outcomes))


def saturation(bench: Bench) -> float:
    """Return the highest rate at which nine of ten requests are good, within some hundredths."""
    low, high = 0.0, 1.0
    while share_good(bench, bench.serve(poisson(bench.lengths, high, bench.seconds, 0), PROMPT).outcomes) >= ASKED_GOOD:
        low, high = high, 2 * high
    for _ in range(SEARCHES):
        rate = (low + high) / 2
        good = share_good(bench, bench.serve(poisson(bench.lengths, rate, bench.seconds, 0), PROMPT).outcomes)
        low, high = (rate, high) if good >= ASKED_GOOD else (low, rate)
        if high - low < 0.03 * high:
            break
    console.print(f"saturation: {low:.2f} requests a second", highlight=False)
    return low


# Parts.


def measure_goodput(bench: Bench, rate: float) -> list[Row]:
    """Return rows on good requests at 1.2 x saturation."""
    guardrails = bench.guardrails()
    settings = [
        RESERVED,
        PROMPT,
        Setting("prompt and guardrails", guardrails=guardrails),
        PREDICTED,
        Setting("predicted and guardrails", "predicted", guardrails),
        PEER,
        PEER_SHORT,
    ]
    settings = [one for one in settings if not bench.only or any(word in one.name for word in bench.only)]
    rows: list[Row] = []
    for arrive in (poisson, bursty):
        kind = arrive.__name__
        got: dict[str, list[float]] = {}
        for setting in settings:
            lacks = bench.lacks(setting)
            if lacks:
                rows.append(Row(f"{kind}: {setting.name}", "", f"left out: {lacks}"))
                continue
            runs = [
                bench.serve(arrive(bench.lengths, OVER * rate, bench.seconds, seed), setting) for seed in bench.seeds
            ]
            got[setting.name] = [goodput(run.outcomes, bench.targets, bench.seconds) for run in runs]
            rows += _of_setting(kind, setting, runs, got[setting.name])
        best = next((name for name in reversed(got) if name.startswith("predicted")), PROMPT.name)
        for peer, asked in ((RESERVED.name, 2.0), (PROMPT.name, 1.3), (PEER.name, 1.3), (PEER_SHORT.name, 1.3)):
            if peer in got and best in got and peer != best:
                ratios = [ours / max(theirs, 1e-9) for ours, theirs in zip(got[best], got[peer], strict=True)]
                ratio = statistics.median(ratios)
                rows.append(Row(f"{kind}: {best.split(':')[0]} over {peer.split(':')[0]}", f">= {asked} x",
                                f"{ratio:.2f} x", ratio >= asked, {"ratios": ratios}))  # fmt: skip
    return rows


def _of_setting(kind: str, setting: Setting, runs: list[Any], got: list[float]) -> list[Row]:
    """Return rows on one setting."""
    preempted = statistics.mean(run.share_preempted for run in runs)
    is_ours = setting.admission == "predicted"
    shed = statistics.mean(sum(one.is_shed for one in run.outcomes) / max(1, len(run.outcomes)) for run in runs)
    ttfts = [one.ttft_s for run in runs for one in run.outcomes if one.ttft_s is not None]
    values: dict[str, object] = {"goodput": got, "preempted": preempted, "shed": shed}
    values["ttft_p50_s"], values["ttft_p95_s"] = percentile(ttfts, 0.5), percentile(ttfts, 0.95)
    rows = [
        Row(f"{kind}: {setting.name}: good requests a second", "", f"{statistics.median(got):.2f}", values=values),
        Row("  preempted", "< 1 %" if is_ours else "", f"{preempted:.2%}", preempted < 0.01 if is_ours else None),
    ]
    if shed:
        rows.append(Row("  refused", "", f"{shed:.1%}"))
    num_checked = sum(run.num_checked for run in runs)
    if num_checked:
        within = sum(run.num_within for run in runs) / num_checked
        rows.append(Row("  outputs within their 80 % interval", "75 to 85 %", f"{within:.1%}", 0.75 <= within <= 0.85))
    return rows


def measure_overload(bench: Bench, rate: float, seconds: float) -> list[Row]:
    """Return rows on 3 x saturation for 10 minutes."""
    best = PROMPT if bench.lacks(PREDICTED) else PREDICTED
    guarded = replace(best, name=f"{best.admission}, with guardrails", guardrails=bench.guardrails())
    both = (guarded,) if bench.is_http else (PROMPT, guarded)  # it would answer all of them, an hour later
    settings = [one for one in both if not bench.lacks(one)]
    rows = [Row(one.name, "", f"left out: {bench.lacks(one)}") for one in both if bench.lacks(one)]
    for setting in settings:
        before = bench.serve(poisson(bench.lengths, rate, seconds, 0), setting)
        run = bench.serve(poisson(bench.lengths, OVERLOAD * rate, seconds, 1), setting)
        at_rate, got = (goodput(one.outcomes, bench.targets, seconds) for one in (before, run))
        num_lost = sum(not outcome.has_answer for outcome in run.outcomes)
        shed = sum(outcome.is_shed for outcome in run.outcomes) / len(run.outcomes)
        is_ours = setting is guarded
        rows += [
            Row(f"{setting.name}: goodput at 3 x over that at saturation", ">= 0.9 x" if is_ours else "",
                f"{got / max(at_rate, 1e-9):.2f} x", got >= 0.9 * at_rate if is_ours else None,
                {"goodput": got, "at_saturation": at_rate, "refused": shed, "seconds": seconds}),
            Row(f"  of {len(run.outcomes):,} requests without an answer; refused with one", "0",
                f"{num_lost}; {shed:.1%}", num_lost == 0),
            Row("  leaked blocks", "0", f"{run.num_leaked}", run.num_leaked == 0),
        ]  # fmt: skip
    return rows


def measure_itl(bench: Bench, rate: float) -> list[Row]:
    """Return rows on gaps between tokens while long prompts come, a third of all tokens, at 3/4 of saturation."""
    mean = statistics.mean(sum(pair) for pair in bench.lengths.pairs)
    short = Lengths(tuple(pair for pair in bench.lengths.pairs if pair[0] < LONG_PROMPT / 4), bench.lengths.source)
    base = poisson(short, rate / 2, bench.seconds, 0)
    every_s = LONG_PROMPT / (mean * rate / 4)
    num_long = int(bench.seconds / every_s)
    long = [Sent((number + 0.5) * every_s, LONG_PROMPT, 8, 128) for number in range(num_long)]
    together = sorted([*base, *long], key=lambda one: one.at_s)
    alone = bench.serve(long[:1], PROMPT).outcomes[0].ttft_s or 0.0
    calm = bench.serve(base, PROMPT)
    target_ms = 1.6e3 * percentile([gap for one in calm.outcomes for gap in one.gaps_s], 0.5)
    capped = Setting("with --target-itl-ms", guardrails={"target_itl_ms": target_ms})
    rows, took = [], {}
    for setting in (PROMPT, capped):
        lacks = bench.lacks(setting)
        if lacks:
            rows.append(Row(setting.name, "", f"left out: {lacks}"))
            continue
        run = bench.serve(together, setting)
        gaps = [gap for one in run.outcomes if one.sent.prompt_tokens < LONG_PROMPT for gap in one.gaps_s]
        ttfts = [one.ttft_s for one in run.outcomes if one.sent.prompt_tokens == LONG_PROMPT and one.ttft_s is not None]
        spread = percentile(gaps, 0.99) / max(percentile(gaps, 0.5), 1e-9)
        slower = percentile(ttfts, 0.5) / max(alone, 1e-9)
        took[setting.name] = run.num_tokens / run.seconds
        is_ours = setting is capped
        name = setting.name if is_ours else "no cap"
        rows += [
            Row(f"{name}: gaps between tokens, p99 / p50, {num_long} prompts of 4k", "<= 2.0 x" if is_ours else "",
                f"{spread:.2f} x", spread <= 2.0 if is_ours else None,
                {"p50_s": percentile(gaps, 0.5), "p99_s": percentile(gaps, 0.99), "target_ms": target_ms}),
            Row("  first token of a prompt of 4k over alone", "<= 3 x" if is_ours else "", f"{slower:.2f} x",
                slower <= 3.0 if is_ours else None, {"alone_s": alone, "median_s": percentile(ttfts, 0.5)}),
        ]  # fmt: skip
        if is_ours:
            ratio = took[capped.name] / took[PROMPT.name]
            rows.append(Row("  tokens a second over no cap", ">= 0.85 x", f"{ratio:.2f} x", ratio >= 0.85))
    return rows


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--in", dest="where", choices=("sim", "http"), default="sim")
    arguments.add_argument("--only", choices=PARTS, action="append", help="a part; may be given again")
    arguments.add_argument(
        "--setting", action="append", help="of goodput: those with this in their names; again for more"
    )
    arguments.add_argument("--trace", type=Path, help=f"lengths; {TRACE} by default")
    arguments.add_argument("--rate", type=float, help="take this as saturation, in requests a second")
    arguments.add_argument("--seconds", type=float, default=120.0, help="of arrivals in one run")
    arguments.add_argument("--overload-seconds", type=float, default=OVERLOAD_S, help="of arrivals at 3 x saturation")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--ttft", type=float, default=1.0, help="target in seconds")
    arguments.add_argument("--itl", type=float, default=0.1, help="target in seconds")
    args = arguments.parse_args()
    folder = traces_folder()
    path = args.trace or (folder / TRACE if folder is not None and (folder / TRACE).exists() else None)
    lengths = read_lengths(path)
    console.print(lengths.describe(), highlight=False)
    targets = Targets(args.ttft, args.itl)
    bench = Bench(args.where == "http", lengths, targets, args.seconds, range(1, 1 + args.seeds), args.setting or [])
    rate = args.rate or saturation(bench)
    parts: dict[str, Callable[[], list[Row]]] = {
        "goodput": lambda: measure_goodput(bench, rate),
        "overload": lambda: measure_overload(bench, rate, args.overload_seconds),
        "itl": lambda: measure_itl(bench, rate),
    }
    rows = [Row(f"saturation, {lengths.describe()}", "", f"{rate:.2f} requests/s", values={"rate": rate})]
    for part in args.only or PARTS:
        console.print(part)
        rows += parts[part]()
    print_report(f"load, {args.where}", rows, machine(), args.json)


if __name__ == "__main__":
    main()
