"""vLLM on this CPU with PagefoldConnector, over vLLM alone: conversations that return, in a quarter of the KV.

The workload is ``returning`` of ``peers.py``: 16 conversations of 768 tokens, 4 rounds of 48 tokens in and 32 out, all
at once in another order each round, and KV for 4,608 tokens, where 17,408 would hold all. vLLM is set as ``peers.toml``
has it for that, with its own prefix cache on; the connector has 1.5 GiB of the host's memory. Repeats are interleaved,
and their order turns with each; the figure is the median of the ratios within a repeat. What no connector can pass is
beside it: vLLM alone with KV for all of them, and as many requests at once as a quarter of that has room for, so that
each returns to its own blocks and nothing needs restoring.

Beside it, with a smaller story in float32 that is told three times with the same words: which bytes that were restored
differ from what was stored (all of them are read back), and which answers differ between the connector on and off, over
those that differ between vLLM's own prefix cache on and off.

    python benchmarks/peers/install.py vllm
    python benchmarks/vllm_connector.py [--repeats 3] [--measure rates|bytes] [--short] [--json FILE]
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peers as peers_benchmark
import xxhash
from report import Row, machine, parser, print_report
from rich.console import Console

if TYPE_CHECKING:
    import argparse

__all__ = ["add_options", "connector"]

HERE = Path(__file__).parent
DRIVER = HERE.parent / "tests" / "integrations" / "drive_vllm_connector.py"
ASKED = {"float32": 2.5, "bfloat16": 1.8}
HOST_BYTES = "1536MiB"
ALONE, WITH, LIMIT = "vllm", "vllm with the connector", "vllm with KV for all, five at once"
ALL_BLOCKS = 144  # of 128 tokens, for 18,432
AT_ONCE = 5  # requests of about a thousand tokens that a quarter of them has room for

console = Console(stderr=True)


def transfer(**more: object) -> dict[str, object]:
    """Return what vLLM is told of the connector."""
    return {
        "kv_connector": "PagefoldConnector",
        "kv_connector_module_path": "pagefold.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_bytes": HOST_BYTES} | more,
    }


def connector(args: argparse.Namespace) -> list[Row]:
    """Measure, and return the rows."""
    places = peers_benchmark.places(args.environments.resolve(), "smollm2-135m")
    about = tomllib.loads((HERE / "peers.toml").read_text(encoding="utf-8"))["engines"]["vllm"]
    known = peers_benchmark.fill(about, places)
    with tempfile.TemporaryDirectory() as site:
        home = Path(xxhash.__file__).parent  # vLLM's environment lacks it; ours has the same Python
        (Path(site) / home.name).symlink_to(home)
        known["env"] = known["env"] | {"PYTHONPATH": f"{HERE.parent / 'src'}{os.pathsep}{site}"}
        rows: list[Row] = []
        if args.measure != "bytes":
            rows += [row for dtype in ASKED for row in _rates(dtype, known, args)]
        if args.measure != "rates":
            rows += _bytes(known, args)
    return rows


# Tokens a second.


def _rates(dtype: str, known: dict[str, Any], args: argparse.Namespace) -> list[Row]:
    settings = known["variants"]["budget"] | {"dtype": dtype}
    engines = [
        _engine(ALONE, settings, known, args),
        _engine(WITH, settings | {"kv_transfer_config": transfer()}, known, args),
        _engine(LIMIT, settings | {"num_gpu_blocks_override": ALL_BLOCKS, "max_num_seqs": AT_ONCE}, known, args),
    ]
    rates: dict[str, list[float]] = {engine.name: [] for engine in engines}
    try:
        for repeat in range(-1, args.repeats):
            turn = repeat % len(engines)
            for engine in engines[turn:] + engines[:turn]:
                engine.resume()
                engine.start()
                rng = random.Random(f"connector {repeat}")
                figures = peers_benchmark.returning(engine, rng, repeat < 0 or args.short)
                engine.pause()
                if repeat >= 0:
                    rates[engine.name].append(figures["returning"])
                    console.print(f"{dtype} {repeat + 1}/{args.repeats} {engine.name}: {figures['returning']:.1f}")
    finally:
        for engine in engines:
            engine.stop()
    with_it, limit = (_over_alone(rates, name) for name in (WITH, LIMIT))
    ours, theirs = (statistics.median(rates[name]) for name in (WITH, ALONE))
    return [
        Row(
            f"returning conversations, output tokens/s with the connector over vLLM alone, {dtype}",
            f">= {ASKED[dtype]} x",
            f"{with_it:.2f} x ({ours:.1f}, {theirs:.1f})",
            with_it >= ASKED[dtype],
            {"rates": rates},
        ),
        Row("  the limit: KV for all, five requests at once, likewise", "", f"{limit:.2f} x"),
    ]


def _over_alone(rates: dict[str, list[float]], name: str) -> float:
    """Return the median of ratios within a repeat."""
    return statistics.median(each / alone for each, alone in zip(rates[name], rates[ALONE], strict=True))


def _engine(
    name: str, settings: dict[str, Any], known: dict[str, Any], args: argparse.Namespace
) -> peers_benchmark.Engine:
    about = known | {"variants": {"budget": settings}}
    return peers_benchmark.make_engine(name, "budget", about, args.environments.resolve(), args.timeout)


# Bytes and answers.


def _bytes(known: dict[str, Any], args: argparse.Namespace) -> list[Row]:
    """Tell one story with vLLM's prefix cache on and off, and with the connector; compare."""
    settings = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "block_size": 32,
        "num_gpu_blocks_override": 30,
    }
    kinds = {
        "on": settings | {"num_gpu_blocks_override": 300},
        "off": settings | {"enable_prefix_caching": False},
        "connector": settings | {"kv_transfer_config": transfer(verifies_restored=True)},
    }
    num, num_rounds = (4, 2) if args.short else (16, 3)
    answers: dict[str, list[list[int]]] = {}
    counts: dict[str, float] = {}
    for kind, one in kinds.items():
        driver = _Driver(known, one, args)
        try:
            answers[kind] = _story(driver, num, num_rounds, answers.get("on"))
            if kind == "connector":
                counts = driver.ask(counts=True)["counts"]
        finally:
            driver.close()
    differ = {
        kind: sum(one != other for one, other in zip(answers[kind], answers["on"], strict=True))
        for kind in ("off", "connector")
    }
    what = f"of {num * num_rounds} answers, those that differ with the connector; with vLLM's prefix cache off"
    return [
        Row(
            f"bytes that were restored and differ, of {counts['load_bytes']:,.0f}",
            "0",
            f"{counts['differing_bytes']:.0f}",
            not counts["differing_bytes"] and counts["load_bytes"] > 0,
            dict(counts),
        ),
        Row(
            what,
            "<= 1 x",
            f"{differ['connector']}; {differ['off']}",
            differ["connector"] <= differ["off"],
            dict(differ),
        ),
    ]


def _story(driver: _Driver, num: int, num_rounds: int, told: list[list[int]] | None) -> list[list[int]]:
    """Return all answers; what was ``told`` is what goes back, if that is given."""
    rng = random.Random("story")
    conversations = [[rng.randrange(49_000) for _ in range(150)] for _ in range(num)]
    answers: list[list[int]] = []
    for at in range(num_rounds):
        answered = driver.ask(prompts=conversations, num_output_tokens=16)["token_ids"]
        answers += answered
        back = told[at * num : (at + 1) * num] if told else answered
        for conversation, answer in zip(conversations, back, strict=True):
            conversation.extend(answer)
            conversation.extend(rng.randrange(49_000) for _ in range(20))
    return answers


class _Driver:
    """A vLLM that can be looked into; see ``drive_vllm_connector.py``."""

    def __init__(self, known: dict[str, Any], settings: dict[str, Any], args: argparse.Namespace) -> None:
        python = peers_benchmark.python_of(known, args.environments.resolve())
        asked = json.dumps({"model": known["model"], "settings": settings})
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [str(python), str(DRIVER), asked],
            env={**os.environ, **known["env"]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._read()

    def ask(self, **command: object) -> dict[str, Any]:
        """Ask, and return the reply."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line or "error" in json.loads(line):
            self._log.seek(0)
            sys.exit(f"vLLM ended: {line}\n{self._log.read()[-3000:]}")
        reply: dict[str, Any] = json.loads(line)
        return reply


def add_options(options: argparse.ArgumentParser) -> None:
    """Add what can be said on the command line."""
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--measure", choices=("rates", "bytes"), help="a part of what is measured of the connector")
    options.add_argument(
        "--short", action="store_true", help="a miniature: two conversations, a round; it proves nothing"
    )
    options.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="for each call of vLLM")
    options.add_argument(
        "--environments", type=Path, default=peers_benchmark.PEERS, metavar="DIR", help="where install.py made them"
    )


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    add_options(options)
    args = options.parse_args()
    print_report("vllm_connector", connector(args), machine(), args.json)


if __name__ == "__main__":
    main()
