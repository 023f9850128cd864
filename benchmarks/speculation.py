"""Drafts: that they change no output, what they bring, and what they cost.

SmolLM2-135M-Instruct, the whole engine in this process, one engine for all: a request's ``num_speculative_tokens`` of 0
is off, and what it is compared with is the same request with drafts, under another salt, so that neither finds what the
other has cached. Passages come from public speeches and a novel (``make texts``), and none is used twice.

* exactness: outputs of 32 tokens that differ, on against off: greedy and seeded, in batches of 1 to 32, every second
  one of 32; a quarter each with ``tree``, with ``ngram``, with ``draft_model`` (the model's own weights in int8, made
  to draft whatever it costs), and with a drafter that mixes what is right with lies.
* one request at a time, tokens a second behind the first token, on over off: edits (a passage is written again),
  quotes (an answer repeats a part of a passage), chats (a turn whose earlier turns are cached) and prose (a passage
  goes on). Outputs that loop, with a period of 32 tokens or less, are left out: they are drafted too well. Every second
  one of edits and chats is sampled, with a seed; quotes are greedy, since a model of this size leaves a quote after a
  few words otherwise, and prose is sampled, since greedily it loops. Beside it stands what there would be if drafts
  cost nothing: output tokens over the steps that they took then.
* 8 and 32 running, a third each of edits, chats and prose: four times as many requests, so many of them at once, until
  fewer run. Two engines, with drafts and without, take turns step by step, each in its own time: a machine that is
  slower for a while is so for both.
* what drafting takes of a step's time, the index included, in all of the above; and the index's bytes a token.

    python benchmarks/speculation.py [--dtype float32] [--num-exact 10000] [--num-prompts 12] [--json FILE]

The test of exactness takes hours on slow processors. With ``--seed 0`` to ``3`` and ``--num-exact 2500`` it runs in
four parts, of which each has prompts of its own.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from report import Row, machine, parser, print_report
from rich.console import Console
from rich.progress import track

from pagefold.config import EngineConfig, cache_dir
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.events import DraftsVerified
from pagefold.quality.texts import fetch_default_texts
from pagefold.request import Caller
from pagefold.sampling import SamplingParams
from pagefold.speculation import SpeculativeParams, StepCosts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagefold.engine.engine import Engine
    from pagefold.events import Event

MODEL, VOCAB_SIZE = "smollm2-135m", 49_152
OFF = SpeculativeParams(num_speculative_tokens=0)
TREE, NGRAM = SpeculativeParams(method="tree"), SpeculativeParams(method="ngram")
BY_MODEL = SpeculativeParams(method="draft_model", num_speculative_tokens=4)
WITH_MODEL = SpeculativeParams(method="tree", model=MODEL, quantization="int8")
NUM_EXACT_OUT, NUM_OUT = 32, 96
GREEDY, SEEDED = ("quotes",), ("prose",)
ROUNDS = 4
"""How many requests there are for each that runs at once."""
BATCHES = (1, 32, 2, 32, 4, 32, 8, 32, 16, 32)
LONGEST_PERIOD = 32
ASKED = {"edits": 2.0, "quotes": 2.0, "chats": 1.2, "prose": 1.2}
ASKED_AT_ONCE = {8: 1.1, 32: 0.98}
SHARE, BYTES = 0.02, 24.0


class Passages:
    """Passages of the texts, none twice."""

    def __init__(self, seed: int) -> None:
        words = [text.content.split() for text in fetch_default_texts(cache_dir())]
        self._words = [word for of_text in words for word in of_text]
        self.seed = seed
        self._at = seed * (len(self._words) // 4) % (len(self._words) - 1000)

    def take(self, num_words: int) -> str:
        """Return the next so many words; an odd number of them lies between two passages."""
        begin = self._at
        self._at = (begin + num_words + 7) % (len(self._words) - 1000)
        return " ".join(self._words[begin : begin + num_words])


@dataclass
class Clock:
    """Time that drafting took, and that steps took which had it.

    Attributes:
        drafting_s: of drafting, the index included.
        step_s: of all steps.
        num_drafts, num_accepted: drafts, and those that were right.
    """

    drafting_s: float = 0.0
    step_s: float = 0.0
    num_drafts: int = 0
    num_accepted: int = 0

    def emit(self, event: Event) -> None:
        """Count an event."""
        if isinstance(event, DraftsVerified):
            self.num_drafts += sum(num_drafts for _, num_drafts, _ in event.counts)
            self.num_accepted += sum(num_accepted or 0 for *_, num_accepted in event.counts)

    def watch(self, engine: Engine) -> None:
        """Measure what the engine's drafting takes from now on."""
        drafting, watcher = engine.drafting, engine.scheduler.core.tree.watcher
        prepare, insert = drafting.prepare, watcher.on_insert

        def timed_prepare() -> None:
            begin = time.perf_counter()
            prepare()
            self.drafting_s += time.perf_counter() - begin

        def timed_insert(node: object) -> None:
            begin = time.perf_counter()
            insert(node)  # type: ignore[arg-type]
            self.drafting_s += time.perf_counter() - begin

        drafting.prepare = timed_prepare  # type: ignore[method-assign]
        watcher.on_insert = timed_insert  # type: ignore[method-assign]


@dataclass
class Ran:
    """What became of a request.

    Attributes:
        token_ids: its output.
        num_steps: that brought tokens of it.
        seconds: from its first token to its last.
    """

    token_ids: list[int] = field(default_factory=list)
    num_steps: int = 0
    begun_s: float = 0.0
    seconds: float = 0.0

    @property
    def loops(self) -> bool:
        """Whether the second half of it repeats itself."""
        half = self.token_ids[len(self.token_ids) // 2 :]
        return any(half[period:] == half[:-period] for period in range(1, min(LONGEST_PERIOD, len(half) // 2) + 1))


class Bench:
    """One engine, and requests that go through it."""

    def __init__(self, dtype: str) -> None:
        self.clock = Clock()
        config = EngineConfig(
            model=MODEL,
            dtype=dtype,  # type: ignore[arg-type]
            max_model_len=2048,
            max_num_seqs=32,
            kv_cache_memory_bytes=2**30,
            speculative_config=WITH_MODEL,
        )
        self.engine = build_engine(plan_engine(config), emit=self.clock.emit, say=lambda _: None)
        self.clock.watch(self.engine)
        assert self.engine.tokenizer is not None
        self.tokenizer = self.engine.tokenizer
        self._num = 0

    @contextmanager
    def drafting_for_nothing(self, params: SpeculativeParams) -> Iterator[None]:
        """Let a drafter draft as if its steps, if it has some, and longer rows cost nothing; no clock counts it."""
        drafting, clock = self.engine.drafting, self.clock
        drafter = drafting._drafter_for(params)  # noqa: SLF001 - nobody else is to set these
        costs, making = drafting._costs, drafter.costs  # noqa: SLF001
        drafting_s, step_s = clock.drafting_s, clock.step_s
        drafting._costs = StepCosts((1, 2), (1.0, 1.0))  # noqa: SLF001
        if making is not None:
            drafter.costs = StepCosts((1, 2), (1e-9, 1e-9))
        try:
            yield
        finally:
            drafting._costs = costs  # noqa: SLF001
            if making is not None:
                drafter.costs = making
            clock.drafting_s, clock.step_s = drafting_s, step_s

    def run(
        self, prompts: Sequence[list[int]], hows: Sequence[SamplingParams], params: SpeculativeParams, salt: str
    ) -> list[Ran]:
        """Run requests at once, and return what became of them."""
        found = self.add(prompts, hows, params, salt)
        while self.engine.has_work:
            self.step(found)
        return list(found.values())

    def add(
        self, prompts: Sequence[list[int]], hows: Sequence[SamplingParams], params: SpeculativeParams, salt: str
    ) -> dict[str, Ran]:
        """Add requests; return where it is noted what becomes of them."""
        found = {}
        for prompt, how in zip(prompts, hows, strict=True):
            self._num += 1
            found[str(self._num)] = Ran()
            self.engine.add(str(self._num), prompt, how, Caller(speculation=params, cache_salt=salt))
        return found

    def step(self, found: dict[str, Ran]) -> int:
        """Make a step; return how many requests ended with it."""
        begin = time.perf_counter()
        deltas = self.engine.step()
        now = time.perf_counter()
        self.clock.step_s += now - begin
        for delta in deltas:
            ran = found[delta.request_id]
            if not ran.token_ids:
                ran.begun_s = now
            ran.token_ids += delta.token_ids
            ran.seconds = now - ran.begun_s
        for name in {delta.request_id for delta in deltas if delta.token_ids}:  # a delta for each token
            found[name].num_steps += 1
        return sum(delta.is_last for delta in deltas)


class Load:
    """Keeps so many greedy requests running on an engine.

    Args:
        bench: has the engine.
        prompts: of all requests.
        num: that run at once.
        params: who drafts for them.
        salt: theirs.

    Attributes:
        seconds, num_tokens: of the steps as long as so many ran.
        is_full: whether so many still run.
    """

    def __init__(
        self, bench: Bench, prompts: Sequence[list[int]], num: int, params: SpeculativeParams, salt: str
    ) -> None:
        self._bench, self._waiting, self._num = bench, list(prompts), num
        self._params, self._salt = params, salt
        self._found: dict[str, Ran] = {}
        self._num_running = 0
        self.seconds, self.num_tokens, self.is_full = 0.0, 0, True

    @property
    def has_work(self) -> bool:
        """Whether anybody runs or waits."""
        return bool(self._waiting or self._num_running)

    @property
    def outputs(self) -> list[list[int]]:
        """Return the output of each request."""
        return [ran.token_ids for ran in self._found.values()]

    def step(self) -> None:
        """Fill up and make one step."""
        begin = time.perf_counter()
        while self._waiting and self._num_running < self._num:
            prompt = self._waiting.pop(0)
            self._found |= self._bench.add([prompt], [greedy(NUM_OUT)], self._params, self._salt)
            self._num_running += 1
        self.is_full = self.is_full and self._num_running == self._num
        self._num_running -= self._bench.step(self._found)
        if self.is_full:
            self.seconds += time.perf_counter() - begin
            self.num_tokens = sum(len(ran.token_ids) for ran in self._found.values())


def greedy(num_out: int) -> SamplingParams:
    """Return how a greedy output of so many tokens is asked for."""
    return SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)


def seeded(num_out: int, seed: int) -> SamplingParams:
    """Return how a sampled output of so many tokens is asked for."""
    return SamplingParams(temperature=0.7, seed=seed, max_tokens=num_out, ignore_eos=True)


# Exactness.


class Lies:
    """A drafter of what is right, as far as it says so, and then of anything."""

    def __init__(self, bench: Bench) -> None:
        self._scheduler = bench.engine.scheduler
        self._random = random.Random(1)
        self.known: dict[bytes, list[int]] = {}

    def prepare(self) -> None:
        """Give drafts to all that run."""
        for request in self._scheduler.running:
            right = self.known[request.token_ids[: request.num_prompt_tokens].tobytes()]
            begin = request.num_output_tokens
            drafts = right[begin : begin + self._random.randrange(6)]
            drafts += [self._random.randrange(VOCAB_SIZE) for _ in range(self._random.randrange(4))]
            request.drafts = array("i", drafts)


def exactness(bench: Bench, num_prompts: int, passages: Passages) -> list[Row]:
    """Compare outputs with drafts and without."""
    lies, rng = Lies(bench), random.Random(passages.seed)
    honest = bench.engine.drafting.prepare
    rows = []
    for name, params in (("tree", TREE), ("ngram", NGRAM), ("draft_model", BY_MODEL), ("right ones and lies", OFF)):
        num_done = num_different = 0
        before = bench.clock.num_drafts, bench.clock.num_accepted
        share = num_prompts // 4
        console = Console(stderr=True)
        for number in track(range(10**9), name, total=None, console=console, transient=True):
            if num_done >= share:
                break
            size = min(BATCHES[number % len(BATCHES)], share - num_done)
            prompts = [bench.tokenizer.encode(passages.take(rng.randrange(6, 60))) for _ in range(size)]
            hows = [
                SamplingParams(
                    temperature=0.0 if at % 2 else 0.8,
                    seed=passages.seed + 4 * (num_done + at),
                    max_tokens=NUM_EXACT_OUT,
                    ignore_eos=True,
                )
                for at in range(size)
            ]
            off = bench.run(prompts, hows, OFF, f"off {name} {number}")
            if params is OFF:
                for prompt, one in zip(prompts, off, strict=True):
                    lies.known[array("i", prompt).tobytes()] = one.token_ids
                bench.engine.drafting.prepare = lies.prepare  # type: ignore[method-assign]
            with bench.drafting_for_nothing(params) if params is BY_MODEL else nullcontext():
                on = bench.run(prompts, hows, params, f"on {name} {number}")
            if params is TREE:  # once more: what was said is cached now, and all of it is drafted
                on += bench.run(prompts, hows, params, f"on {name} {number}")
                off = off + off
            bench.engine.drafting.prepare = honest  # type: ignore[method-assign]
            num_different += sum(a.token_ids != b.token_ids for a, b in zip(off, on, strict=True))
            num_done += size
            lies.known.clear()
        drafts = bench.clock.num_drafts - before[0], bench.clock.num_accepted - before[1]
        told = f"{num_different} of {num_done} ({drafts[1]:,} of {drafts[0]:,} drafts were right)"
        values = {"different": num_different, "prompts": num_done, "drafts": drafts[0], "accepted": drafts[1]}
        rows.append(Row(f"outputs that differ with drafts by {name}", "0", told, num_different == 0, values))
    return rows


# Speed.


def edits(passages: Passages) -> list[str]:
    """Return the prompt of an edit."""
    text = passages.take(90)
    first = " ".join(text.split()[:4])
    return [f'A text:\n"{text}"\n\nThe same text again, with two spelling mistakes corrected:\n"{first}']


def quotes(passages: Passages) -> list[str]:
    """Return a prompt whose answer quotes it."""
    text = passages.take(90)
    first = " ".join(text.split()[8:12])
    ask = "Question: What does the passage say? Quote it word for word."
    return [f'Passage:\n{text}\n\n{ask}\nAnswer: The passage says: "{first}']


def chats(passages: Passages) -> list[str]:
    """Return what a user says in two turns."""
    topic = passages.take(25)
    first = f"User: Tell me about this sentence, and who may have said it: {topic}\nAssistant:"
    return [first, "\nUser: Now say the same again, but shorter.\nAssistant:"]


def prose(passages: Passages) -> list[str]:
    """Return the beginning of a passage."""
    return [passages.take(60)]


KINDS = {"edits": edits, "quotes": quotes, "chats": chats, "prose": prose}


def turns(bench: Bench, texts: list[str], how: SamplingParams, params: SpeculativeParams, salt: str) -> Ran:
    """Run a conversation turn by turn; return what became of the last one."""
    context: list[int] = []
    ran = Ran()
    for text in texts:
        context += bench.tokenizer.encode(text)
        (ran,) = bench.run([context], [how], params, salt)
        context += ran.token_ids
    return ran


def one_by_one(bench: Bench, kind: str, num_prompts: int, passages: Passages) -> Row:
    """Compare single requests, on over off."""
    ratios, free = [], []
    on_s = off_s = 0.0
    num_looping = 0
    for number in track(range(num_prompts), kind, console=Console(stderr=True), transient=True):
        texts = KINDS[kind](passages)
        how = seeded(NUM_OUT, number) if kind in SEEDED or (number % 2 and kind not in GREEDY) else greedy(NUM_OUT)
        found = {}
        for name, params in (("off", OFF), ("on", TREE)) if number % 2 else (("on", TREE), ("off", OFF)):
            found[name] = turns(bench, texts, how, params, f"{kind} {number} {name}")
        assert found["on"].token_ids == found["off"].token_ids, "drafts changed an output"
        if found["on"].loops:
            num_looping += 1
            continue
        with bench.drafting_for_nothing(TREE):
            without_cost = turns(bench, texts, how, TREE, f"{kind} {number} free")
        assert without_cost.token_ids == found["off"].token_ids, "drafts changed an output"
        free.append(found["off"].num_steps / without_cost.num_steps)
        ratios.append(found["off"].seconds / found["on"].seconds)
        on_s += found["on"].seconds
        off_s += found["off"].seconds
    asked = ASKED[kind]
    if not ratios:
        return Row(f"one request, {kind}: tokens/s over off", f">= {asked} x", "all loop", None)
    median = statistics.median(ratios)
    if_free = statistics.median(free)
    told = f"{median:.2f} x ({min(ratios):.2f} to {max(ratios):.2f}; free {if_free:.2f}; {num_looping} loop)"
    values = {"median": median, "ratios": ratios, "together": off_s / on_s, "free": free, "looping": num_looping}
    return Row(f"one request, {kind}: tokens/s over off", f">= {asked} x", told, median >= asked, values)


def mixed(num: int, passages: Passages) -> Iterator[str]:
    """Yield a third each of edits, chats and prose."""
    for at in range(num):
        yield "".join((edits, chats, prose)[at % 3](passages)[:1])


def at_once(benches: list[Bench], num: int, repeats: int, passages: Passages) -> Row:
    """Compare many requests at once: two engines take turns, step by step, so that both see the same machine."""
    ratios = []
    for number in track(range(repeats), f"{num} running", console=Console(stderr=True), transient=True):
        prompts = [benches[0].tokenizer.encode(text) for text in mixed(ROUNDS * num, passages)]
        benches.reverse()  # neither is always the one that drafts
        on = Load(benches[0], prompts, num, TREE, f"{num} {number} on")
        off = Load(benches[1], prompts, num, OFF, f"{num} {number} off")
        while on.is_full or off.is_full:
            min((load for load in (on, off) if load.is_full), key=lambda load: load.seconds).step()
        for load in (on, off):
            while load.has_work:
                load.step()
        assert on.outputs == off.outputs, "drafts changed an output"
        ratios.append(on.num_tokens / on.seconds / (off.num_tokens / off.seconds))
    median, asked = statistics.median(ratios), ASKED_AT_ONCE[num]
    told = f"{median:.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"
    return Row(f"{num} running, mixed: tokens/s over off", f">= {asked} x", told, median >= asked, {"ratios": ratios})


def main() -> None:
    """Measure and report."""
    arguments = parser(__doc__)
    arguments.add_argument("--dtype", default="auto", help="as pagefold serve; without: auto")
    arguments.add_argument("--num-exact", type=int, default=10_000, help="prompts of the test of exactness")
    arguments.add_argument("--num-prompts", type=int, default=12, help="single requests of each kind")
    arguments.add_argument("--repeats", type=int, default=3, help="of many requests at once")
    arguments.add_argument("--seed", type=int, default=0, help="of the prompts: others for each")
    args = arguments.parse_args()
    where = machine() | {"dtype": args.dtype}
    bench, passages = Bench(args.dtype), Passages(args.seed)
    turns(bench, prose(passages), greedy(NUM_OUT), TREE, "a first run, which is not counted")
    rows = exactness(bench, args.num_exact, passages) if args.num_exact else []
    bench.clock.drafting_s = bench.clock.step_s = 0.0
    rows += [one_by_one(bench, kind, args.num_prompts, passages) for kind in KINDS]
    if args.repeats:
        benches = [bench, Bench(args.dtype)]
        rows += [at_once(benches, num, args.repeats, passages) for num in ASKED_AT_ONCE]
    if bench.clock.step_s:
        share = bench.clock.drafting_s / bench.clock.step_s
        rows.append(Row("drafting and index, of the steps' time", f"<= {SHARE:.0%}", f"{share:.2%}", share <= SHARE))
    core = bench.engine.scheduler.core
    num_bytes = core.tree.watcher.num_bytes / (core.pool.num_blocks * core.block_size)  # type: ignore[attr-defined]
    rows.append(Row("index, bytes a cached token", f"<= {BYTES:g}", f"{num_bytes:.1f}", num_bytes <= BYTES))
    print_report("speculation", rows, where, args.json)


if __name__ == "__main__":
    main()
