"""Drafts from the text beside those of other engines: what each engine's own prompt lookup brings over its own "off".

SmolLM2-135M, every engine as its users run it (``peers.toml``: ``default``, and that with its lookup), in
a process of its own, stopped while it is not asked. One request at a time, greedy, 96 tokens out, the same prompts
for all: edits, a passage that is to be written again, and quotes, an answer from a passage. Tokens a second behind the
first token, on over off of the same engine, prompt by prompt, turn by turn; medians. Prompts whose output loops in
Pagefold, with a period of 32 tokens or less, are left out for all: they are drafted too well. How often an engine says
with its lookup what it says without is told beside it.

    python benchmarks/peers/install.py
    python benchmarks/speculation_peers.py [--engines A,B] [--num-prompts 8] [--json FILE]
"""

from __future__ import annotations

import signal
import statistics
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from peers import HERE, OURS, PEERS, EngineError, console, fill, make_engine, places, python_of
from report import Row, machine, parser, print_report
from rich.progress import track
from speculation import KINDS, MODEL, NUM_OUT, Passages, Ran

from pagefold.config import cache_dir
from pagefold.hub.catalog import resolve
from pagefold.tokenizer import Tokenizer

if TYPE_CHECKING:
    from peers import Answer, Engine

OFF, ENDING = "default", "-lookup"
TEXTS = ("edits", "quotes")


class Pair:
    """An engine without and with one of its lookups.

    Attributes:
        name: of both.
        ratios: of each prompt that counts: tokens a second, on over off.
        num_same: how many of these have the same output with and without.
        why_out: why it takes no part any more; empty as long as it does.
    """

    def __init__(self, name: str, off: Engine, on: Engine) -> None:
        self.name = name
        self.ratios: list[float] = []
        self.num_same = 0
        self.why_out = ""
        self._engines = off, on

    def ask(self, prompt: list[int], *, on_first: bool) -> tuple[Answer, Answer] | None:
        """Return what both answer; None when one of them fails."""
        answers: dict[bool, Answer] = {}
        for is_on in (on_first, not on_first):
            engine = self._engines[is_on]
            try:
                engine.resume()
                engine.start()
                answers[is_on] = engine.ask([prompt], NUM_OUT)
                engine.pause()
            except EngineError as error:
                self.why_out = str(error)
                return None
        return answers[False], answers[True]

    def stop(self) -> None:
        """End both."""
        for engine in self._engines:
            engine.stop()


def compare(pairs: list[Pair], kind: str, num_prompts: int, tokenizer: Tokenizer, passages: Passages) -> int:
    """Ask all engines the same prompts; Pagefold first, which says whether a prompt counts. Return how many do not."""
    for pair in pairs:
        pair.ratios, pair.num_same = [], 0
    num_looping = 0
    for number in track(range(-1, num_prompts), kind, console=console, transient=True):  # -1 is not counted
        prompt = tokenizer.encode(KINDS[kind](passages)[0])
        counts = number >= 0
        for pair in pairs:
            if pair.why_out:
                continue
            answers = pair.ask(prompt, on_first=bool(number % 2))
            if answers is None or not counts:
                continue
            off, on = answers
            if pair.name == OURS and Ran(off.token_ids[0]).loops:
                num_looping += 1
                break
            pair.ratios.append(on.decode_rate / off.decode_rate)
            pair.num_same += off.token_ids == on.token_ids
    return num_looping


def rows_of(pairs: list[Pair], kind: str, num_looping: int) -> list[Row]:
    """Return what was found of all engines."""
    ours = next((pair for pair in pairs if pair.name == OURS and pair.ratios), None)
    rows = []
    for pair in pairs:
        what = f"{kind}: {pair.name}, tokens/s over its own off"
        if not pair.ratios:
            rows.append(Row(what, "", pair.why_out or "all loop"))
            continue
        median, num = statistics.median(pair.ratios), len(pair.ratios)
        told = f"{median:.2f} x ({min(pair.ratios):.2f} to {max(pair.ratios):.2f}); {pair.num_same} of {num} the same"
        if pair.name == OURS:
            told += f"; {num_looping} loop"
        asked, ok = "", None
        if ours is not None and pair is not ours:
            asked, ok = "below ours", median < statistics.median(ours.ratios)
        rows.append(Row(what, asked, told, ok, {"ratios": pair.ratios, "same": pair.num_same}))
    return rows


def main() -> None:
    """Measure and report."""
    about = tomllib.loads((HERE / "peers.toml").read_text(encoding="utf-8"))
    options = parser(__doc__)
    options.add_argument("--engines", default="", help="without: all that have a lookup")
    options.add_argument("--num-prompts", type=int, default=8, help="of each kind")
    options.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for each call of an engine")
    options.add_argument("--environments", type=Path, default=PEERS, metavar="DIR", help="where install.py made them")
    args = options.parse_args()
    peers = args.environments.resolve()
    known = fill(about["engines"], places(peers, MODEL))
    pairs: list[Pair] = []
    for name, engine in known.items():
        lookups = [variant for variant in engine["variants"] if variant.startswith(OFF + ENDING)]
        if (args.engines and name not in args.engines.split(",")) or not lookups:
            continue
        if not python_of(engine, peers).exists():
            console.print(f"{name} is not installed, and left out: make peers")
            continue
        for lookup in lookups:
            off, on = (make_engine(name, variant, engine, peers, args.timeout) for variant in (OFF, lookup))
            pairs.append(Pair(name + lookup.removeprefix(OFF + ENDING), off, on))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # and the engines with it
    tokenizer, passages = Tokenizer(resolve(MODEL, cache_dir())), Passages(0)
    rows: list[Row] = []
    try:
        for kind in TEXTS:
            num_looping = compare(pairs, kind, args.num_prompts, tokenizer, passages)
            rows += rows_of(pairs, kind, num_looping)
    finally:
        for pair in pairs:
            pair.stop()
        print_report("speculation_peers", rows, machine(), args.json)


if __name__ == "__main__":
    main()
