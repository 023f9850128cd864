"""Routing: many servers behind one address. What prefixes find, over round robin and over one cache of the same size.

Parts:

* simulated: a real trace (``--trace``, one hour of a chat service) on 100 replicas of 262,144 tokens each, in virtual
  time, by the router that deployments have: hit tokens over one server with the memory and the speed of all; beside it
  routing by load alone.
* two: two real servers on Ray, a thread each, SmolLM2-135M. Conversations return in a random order, and the two caches
  together hold just what all of them come to (``--hold``: a replica's share of it). Hit tokens, and time to the first
  token of turns that return, by prefixes over round robin.
* newcomer: a server that has just started, and prompts (of ``--prompt-tokens``) that another one has computed: time to
  the first token with a Redis pool that both use, over the same without.

Servers run one after another, and nothing else should run meanwhile.

    python benchmarks/routing.py [--only simulated] [--trace FILE] [--replicas 100] [--hold 0.5]
        [--prompt-tokens 1024] [--json FILE]
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from report import Row, machine, parser, print_report
from rich.console import Console

from pagefold.sim import SimConfig, read_trace
from pagefold.sim.replicas import Fleet, simulate_replicas, simulate_together
from pagefold.sim.traces import traces_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "smollm2-135m"
VOCAB_SIZE = 49_000
TRACE = "mooncake_conversation.jsonl"
ID_TOKENS = 512
REPLICA_TOKENS = 262_144
TOKEN_S = 100e-6
CONVERSATIONS, TURNS, FIRST, IN, OUT = 16, 5, 1024, 96, 16
TOKEN_BYTES = 46_080  # of SmolLM2 in float32
PROMPTS = 100
START_S = 600.0
_READY = re.compile(r"ready on (http://\S+)")

console = Console(stderr=True)


def simulated(trace: Path, num_replicas: int) -> list[Row]:
    """Run the trace on many replicas, and on one server as large."""
    from pagefold.sim import LinearStepCost

    requests = read_trace(trace).requests
    server = SimConfig(num_blocks=REPLICA_TOKENS // ID_TOKENS, block_size=ID_TOKENS)
    cost = LinearStepCost(token_s=TOKEN_S)
    fleets = {name: Fleet(num_replicas=num_replicas, replica=server, routing=name) for name in ("prefix", "load")}
    console.print(f"simulates {len(requests):,} requests on {num_replicas} replicas: some minutes each")
    runs = {name: simulate_replicas(requests, fleet, step_cost=cost) for name, fleet in fleets.items()}
    one = simulate_together(requests, fleets["prefix"], step_cost=cost)
    share = runs["prefix"].hit_share / one.hit_share
    rows = [
        Row(
            f"{num_replicas} replicas by prefixes: hit tokens over one cache of the same size",
            ">= .9",
            f"{share:.3f}",
            share >= 0.9,
            runs["prefix"].figures() | {"one_cache_token_hit_ratio": one.hit_share},
        ),
    ]
    for name, run in runs.items():
        told = f"{run.hit_share:.4f} hits, TTFT p50 {run.ttft_p50_s:.2f} s, p95 {run.ttft_p95_s:.2f} s"
        rows.append(Row(f"  by {name}", "", f"{told}, busiest {run.busiest_share:.2f}", None, run.figures()))
    rows.append(Row("  one cache", "", f"{one.hit_share:.4f} hits, TTFT p50 {one.ttft_p50_s:.2f} s"))
    return rows


@dataclass
class Seen:
    """What a client saw of a prompt.

    Attributes:
        ttft_s: seconds to its first token.
        num_tokens, num_cached: of the prompt, and of these what was found.
        output: what came.
    """

    ttft_s: float
    num_tokens: int
    num_cached: int
    output: list[int]


def ask(http: httpx.Client, prompt: list[int], num_tokens: int) -> Seen:
    """Send a prompt, and return what came of it."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
    began = time.perf_counter()
    ttft_s, usage, output = 0.0, {}, []
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                ttft_s = ttft_s or time.perf_counter() - began
                output += choice.get("token_ids") or []
            usage = event.get("usage") or usage
    return Seen(ttft_s, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], output)


@contextmanager
def server(*flags: str, is_fleet: bool = False) -> Iterator[httpx.Client]:
    """Start ``pagefold serve``, and end it by its own process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pagefold.cli", "serve", MODEL, "--port", str(port), "--dtype", "float32", *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ)
    )
    said: list[str] = []
    try:
        for line in process.stdout or ():
            said.append(line)
            if _READY.search(line) and ("replicas)" in line) == is_fleet:
                break
        else:
            sys.exit("The server did not start:\n" + "".join(said[-20:]))
        threading.Thread(target=said.extend, args=(process.stdout,), daemon=True).start()  # a full pipe would stop it
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=START_S) as http:
            yield http
    finally:
        process.terminate()
        process.wait(START_S)


def converse(routing: str, hold: float, seed: int) -> list[Seen]:
    """Have conversations with two servers; return what returning turns met."""
    rng = random.Random(seed)
    most = CONVERSATIONS * (FIRST + (TURNS - 1) * (IN + OUT) + OUT)
    budget = int(hold * most) * TOKEN_BYTES
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(FIRST)] for _ in range(CONVERSATIONS)]
    order = [number for turn in range(TURNS) for number in rng.sample(range(CONVERSATIONS), CONVERSATIONS)]
    flags = ("--replicas", "2", "--threads", "1", "--routing", routing, "--kv-cache-memory-bytes", str(budget))
    seen: list[Seen] = []
    with server(*flags, "--max-model-len", "2048", is_fleet=True) as http:
        until_known(http)
        for place, number in enumerate(order):
            one = ask(http, prompts[number], OUT)
            prompts[number] += one.output + [rng.randrange(VOCAB_SIZE) for _ in range(IN)]
            if place >= CONVERSATIONS:
                seen.append(one)
    return seen


def until_known(http: httpx.Client) -> None:
    """Wait until both replicas take requests, and their events come."""
    while True:
        replicas = http.get("/replicas").json()["replicas"]
        if len(replicas) == 2 and all(each["is_known"] for each in replicas):
            return
        time.sleep(0.2)


def two(hold: float, seed: int) -> list[Row]:
    """Compare two real servers by prefixes and round robin."""
    if find_spec("ray") is None:
        return [Row("two real servers", "", "not measured: Ray is not installed (make test-ray installs it)")]
    seen = {}
    for routing in ("round_robin", "prefix"):
        console.print(f"two servers, {routing}: some minutes")
        seen[routing] = converse(routing, hold, seed)
    hits = {name: sum(each.num_cached for each in runs) for name, runs in seen.items()}
    ttfts = {name: statistics.median(each.ttft_s for each in runs) for name, runs in seen.items()}
    gain, share = hits["prefix"] / max(1, hits["round_robin"]), ttfts["prefix"] / ttfts["round_robin"]
    asked = sum(each.num_tokens for each in seen["prefix"])
    return [
        Row(
            f"two servers, each with KV for {hold:g} of all: hit tokens by prefixes over round robin",
            ">= 1.8 x",
            f"{gain:.2f} x",
            gain >= 1.8,
            {"hit_tokens": hits, "prompt_tokens": asked},
        ),
        Row(
            "  TTFT p50 of returning turns, likewise",
            "<= .35 x",
            f"{share:.2f} x",
            share <= 0.35,
            {"ttft_p50_s": ttfts},
        ),
    ]


@contextmanager
def redis() -> Iterator[str]:
    """Start a Redis of its own on a free port; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    command = [shutil.which("redis-server") or "redis-server", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        time.sleep(1.0)
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def newcomer(prompt_tokens: int, seed: int) -> list[Row]:
    """Compare a new server with a pool that others have filled, and without."""
    if shutil.which("redis-server") is None:
        return [Row("a new server with a pool", "", "not measured: redis-server is not installed")]
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(prompt_tokens)] for _ in range(PROMPTS)]
    memory = ("--kv-cache-memory-bytes", str((PROMPTS + 8) * (prompt_tokens + 64) * TOKEN_BYTES))
    tail = [rng.randrange(VOCAB_SIZE) for _ in range(8)]
    with redis() as address:
        tiers = ("--kv-offloading-size", "8", "--kv-remote-url", address)
        console.print(f"{PROMPTS} prompts are computed and go to a pool")
        with server(*memory, *tiers, "--kv-write-policy", "write_through") as http:
            for prompt in prompts:
                ask(http, prompt, 1)
        console.print("a new server meets them, with the pool and without")
        with server(*memory, *tiers) as http:
            warm = [ask(http, prompt + tail, 1) for prompt in prompts]
        with server(*memory) as http:
            cold = [ask(http, prompt + tail, 1) for prompt in prompts]
    share = statistics.median(each.ttft_s for each in warm) / statistics.median(each.ttft_s for each in cold)
    found = sum(each.num_cached for each in warm) / sum(each.num_tokens for each in warm)
    values = {"found": found, "warm_s": [each.ttft_s for each in warm], "cold_s": [each.ttft_s for each in cold]}
    what = f"a new server's first {PROMPTS} returning prompts of {prompt_tokens:,}, a pool over none, TTFT p50"
    return [Row(what, "<= .3 x", f"{share:.2f} x ({found:.0%} found)", share <= 0.3, values)]


def main() -> None:
    """Run what is asked for."""
    arguments = parser(__doc__)
    arguments.add_argument("--only", action="append", choices=("simulated", "two", "newcomer"))
    arguments.add_argument("--trace", type=Path, default=traces_folder() / TRACE if traces_folder() else None)
    arguments.add_argument("--replicas", type=int, default=100)
    arguments.add_argument("--hold", type=float, default=0.5, help="of two: what a replica's KV holds of everything")
    arguments.add_argument("--prompt-tokens", type=int, default=1024, help="of newcomer")
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    parts = given.only or ("simulated", "two", "newcomer")
    rows: list[Row] = []
    if "simulated" in parts:
        if given.trace is None:
            rows.append(Row("a real trace on many replicas", "", "not measured: give --trace"))
        else:
            rows += simulated(given.trace, given.replicas)
    if "two" in parts:
        rows += two(given.hold, given.seed)
    if "newcomer" in parts:
        rows += newcomer(given.prompt_tokens, given.seed)
    print_report("routing", rows, machine(), given.json)


if __name__ == "__main__":
    main()
