"""Advice from a measurement: the measured requests, replayed on the real scheduler and cache with other settings.

What the bench wrote says how long prompts and outputs were, when they came, and which prompts begin alike. That is
enough to ask what another block size, budget or policy would have given.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pagefold.errors import ConfigError
from pagefold.kv.policies import DEFAULT_POLICY
from pagefold.memory.capacity import human_bytes
from pagefold.plan.trace import workload_of
from pagefold.sim import LinearStepCost, SimConfig, simulate
from pagefold.sim.traces import request_of

if TYPE_CHECKING:
    from pathlib import Path

    from pagefold.plan.plan import Plan
    from pagefold.plan.workload import Workload
    from pagefold.sim import Report
    from pagefold.sim.traces import TraceRequest

__all__ = ["Advice", "advise", "read_bench", "workload_of_bench"]

_LISTS = ("start_times", "input_lens", "output_lens", "hash_ids", "errors")
"""Fields of a measurement that have one entry for each request."""

_BLOCK_SIZES = (8, 16, 32, 64)
_BUDGETS = (0.5, 1.0, 2.0, 4.0)
_POLICIES = (DEFAULT_POLICY, "lru", "lfu", "s3-fifo")
"""The default, and those that differ most from it and each other: every one is a replay."""

_WORTH = 0.01
"""A share of the prompt tokens that is worth a change."""

_MAX_REQUESTS = 600
_DEFAULT_STEP_S = 0.02


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change, or to leave.

    Attributes:
        what: it is about: ``block size``, ``budget``, ``policy``, ``tiers``, ``codec``.
        advice: what to do.
        why: the figures behind it.
    """

    what: str
    advice: str
    why: str

    def figures(self) -> dict[str, str]:
        """Return the advice as words, by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Bench:
    requests: tuple[TraceRequest, ...]
    step_s: float


def read_bench(path: Path) -> dict[str, Any]:
    """Return what ``pagefold bench --result-filename`` wrote.

    Raises:
        ConfigError: the file is none of that.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"The measurement {path} cannot be read: {error.strerror}."
        raise ConfigError(message, remedy="Name a file that pagefold bench --result-filename wrote.") from None
    except (ValueError, RecursionError):
        loaded = None
    if not isinstance(loaded, dict) or any(not isinstance(loaded.get(name), list) for name in _LISTS):
        message = f"{path} is no measurement of pagefold bench: it lacks {', '.join(_LISTS)}."
        raise ConfigError(message, remedy="Name a file that pagefold bench --result-filename wrote.")
    if not any(not error for error in loaded["errors"]):
        message = f"No request of the measurement {path} succeeded."
        raise ConfigError(message, remedy="Measure again.")
    return loaded


def workload_of_bench(path: Path) -> Workload:
    """Return the workload that was measured: its lengths, and the beginning that most prompts share.

    Raises:
        ConfigError: the file is no measurement.
    """
    requests = _measured(path).requests
    return workload_of(requests, f"{path.name}: {len(requests):,} measured requests")


def _measured(path: Path) -> _Bench:
    bench = read_bench(path)
    try:
        requests = [
            request_of(start, prompt, output, ids, max(1, round(prompt / max(1, len(ids)))))
            for start, prompt, output, ids, error in zip(*(bench[name] for name in _LISTS), strict=True)
            if not error and prompt
        ]
        step_s = float(bench.get("median_itl_ms") or 0) / 1e3
    except (TypeError, ValueError, OverflowError) as error:
        message = f"The measurement {path} is damaged: {str(error)[:80]}."
        raise ConfigError(message, remedy="Measure again.") from None
    if not requests:
        message = f"The server of the measurement {path} counted no tokens of its prompts."
        raise ConfigError(message, remedy="Measure a server that answers with usage, or give --input-len.")
    return _Bench(tuple(requests), step_s if 0 < step_s < math.inf else _DEFAULT_STEP_S)


def advise(path: Path, plan: Plan) -> list[Advice]:
    """Return advice on block size, budget, policy, tiers and codec, for the device and model of ``plan``.

    Raises:
        ConfigError: the file is no measurement.
    """
    bench = _measured(path)
    fitting = [r for r in bench.requests if r.prompt_tokens + r.output_tokens <= plan.memory.max_model_len]
    requests = fitting[:_MAX_REQUESTS]
    if not requests:
        return []
    capacity = plan.memory.tightest.capacity
    replayer = _Replayer(requests, capacity.num_tokens, plan.memory.max_num_batched_tokens, bench.step_s)
    size = capacity.block_size
    now = replayer.run(size)
    return [
        _block_size(replayer, size),
        _budget(replayer, size, plan),
        _policy(replayer, size),
        _tiers(replayer, now, size, plan),
        _codec(now, plan),
    ]


class _Replayer:
    """Replays the measured requests with a pool of so many tokens; each setting once."""

    def __init__(
        self, requests: list[TraceRequest], num_tokens: int, max_num_batched_tokens: int, step_s: float
    ) -> None:
        self._requests = requests
        self._num_tokens = num_tokens
        self._batched = max_num_batched_tokens
        self._cost = LinearStepCost(step_s=step_s)
        self._done: dict[tuple[int, float, str], Report] = {}
        self.longest = max(request.prompt_tokens + request.output_tokens for request in requests)
        self.asked_tokens = sum(request.prompt_tokens + request.output_tokens for request in requests)

    def run(self, block_size: int, times: float = 1.0, policy: str = "default") -> Report:
        """Return what the requests would have met with that block size, so many times the budget, and that policy."""
        key = (block_size, times, policy)
        if key not in self._done:
            least = -(-self.longest // block_size) + 1
            config = SimConfig(
                num_blocks=max(least, int(self._num_tokens * times) // block_size),
                block_size=block_size,
                max_num_seqs=min(256, self._batched),
                max_num_batched_tokens=self._batched,
                eviction_policy=policy,
            )
            self._done[key] = simulate(self._requests, config, step_cost=self._cost)
        return self._done[key]

    def unlimited(self, block_size: int) -> Report:
        """Return what they would have met with a cache that never evicts."""
        return self.run(block_size, max(1.0, 2 * self.asked_tokens / self._num_tokens))


def _block_size(replayer: _Replayer, size: int) -> Advice:
    found = {each: replayer.run(each) for each in _BLOCK_SIZES}
    found.setdefault(size, replayer.run(size))
    # What a block size costs is waste, and what rounding takes from hits: both are shares of tokens.
    score = {each: report.hit_share - report.waste for each, report in found.items()}
    best = max(score, key=lambda each: (score[each], each))
    if score[best] < score[size] + 2 * _WORTH:
        best = size
    said = "; ".join(f"{each}: {r.hit_share:.1%} found, {r.waste:.1%} waste" for each, r in sorted(found.items()))
    return Advice("block size", f"--block-size {best}" + (" (as it is)" if best == size else ""), said)


def _budget(replayer: _Replayer, size: int, plan: Plan) -> Advice:
    found = {times: replayer.run(size, times) for times in _BUDGETS}
    budget = plan.memory.tightest.capacity.kv_budget_bytes
    said = "; ".join(
        f"{human_bytes(int(times * budget))}: {r.hit_share:.1%} found, {r.num_preemptions} preemptions"
        for times, r in found.items()
    )
    most = found[_BUDGETS[-1]]
    enough = next(
        times
        for times, report in found.items()
        if report.hit_share >= most.hit_share - _WORTH and report.num_preemptions <= most.num_preemptions
    )
    words = {0.5: "half of it would do", 1.0: "enough"}
    return Advice("budget", words.get(enough, f"{enough:g} x as much helps: {human_bytes(int(enough * budget))}"), said)


def _policy(replayer: _Replayer, size: int) -> Advice:
    found = {name: replayer.run(size, policy=name) for name in _POLICIES}
    now = DEFAULT_POLICY
    best = max(found, key=lambda name: (round(found[name].hit_share, 3), name == now))
    if found[best].hit_share < found[now].hit_share + _WORTH:
        best = now
    said = "; ".join(f"{name}: {report.hit_share:.1%} found" for name, report in found.items())
    return Advice("policy", f"--eviction-policy {best}", said)


def _tiers(replayer: _Replayer, now: Report, size: int, plan: Plan) -> Advice:
    unlimited = replayer.unlimited(size)
    more = unlimited.hit_share - now.hit_share
    said = f"{now.hit_share:.1%} found now, {unlimited.hit_share:.1%} if nothing were evicted"
    if more < _WORTH:
        return Advice("tiers", "none: there is nothing more to find", said)
    needed = human_bytes(replayer.asked_tokens * plan.memory.layout.bytes_per_token)
    if plan.break_even is not None:
        said += f"; loading beats computing from {plan.break_even / 1e9:,.2f} GB/s"
    return Advice("tiers", f"RAM or disk for up to {needed}", said)


def _codec(now: Report, plan: Plan) -> Advice:
    said = f"peak use {now.peak_use:.0%}, {now.num_preemptions} preemptions"
    if now.num_preemptions == 0 and now.peak_use < 1 - _WORTH:
        return Advice("codec", f"{plan.memory.codec.name}, as it is: memory is not short", said)
    smaller = next((each for each in plan.techniques if each.name.startswith("KV in ")), None)
    if smaller is None:
        return Advice("codec", f"{plan.memory.codec.name}, as it is: there is none smaller", said)
    return Advice("codec", smaller.flags, f"{said}; {smaller.gain:.2f} x the requests; quality: {smaller.quality_cost}")
