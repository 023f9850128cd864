"""Tokens computed for a prompt that leaves a cached one inside a block.

Workload: a first prompt of 128 tokens (8 blocks of 16) is computed and cached. Then, alone, a second prompt of 128
tokens that agrees with it up to its first difference, once for each offset of that difference in the seventh block,
each time with a first prompt and a namespace of its own, so that no pair helps another. Counted from the events.
By default the real scheduler and core with a null runner; with ``--model`` the real engine and that model, whose output
for the second prompt must be what it is without a cache.

Asked, at every offset: at most the tokens behind the first one that differs, plus one. Beside it the twin that reuses
whole blocks only, in the same run: the same core whose matches leave out the part of a block.

    python benchmarks/partial_block.py [--model smollm2-135m] [--json FILE]
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from report import Row, machine, parser, print_report

from pagefold.kv import KVCore, PrefixHit
from pagefold.request import Caller, Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim import NullRunner, Tally

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.engine.engine import Engine

BLOCK_SIZE = 16
NUM_TOKENS = 128
COMMON_BLOCKS = 6
NUM_OUTPUT = 8
SAMPLING = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)


@dataclass(frozen=True)
class Pair:
    """Two prompts that agree on their first ``num_common`` tokens and on no later one."""

    name: str
    first: list[int]
    second: list[int]
    num_common: int

    @property
    def num_behind(self) -> int:
        """How many tokens come behind the first one that differs."""
        return NUM_TOKENS - self.num_common - 1


class System(Protocol):
    """What serves prompts."""

    def serve(self, name: str, prompt: list[int]) -> list[int]:
        """Serve ``prompt`` to its end under the salt ``name``; return its output."""

    def num_computed(self) -> int:
        """How many prompt tokens were computed so far."""


def pairs(vocab_size: int) -> list[Pair]:
    """Return a pair for each offset in a block."""
    rng = random.Random(0)
    made: list[Pair] = []
    for offset in range(BLOCK_SIZE):
        num_common = COMMON_BLOCKS * BLOCK_SIZE + offset
        first = [rng.randrange(vocab_size) for _ in range(NUM_TOKENS)]
        rest = [(token + 1 + rng.randrange(vocab_size - 1)) % vocab_size for token in first[num_common:]]
        made.append(Pair(f"offset-{offset}", first, first[:num_common] + rest, num_common))
    return made


def whole_blocks_only(core: KVCore) -> None:
    """Make ``core`` the twin: it finds whole blocks, and nothing inside of one."""
    match: Callable[[bytes, bytes, int], PrefixHit] = core.match

    def match_whole(namespace: bytes, packed: bytes, max_tokens: int) -> PrefixHit:
        return match(namespace, packed, max_tokens)._replace(partial=None, num_partial_tokens=0)

    core.match = match_whole  # type: ignore[method-assign]


class WithNullRunner:
    """The real scheduler and core."""

    def __init__(self, *, is_twin: bool) -> None:
        self._tally = Tally()
        core = KVCore(4096, block_size=BLOCK_SIZE, emit=self._tally)
        if is_twin:
            whole_blocks_only(core)
        self._scheduler = Scheduler(core, SchedulerLimits(1, 512), emit=self._tally)
        self._runner = NullRunner()

    def serve(self, name: str, prompt: list[int]) -> list[int]:
        """See System."""
        stop = StopRule(frozenset(), len(prompt) + NUM_OUTPUT)
        request = Request(name, prompt, SAMPLING, stop=stop, namespace=name.encode())
        self._scheduler.add(request)
        while self._scheduler.has_work:
            self._scheduler.apply(self._runner.run(self._scheduler.schedule(0.0)))
        return request.output_token_ids

    def num_computed(self) -> int:
        """See System."""
        return self._tally.report().num_computed_tokens


class WithEngine:
    """The real engine and a model."""

    def __init__(self, engine: Engine, tally: Tally, *, is_twin: bool) -> None:
        self._engine, self._tally = engine, tally
        if is_twin:
            whole_blocks_only(engine.scheduler.core)

    def serve(self, name: str, prompt: list[int]) -> list[int]:
        """See System."""
        self._engine.add(name, prompt, SAMPLING, Caller(cache_salt=name))
        output: list[int] = []
        while self._engine.has_work:
            for delta in self._engine.step():
                output += delta.token_ids
        return output

    def num_computed(self) -> int:
        """See System."""
        return self._tally.report().num_computed_tokens


def measure(system: System, work: list[Pair]) -> tuple[list[int], list[list[int]]]:
    """Return how many prompt tokens each second prompt cost, and its output."""
    costs: list[int] = []
    outputs: list[list[int]] = []
    for pair in work:
        system.serve(pair.name, pair.first)
        before = system.num_computed()
        outputs.append(system.serve(pair.name, pair.second))
        costs.append(system.num_computed() - before)
    return costs, outputs


def systems(model: str | None) -> tuple[int, System, System]:
    """Return the size of the vocabulary, what is measured, and its twin."""
    if model is None:
        return 49_152, WithNullRunner(is_twin=False), WithNullRunner(is_twin=True)
    from pagefold.config import EngineConfig
    from pagefold.engine.build import build_engine
    from pagefold.engine.planning import plan_engine

    made: list[System] = []
    vocab_size = 0
    for is_twin in (False, True):
        tally = Tally()
        config = EngineConfig(
            model=model, dtype="float32", max_model_len=512, block_size=BLOCK_SIZE, kv_cache_memory_bytes=600 * 2**20
        )
        engine = build_engine(plan_engine(config), emit=tally)
        vocab_size = engine.limits.vocab_size
        made.append(WithEngine(engine, tally, is_twin=is_twin))
    return vocab_size, made[0], made[1]


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", help="use the real engine with this model")
    args = arguments.parse_args()
    vocab_size, system, twin = systems(args.model)
    work = pairs(vocab_size)
    costs, outputs = measure(system, work)
    twin_costs, twin_outputs = measure(twin, work)
    cold = [system.serve(f"cold-{pair.name}", pair.second) for pair in work] if args.model else outputs
    num_equal = sum(a == b == c for a, b, c in zip(outputs, twin_outputs, cold, strict=True))
    rows = [
        Row(
            f"first difference at slot {offset} of a block",
            asked=f"<= {pair.num_behind} + 1",
            got=f"{cost} (whole blocks only: {twin_cost})",
            ok=cost <= pair.num_behind + 1,
            values={"computed": cost, "twin": twin_cost, "behind": pair.num_behind},
        )
        for offset, (pair, cost, twin_cost) in enumerate(zip(work, costs, twin_costs, strict=True))
    ]
    ideal = sum(pair.num_behind for pair in work)
    rows.append(
        Row(
            f"all {len(work)} offsets",
            asked=f"<= {ideal:,} + {len(work)}",
            got=f"{sum(costs):,} (whole blocks only: {sum(twin_costs):,})",
            ok=sum(costs) <= ideal + len(work),
            values={"computed": sum(costs), "twin": sum(twin_costs), "ideal": ideal},
        )
    )
    if args.model:
        rows.append(
            Row("outputs equal to those without a cache", f"{len(work)}", f"{num_equal}", ok=num_equal == len(work))
        )
    runner = f"engine, {args.model}" if args.model else "null runner"
    print_report("partial block", rows, {"with": runner} | machine(), args.json)


if __name__ == "__main__":
    main()
