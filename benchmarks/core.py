"""What the core costs: nanoseconds a token of looking up, publishing, evicting and releasing 4k prompts.

Workload: prompts of 4,096 random tokens in blocks of 16 (256 blocks), packed beforehand; LRU; ``pagefold.kv`` alone, on
one thread. Process CPU time, since the machine may be shared; 5 interleaved repeats of 40 rounds, medians; the garbage
collector is off while a row runs, as in ``timeit``.

* floor: the limit that Python sets: one loop that slices each block's key out of the packed prompt and looks it up in a
  dict that holds them all. No tree, no pins, no counts. The other rows are given as multiples of it, too.
* match + acquire: the whole prompt is cached and held by nobody.
* release: of that table, all of whose blocks become cached.
* insert: promise and commit of a prompt that nobody knows, in blocks that are allocated already.
* miss with eviction: all that a new prompt does in a pool full of cached ones: match, acquire, extend (which evicts
  256 blocks), promise, commit, release.
* eviction: one block of ``reclaim`` in a pool of 100,000 cached blocks: choose the victim, take it out of the tree and
  the policy, offer its parent, free the block. Nanoseconds a block, not a token.

Limits of these figures: packing tokens into bytes is not in them (a request does it once), nor is the scheduler. Random
prompts share no prefix, so the tree is deep and narrow; a wide one costs the same a block, since children are found by
hash, but a partial match looks at up to 32 siblings, and none is timed here. All is warm; with 100,000 blocks it does
not fit into the CPU's cache any more, with the others it may.

    python benchmarks/core.py [--json FILE]
"""

from __future__ import annotations

import gc
import statistics
from array import array
from random import Random
from time import process_time_ns
from typing import TYPE_CHECKING, NamedTuple

from report import Row, machine, parser, print_report

from pagefold.kv import KVCore, SequenceCache, audit

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_TOKENS = 4096
BLOCK_SIZE = 16
NUM_BLOCKS = NUM_TOKENS // BLOCK_SIZE
STRIDE = BLOCK_SIZE * 4
NUM_REPEATS = 5
NUM_ROUNDS = 40
NUM_MANY_BLOCKS = 100_000
NAMESPACE = b"benchmark"


class Case(NamedTuple):
    """One thing that is measured.

    Attributes:
        what: in the table.
        sample: runs one repeat and returns nanoseconds a unit.
        unit: a token or a block.
        asked_ns: at most so many, or None where nothing was asked.
    """

    what: str
    sample: Callable[[], float]
    unit: str = "token"
    asked_ns: int | None = None


class Prompts:
    """Fresh packed prompts without end; the same ones in every run."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def __call__(self) -> bytes:
        """Return a prompt that was not there before."""
        return array("i", (self._random.randrange(50_000) for _ in range(NUM_TOKENS))).tobytes()


def admit(core: KVCore, prompt: bytes) -> SequenceCache:
    """Make a table with room for all of ``prompt``."""
    cache, start = core.acquire(core.match(NAMESPACE, prompt, NUM_TOKENS))
    assert core.extend(cache, start, NUM_TOKENS)
    return cache


def insert(core: KVCore, cache: SequenceCache, prompt: bytes) -> None:
    """Publish it."""
    promise = core.publishing.promise(cache, prompt, NUM_TOKENS)
    assert promise is not None
    core.publishing.commit(promise)


def fill(core: KVCore, prompts: Prompts) -> None:
    """Cache prompts until no more fit without evicting."""
    while core.pool.num_free >= NUM_BLOCKS:
        prompt = prompts()
        cache = admit(core, prompt)
        insert(core, cache, prompt)
        core.release(cache)


def floor() -> Case:
    """Look up every key of a prompt in one dict."""
    prompt = Prompts(0)()
    known = {prompt[offset : offset + STRIDE]: offset for offset in range(0, len(prompt), STRIDE)}

    def sample() -> float:
        spent = 0
        for _ in range(NUM_ROUNDS):
            begin = process_time_ns()
            get = known.get
            for offset in range(0, len(prompt), STRIDE):
                if get(prompt[offset : offset + STRIDE]) is None:
                    break
            spent += process_time_ns() - begin
        return spent / NUM_ROUNDS / NUM_TOKENS

    return Case("floor: slice and look up in a dict", sample)


def match_and_acquire(*, timed: str) -> Case:
    """Hit a whole prompt and let go of it; one of the two is timed."""
    core = KVCore(4 * NUM_BLOCKS, block_size=BLOCK_SIZE)
    prompts = Prompts(1)
    prompt = prompts()
    cache = admit(core, prompt)
    insert(core, cache, prompt)
    core.release(cache)
    fill(core, prompts)

    def sample() -> float:
        hitting = releasing = 0
        for _ in range(NUM_ROUNDS):
            begin = process_time_ns()
            cache, num_tokens = core.acquire(core.match(NAMESPACE, prompt, NUM_TOKENS))
            middle = process_time_ns()
            core.release(cache)
            end = process_time_ns()
            assert num_tokens == NUM_TOKENS
            hitting += middle - begin
            releasing += end - middle
        return (hitting if timed == "hit" else releasing) / NUM_ROUNDS / NUM_TOKENS

    return Case("match + acquire, hit", sample, asked_ns=100) if timed == "hit" else Case("release", sample)


def insert_miss() -> Case:
    """Publish prompts that nobody knows; memory is plenty."""
    core = KVCore(NUM_ROUNDS * NUM_BLOCKS, block_size=BLOCK_SIZE)
    prompts = Prompts(2)

    def sample() -> float:
        spent = 0
        for prompt in [prompts() for _ in range(NUM_ROUNDS)]:
            cache = admit(core, prompt)
            begin = process_time_ns()
            insert(core, cache, prompt)
            spent += process_time_ns() - begin
            core.release(cache)
        assert core.pool.num_cached == NUM_ROUNDS * NUM_BLOCKS
        core.forgetting.reset()
        return spent / NUM_ROUNDS / NUM_TOKENS

    return Case("insert (promise + commit), miss", sample, asked_ns=200)


def miss_with_eviction() -> Case:
    """Serve new prompts, each of which evicts an old one."""
    core = KVCore(16 * NUM_BLOCKS, block_size=BLOCK_SIZE)
    prompts = Prompts(3)
    fill(core, prompts)

    def sample() -> float:
        spent = 0
        for prompt in [prompts() for _ in range(NUM_ROUNDS)]:
            begin = process_time_ns()
            cache = admit(core, prompt)
            insert(core, cache, prompt)
            core.release(cache)
            spent += process_time_ns() - begin
        assert core.pool.num_free == 0
        return spent / NUM_ROUNDS / NUM_TOKENS

    return Case("miss with eviction, all of it", sample)


def eviction_of_many() -> Case:
    """Evict block by block from a pool of 100,000 that are cached."""
    core = KVCore(NUM_MANY_BLOCKS, block_size=BLOCK_SIZE)
    prompts = Prompts(4)
    fill(core, prompts)
    assert core.pool.num_cached > NUM_MANY_BLOCKS - NUM_BLOCKS

    def sample() -> float:
        spent = 0
        for _ in range(NUM_ROUNDS):
            begin = process_time_ns()
            num_evicted = core.blocks.reclaim(NUM_BLOCKS)
            spent += process_time_ns() - begin
            assert num_evicted == NUM_BLOCKS
            fill(core, prompts)
        return spent / NUM_ROUNDS / NUM_BLOCKS

    audit(core)
    return Case(f"eviction of one of {NUM_MANY_BLOCKS:,} blocks", sample, unit="block")


def measure(cases: list[Case]) -> dict[str, list[float]]:
    """Take all samples, case by case, repeat by repeat."""
    samples: dict[str, list[float]] = {case.what: [] for case in cases}
    for repeat in range(NUM_REPEATS + 1):
        for case in cases:
            gc.collect()
            gc.disable()
            nanoseconds = case.sample()
            gc.enable()
            if repeat:  # the first is the warm-up
                samples[case.what].append(nanoseconds)
    return samples


def main() -> None:
    """Measure, print, write."""
    args = parser(__doc__).parse_args()
    cases = [
        floor(),
        match_and_acquire(timed="hit"),
        match_and_acquire(timed="release"),
        insert_miss(),
        miss_with_eviction(),
        eviction_of_many(),
    ]
    samples = measure(cases)
    floor_ns = statistics.median(samples[cases[0].what])
    rows: list[Row] = []
    for case in cases:
        got = statistics.median(samples[case.what])
        multiple = got / floor_ns if case.unit == "token" else got / (floor_ns * BLOCK_SIZE)
        rows.append(
            Row(
                case.what,
                asked="" if case.asked_ns is None else f"<= {case.asked_ns} ns/{case.unit}",
                got=f"{got:.1f} ns/{case.unit} ({multiple:.1f} x)",
                ok=None if case.asked_ns is None else got <= case.asked_ns,
                values={f"ns/{case.unit}": samples[case.what], "multiple_of_floor": multiple},
            )
        )
    print_report("core", rows, machine(), args.json)


if __name__ == "__main__":
    main()
