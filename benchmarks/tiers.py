"""Tiers: what coming back from the host's memory or from a disk costs, beside computing anew and beside plain copies.

Rows, all of SmolLM2-135M-Instruct in float32 on this machine:

* restore: blocks from the arena into the slab, checked, over the same bytes copied by numpy, paired;
* returning conversation: time to the first token of 4,000 tokens that were evicted, over the same computed cold;
* hit over miss: the same for prompts of 16 to 4,000 tokens, the worst of the medians;
* no reuse: CPU time of a process over prompts that never come back, tier on over off, in ABBA pairs;
* returning conversations: 16 of 768 tokens, 4 rounds of 48 in and 32 out, a KV budget of 4,608 tokens: output tokens a
  second of rounds 2 to 4, tier on over off; and beside it the most that a tier can give, which is memory for all of
  them on the device, as many at once as the budget lets run;
* from a disk: the first three of these again, with blocks that neither the device nor the host's memory has; and with a
  disk that stalls: every read takes 10 s, and nobody has said so;
* streaming: a request of 7,900 tokens and 64 out in a KV budget of 2,000 tokens, over the same with memory for it.

What a disk gives is measured by ``disk_store.py``.

    python benchmarks/tiers.py [--repeats 5] [--disk FOLDER] [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from report import Row, machine, parser, print_report
from rich.console import Console
from rich.progress import track

from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.kv import BlockId, HostOps, LoadOp, StoreOp
from pagefold.sampling import SamplingParams
from pagefold.store import HostArena

if TYPE_CHECKING:
    from pagefold.engine.engine import Engine

MODEL = "smollm2-135m"
VOCAB_SIZE = 49_000
BLOCK_BYTES = 737_280  # of SmolLM2: 16 tokens, 30 layers, 3 KV heads, K and V of 64 float32 each
NUM_COPIED = 128
LONG = 4_000
LENGTHS = (16, 64, 256, 1_024, LONG)
_DISK_GIB, _STALL_S = 6.0, 10.0
STREAMED, STREAMED_BUDGET = 7_964, 2_000
CONVERSATIONS, TURNS, FIRST, IN, OUT, BUDGET = 16, 4, 768, 48, 32, 4_608
LAST = FIRST + TURNS * (IN + OUT)  # tokens of a conversation in its last round


class Rates(NamedTuple):
    """Output tokens a second: without a tier, with it, and with memory for all."""

    off: float
    on: float
    most: float


def make_engine(
    kv_tokens: int, host_tokens: int, disk: Path | None = None, *, streams: bool = False, max_num_seqs: int = 128
) -> Engine:
    """Return an engine with room for so many tokens on the device and on the host, and perhaps a disk."""
    config = EngineConfig(
        model=MODEL,
        dtype="float32",
        kv_cache_memory_bytes=kv_tokens // 16 * BLOCK_BYTES,
        kv_offloading_size=host_tokens // 16 * BLOCK_BYTES / 2**30,
        max_model_len=min(8_192, kv_tokens + (host_tokens - kv_tokens // 2 if streams else 0)),
        max_num_seqs=max_num_seqs,
        allow_streaming=streams,
        kv_disk_path=None if disk is None else str(disk),
        kv_disk_size=_DISK_GIB,
    )
    return build_engine(plan_engine(config), say=lambda _: None)


def run(engine: Engine, prompts: list[list[int]], num_outputs: int) -> list[list[int]]:
    """Send prompts together and return their outputs."""
    how = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, how)
    outputs: dict[str, list[int]] = {}
    while engine.has_requests:
        if not engine.has_work:
            engine.wait()
        for delta in engine.step():
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
    return [outputs[str(index)] for index in range(len(prompts))]


def restore_ratio(repeats: int) -> float:
    """Return the speed of restoring blocks over that of copying them: the median of pairs."""
    arena = HostArena(NUM_COPIED, BLOCK_BYTES)
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (NUM_COPIED, BLOCK_BYTES), np.uint8)
    order = rng.permutation(NUM_COPIED)
    arena.carry_out(HostOps([StoreOp(BlockId(i), i) for i in range(NUM_COPIED)], []), blocks)
    loads = HostOps([], [LoadOp(int(host_id), BlockId(i)) for i, host_id in enumerate(order)])

    def copy() -> None:
        for i, host_id in enumerate(order):
            np.copyto(blocks[i], arena.blocks[host_id])

    copy()
    ratios = []
    for _ in range(10 * repeats):
        copied, restored = seconds(copy), seconds(lambda: arena.carry_out(loads, blocks))
        ratios.append(copied / restored)
    return statistics.median(ratios)


def seconds(what: object) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    what()  # type: ignore[operator]
    return time.perf_counter() - begin


def hit_over_miss(repeats: int) -> dict[int, float]:
    """Return, by length, the time to the first token of what comes back from the host over that of what is new."""
    engine = make_engine(LONG + 512, 16 * LONG)
    rng = random.Random(1)
    ratios: dict[int, float] = {}
    for length in track(LENGTHS, "returning", console=Console(stderr=True), transient=True):
        pairs = []
        for _ in range(max(3, repeats if length == LONG else 4 * repeats)):
            prompt = random_tokens(rng, length)
            miss = seconds(lambda prompt=prompt: run(engine, [prompt], 1))
            evict(engine)
            hit = seconds(lambda prompt=prompt: run(engine, [prompt], 1))
            pairs.append(hit / miss)
            evict(engine)
        ratios[length] = statistics.median(pairs)
    return ratios


def evict(engine: Engine) -> None:
    """Empty the device's cache; a step of something else carries it to the host."""
    engine.scheduler.core.blocks.reclaim(2**20)
    run(engine, [[0]], 1)


def from_disk(repeats: int, folder: Path, *, stalls: bool = False) -> dict[int, float]:
    """Return, by length, the time to the first token of what a disk alone has, over that of what is new."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        engine = make_engine(LONG + 512, 2 * LONG, Path(made))
        assert engine.tiering is not None, "the disk is slower than computing"
        (store,) = engine.tiering.transfer.stores
        read = store.get
        rng = random.Random(4)
        ratios: dict[int, float] = {}
        run(engine, [random_tokens(rng, LONG)], 1)
        for length in track(LENGTHS, "from disk", console=Console(stderr=True), transient=True):
            pairs = []
            for _ in range(3 if stalls else max(3, repeats if length == LONG else 4 * repeats)):
                prompt = random_tokens(rng, length)
                miss = seconds(lambda prompt=prompt: run(engine, [prompt], 1))
                to_disk(engine)
                if stalls:
                    store.get = lambda gets: time.sleep(_STALL_S) or read(gets)
                hit = seconds(lambda prompt=prompt: run(engine, [prompt], 1))
                store.get = read
                while not engine.scheduler.core.slow.is_quiet:
                    engine.wait()
                pairs.append(hit / miss)
                to_disk(engine)
            ratios[length] = statistics.median(pairs)
        engine.close()
    return ratios


def to_disk(engine: Engine) -> None:
    """Empty the device's cache and the host's, once the disk has what was in them."""
    evict(engine)
    core, tiering = engine.scheduler.core, engine.tiering
    while core.host.blocks.unsaved or not core.slow.is_quiet:
        tiering.transfer.write(core.slow.writes.take(is_flush=True))
        tiering.wait(0.1)
    core.blocks.reclaim(2**20)
    core.moves.host_done(core.moves.take_host_ops())
    core.host.reset()


def random_tokens(rng: random.Random, num: int) -> list[int]:
    """Return so many tokens."""
    return [rng.randrange(VOCAB_SIZE) for _ in range(num)]


def no_reuse_ratio(repeats: int) -> float:
    """Return the CPU time of new prompts with a tier over that without: medians of ABBA pairs."""
    rng = random.Random(2)
    engines = {"off": make_engine(2_048, 0), "on": make_engine(2_048, 16_384)}
    for engine in engines.values():
        run(engine, [random_tokens(rng, 1_500)], 8)

    def cpu_s(name: str) -> float:
        begin = time.process_time()
        for _ in range(3):
            run(engines[name], [random_tokens(rng, 600) for _ in range(3)], 16)
        return time.process_time() - begin

    ratios = []
    for _ in track(range(repeats), "no reuse", console=Console(stderr=True), transient=True):
        spent: dict[str, float] = {"on": 0.0, "off": 0.0}
        for name in ("off", "on", "on", "off"):
            spent[name] += cpu_s(name)
        ratios.append(spent["on"] / spent["off"])
    return statistics.median(ratios)


def returning_rate(engine: Engine) -> float:
    """Return output tokens a second of conversations that return, from their second round on."""
    rng = random.Random(3)
    said = [random_tokens(rng, FIRST) for _ in range(CONVERSATIONS)]
    taken = 0.0
    for turn in range(TURNS):
        said = [so_far + random_tokens(rng, IN) for so_far in said]
        begin = time.perf_counter()
        answers = run(engine, said, OUT)
        if turn:
            taken += time.perf_counter() - begin
        said = [so_far + answer for so_far, answer in zip(said, answers, strict=True)]
    return (TURNS - 1) * CONVERSATIONS * OUT / taken


def streaming_ratio(repeats: int) -> float:
    """Return the time of a request four times as large as the budget over that with memory for it: median of pairs."""
    rng = random.Random(7)
    streaming, plain = make_engine(STREAMED_BUDGET, 8_192, streams=True), make_engine(8_192, 0)
    ratios: list[float] = []
    for _ in range(repeats):
        prompt = random_tokens(rng, STREAMED - 64)
        took: list[float] = []
        outputs: list[list[list[int]]] = []
        for engine in (streaming, plain):
            began = time.perf_counter()
            outputs.append(run(engine, [prompt], 64))
            took.append(time.perf_counter() - began)
        assert outputs[0] == outputs[1], "streaming has changed the output"
        ratios.append(took[0] / took[1])
    return statistics.median(ratios)


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), metavar="FOLDER")
    args = arguments.parse_args()
    where = machine()
    restored = restore_ratio(args.repeats)
    ratios = hit_over_miss(args.repeats)
    worst = max(ratios, key=lambda length: ratios[length])
    disk = from_disk(args.repeats, args.disk)
    worst_disk = max(disk, key=lambda length: disk[length])
    stalled = from_disk(args.repeats, args.disk, stalls=True)
    worst_stalled = max(stalled, key=lambda length: stalled[length])
    no_reuse = no_reuse_ratio(args.repeats)
    rates = [
        Rates(
            off=returning_rate(make_engine(BUDGET, 0)),
            on=returning_rate(make_engine(BUDGET, 32_768)),
            most=returning_rate(make_engine(32_768, 0, max_num_seqs=BUDGET // LAST)),
        )
        for _ in range(max(1, args.repeats // 2))
    ]
    gain = statistics.median(rate.on / rate.off for rate in rates)
    most = statistics.median(rate.most / rate.off for rate in rates)
    streamed = streaming_ratio(args.repeats)
    rows = [
        Row("restore from RAM, of a plain copy's speed", ">= 0.8", f"{restored:.2f}", restored >= 0.8),
        Row(f"first token of {LONG:,} returning, of cold", "<= 3%", f"{ratios[LONG]:.1%}", ratios[LONG] <= 0.03),
        Row(
            f"hit time over miss time, worst length ({worst})",
            "<= 1.05",
            f"{ratios[worst]:.2f}",
            ratios[worst] <= 1.05,
            {"by_length": ratios},
        ),
        Row(f"the same from disk: first token of {LONG:,}", "<= 5%", f"{disk[LONG]:.1%}", disk[LONG] <= 0.05),
        Row(
            f"from disk: hit over miss, worst length ({worst_disk})",
            "<= 1.05",
            f"{disk[worst_disk]:.2f}",
            disk[worst_disk] <= 1.05,
            {"by_length": disk},
        ),
        Row(
            f"from a disk that stalls: hit over miss, worst length ({worst_stalled})",
            "<= 1.25",
            f"{stalled[worst_stalled]:.2f}",
            stalled[worst_stalled] <= 1.25,
            {"by_length": stalled},
        ),
        Row("no reuse: CPU a token, tier on over off", "<= 1.03 x", f"{no_reuse:.3f} x", no_reuse <= 1.03),
        Row(
            "returning conversations: output tokens/s over tier off",
            ">= 4 x",
            f"{gain:.1f} x ({rates[0].off:.0f} to {rates[0].on:.0f})",
            gain >= 4,
            {"rates": [rate._asdict() for rate in rates]},
        ),
        Row(
            f"the same with memory for all, {BUDGET // LAST} at once: the most that a tier can give",
            "",
            f"{most:.1f} x",
        ),
        Row(
            f"a request of {STREAMED:,} tokens in a budget of {STREAMED_BUDGET:,}: time over memory for it",
            "",
            f"{streamed:.2f} x",
        ),
    ]
    print_report("tiers", rows, where, args.json)


if __name__ == "__main__":
    main()
