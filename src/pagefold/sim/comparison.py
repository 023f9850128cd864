"""Comparison: one workload under several policies and sizes of the cache, with or without timing, and their bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pagefold.errors import ConfigError
from pagefold.kv.keep import KEEP_ALL, KeepRule
from pagefold.kv.policies import POLICIES
from pagefold.scheduler import ADMISSION_RULES, SCHEDULING_POLICIES
from pagefold.sim.cache_only import BELADY, CacheOnlyReport, replay_cache_only
from pagefold.sim.curves import HitCurve, lru_curve, mean_error
from pagefold.sim.keeping_runner import KeepingRunner, packing_rules
from pagefold.sim.null_runner import NullRunner
from pagefold.sim.replay import SimConfig, simulate
from pagefold.sim.report import Report
from pagefold.sim.size_limits import MAX_BLOCKS, MAX_TOKENS
from pagefold.sim.step_cost import LinearStepCost
from pagefold.sim.tiers import TierModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pagefold.sim.arrivals import AnyRequest
    from pagefold.sim.step_cost import RooflineStepCost
    from pagefold.sim.traces.request import TraceRequest
    from pagefold.steps import Runner

__all__ = [
    "Bounds",
    "Comparison",
    "Curves",
    "Limits",
    "Progress",
    "Question",
    "Run",
    "Turns",
    "compare",
    "policy_names",
]

Progress: TypeAlias = "Callable[[str, int, int], None]"
"""Called with what is being run, how many requests are done, and how many there are."""

_POINTS = 50
_SHARES = (32, 16, 8, 4, 2)
"""Sizes to try where nobody names some: these parts of what a cache that never evicts would hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one step may hold; names as in ``EngineConfig``.

    Attributes:
        max_num_seqs: sequences running at once.
        max_num_batched_tokens: tokens computed in one step.
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Who goes first, and when; names as in ``EngineConfig``.

    Attributes:
        admission: when a request that waits is let in.
        scheduling_policy: who goes first.
    """

    admission: str = "predicted"
    scheduling_policy: str = "fcfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be compared.

    Attributes:
        name: of the workload, for people.
        requests: as the cache sees them: what prompts share is told by ids.
        timed: as a server sees them, with tokens and what is answered; ``requests`` where there is nothing more.
        policies: names of policies; ``belady`` without timing only.
        cache_tokens: sizes of the cache; none for parts of what a cache that never evicts would hold.
        block_size: tokens a block.
        is_cache_only: prompts one after another, with no timing, and outputs not cached.
        limits: of a step, where there is timing.
        turns: who goes first, and when, where there is timing.
        step_cost: seconds that a step takes, where there is timing.
        runner: what samples, where there is timing.
        tiers: what is behind the cache, where there is timing.
        rules: what each cache group keeps, where there is timing; a size of the cache is of tokens in all groups.
        kv_keep: the share of older tokens that is kept, where there is timing and nothing is behind the cache; None for
            all.
        with_bounds: whether to find what Belady's rule and an infinite cache would reach.
        sample_rate: of the sampled curve; None for no curves.

    Raises:
        ConfigError: a value is out of range, or a policy has no such name.
    """

    name: str
    requests: Sequence[TraceRequest]
    timed: Sequence[AnyRequest] = ()
    policies: tuple[str, ...] = ("default",)
    cache_tokens: tuple[int, ...] = ()
    block_size: int = 16
    is_cache_only: bool = False
    limits: Limits = field(default_factory=Limits)
    turns: Turns = field(default_factory=Turns)
    step_cost: LinearStepCost | RooflineStepCost = field(default_factory=LinearStepCost)
    runner: Runner = field(default_factory=NullRunner)
    tiers: TierModel = field(default_factory=TierModel)
    rules: tuple[KeepRule, ...] = (KEEP_ALL,)
    kv_keep: float | None = None
    with_bounds: bool = False
    sample_rate: float | None = None

    def __post_init__(self) -> None:
        known = policy_names()
        for name in self.policies:
            if name not in known:
                msg = f"There is no policy {name!r}."
                raise ConfigError(msg, remedy=f"There are {', '.join(known)}.")
        self._check_mode()
        self._check_turns()
        if self.kv_keep is not None:
            self._check_keep(self.kv_keep)
        if not 1 <= self.block_size <= MAX_TOKENS:
            raise _bad("block_size", self.block_size, f"at least 1 token and at most {MAX_TOKENS:,}")
        if any(size < self.block_size for size in self.cache_tokens):
            raise _bad("cache_tokens", min(self.cache_tokens), f"at least a block of {self.block_size} tokens")
        most = MAX_BLOCKS * self.block_size
        if any(size > most for size in self.cache_tokens):
            allowed = f"at most {most:,} tokens, {MAX_BLOCKS:,} blocks of {self.block_size}"
            raise _bad("cache_tokens", max(self.cache_tokens), allowed)
        if self.sample_rate is not None and not 0 < self.sample_rate <= 1:
            raise _bad("sample_rate", self.sample_rate, "above 0 and at most 1")
        if not 1 <= self.limits.max_num_seqs <= self.limits.max_num_batched_tokens:
            raise _bad("max_num_seqs", self.limits.max_num_seqs, "at least 1 and at most max_num_batched_tokens")

    def _check_mode(self) -> None:
        if BELADY in self.policies and not self.is_cache_only:
            msg = "Belady's rule knows which requests come, but not when."
            raise ConfigError(msg, remedy="Ask for it with --cache-only, or leave it out.")
        if self.tiers.host_tokens and self.is_cache_only:
            msg = "Tiers take time, and --cache-only has none."
            raise ConfigError(msg, remedy="Leave --cache-only out, or the tiers.")

    def _check_turns(self) -> None:
        if self.turns.admission not in ADMISSION_RULES:
            raise _bad("admission", repr(self.turns.admission), f"one of {', '.join(ADMISSION_RULES)}")
        if self.turns.scheduling_policy not in SCHEDULING_POLICIES:
            allowed = f"one of {', '.join(SCHEDULING_POLICIES)}"
            raise _bad("scheduling_policy", repr(self.turns.scheduling_policy), allowed)

    def _check_keep(self, share: float) -> None:
        if not 0 < share < 1:
            raise _bad("kv_keep", share, "above 0 and below 1; left out, all is kept")
        others = {
            "--cache-only": self.is_cache_only,
            "--bounds": self.with_bounds,
            "--curve": self.sample_rate is not None,
            "tiers": self.tiers.host_tokens,
        }
        beside = next((name for name, is_set in others.items() if is_set), None)
        if beside is not None:
            msg = f"kv_keep does not go with {beside}."
            raise ConfigError(msg, remedy="Leave one of them out.")

    def sizes(self) -> tuple[int, ...]:
        """Return the sizes to run, in whole blocks."""
        if self.cache_tokens:
            return tuple(dict.fromkeys(size // self.block_size * self.block_size for size in self.cache_tokens))
        size = self.block_size
        blocks = lru_curve(self.requests, block_size=size).num_blocks
        longest = max(request.prompt_tokens + request.output_tokens for request in self.requests)
        least = 1 if self.is_cache_only else -(-longest // size) + 1
        if self.kv_keep is not None:
            rules, num_new = packing_rules(self.rules, size), self.limits.max_num_batched_tokens
            needed = sum(rule.num_blocks_for(longest, num_new, size) for rule in rules)
            least = max(least, -(-needed // len(rules)) + 1)
        return tuple(sorted({max(least, blocks // share) * size for share in _SHARES}))


class Run(NamedTuple):
    """One policy at one size.

    Attributes:
        policy, cache_tokens: the policy, and the size of the cache.
        report: what happened.
    """

    policy: str
    cache_tokens: int
    report: Report | CacheOnlyReport

    @property
    def token_hit_ratio(self) -> float:
        """Share of the prompt tokens that were found, 0 to 1."""
        return self.report.hit_share if isinstance(self.report, Report) else self.report.token_hit_ratio


class Bounds(NamedTuple):
    """What no policy can beat, in token hit ratios; outputs are not counted as cached.

    Attributes:
        belady: at each size of the comparison.
        infinite: with a cache that never evicts.
    """

    belady: dict[int, float]
    infinite: float


class Curves(NamedTuple):
    """LRU at every size.

    Attributes:
        exact: by stack distances.
        sampled: by SHARDS.
        sizes: at which the error was taken.
        error: mean absolute error of the sampled curve, in token hit ratio.
    """

    exact: HitCurve
    sampled: HitCurve
    sizes: tuple[int, ...]
    error: float


class Comparison(NamedTuple):
    """The answer.

    Attributes:
        question: what was asked.
        runs: by policy, then by size.
        bounds: if asked for.
        curves: if asked for.
    """

    question: Question
    runs: tuple[Run, ...]
    bounds: Bounds | None
    curves: Curves | None


def policy_names() -> tuple[str, ...]:
    """Return the names that a comparison takes: what the server uses, its policies, and Belady's bound."""
    return tuple(dict.fromkeys(("default", *POLICIES, BELADY)))


def compare(question: Question, *, progress: Progress | None = None) -> Comparison:
    """Run every policy at every size.

    Raises:
        BudgetTooSmallError: a request can never fit into one of the sizes.
    """
    sizes = question.sizes()
    runs = tuple(_run(question, name, size, progress) for name in question.policies for size in sizes)
    bounds = curves = None
    if question.with_bounds or question.sample_rate is not None:
        exact = lru_curve(question.requests, block_size=question.block_size)
        if question.with_bounds:
            bounds = Bounds(_belady(question, runs, sizes, progress), exact.infinite)
        if question.sample_rate is not None:
            curves = _curves(question, exact, question.sample_rate)
    return Comparison(question, runs, bounds, curves)


def _run(question: Question, policy: str, cache_tokens: int, progress: Progress | None) -> Run:
    size = question.block_size
    what = f"{policy}, {cache_tokens:,} tokens"

    def told(num_done: int) -> None:
        if progress is not None:
            progress(what, num_done, len(question.requests))

    told(0)
    if question.is_cache_only:
        report: Report | CacheOnlyReport = replay_cache_only(
            question.requests, policy=policy, block_size=size, cache_tokens=cache_tokens, progress=told
        )
    else:
        rules, runner = question.rules, question.runner
        if question.kv_keep is not None:
            rules, runner = packing_rules(rules, size), KeepingRunner(runner, question.kv_keep, size)
        config = SimConfig(
            num_blocks=cache_tokens // size * len(rules),
            block_size=size,
            max_num_seqs=question.limits.max_num_seqs,
            max_num_batched_tokens=question.limits.max_num_batched_tokens,
            eviction_policy=policy,
            tiers=question.tiers,
            rules=rules,
            admission=question.turns.admission,
            scheduling_policy=question.turns.scheduling_policy,
        )
        timed = question.timed or question.requests
        report = simulate(timed, config, step_cost=question.step_cost, runner=runner, progress=told)
    return Run(policy, cache_tokens, report)


def _belady(
    question: Question, runs: Iterable[Run], sizes: tuple[int, ...], progress: Progress | None
) -> dict[int, float]:
    if question.is_cache_only:
        found = {run.cache_tokens: run.token_hit_ratio for run in runs if run.policy == BELADY}
    else:
        found = {}
    ratios: dict[int, float] = {}
    for size in sizes:
        if size not in found:
            if progress is not None:
                progress(f"{BELADY}, {size:,} tokens", 0, len(question.requests))
            report = replay_cache_only(
                question.requests, policy=BELADY, block_size=question.block_size, cache_tokens=size
            )
            found[size] = report.token_hit_ratio
        ratios[size] = found[size]
    return ratios


def _curves(question: Question, exact: HitCurve, rate: float) -> Curves:
    sampled = lru_curve(question.requests, block_size=question.block_size, rate=rate)
    largest = max(exact.largest, question.block_size)
    sizes = tuple(largest * place // _POINTS for place in range(1, _POINTS + 1))
    return Curves(exact, sampled, sizes, mean_error(sampled, exact, sizes))


def _bad(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name} is {value}.", remedy=f"It must be {allowed}.")
