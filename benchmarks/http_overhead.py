"""What HTTP and streaming cost: CPU time of a server with 32 streams against ``LLM.generate`` of the same work.

Workload: SmolLM2-135M-Instruct, float32, 32 prompts of 256 random tokens (fresh ones in every repeat, so no prefix is
hit), 64 greedy output tokens each. The server is a process of its own and streams every token to 32 connections; the
offline engine is another process with the same settings. Counted is the CPU time (user and system, all threads) of the
serving process, from before the first request to behind the last token; the client's is not. Interleaved repeats,
medians of ratios.

    python benchmarks/http_overhead.py [--repeats 3] [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
from report import Row, machine, parser, print_report
from rich.console import Console
from rich.progress import track

NUM_STREAMS = 32
NUM_PROMPT_TOKENS = 256
NUM_OUTPUT_TOKENS = 64
VOCAB_SIZE = 49_152
ASKED = 1.10
SETTINGS = {"dtype": "float32", "kv_cache_memory_bytes": 2**31, "max_model_len": 2048}
OFFLINE = """
import json, sys, time
from pagefold import LLM, SamplingParams
llm = LLM("smollm2-135m", **json.loads(sys.argv[1]))
how = SamplingParams(temperature=0.0, max_tokens=int(sys.argv[2]), ignore_eos=True)
print("ready", flush=True)
for line in sys.stdin:
    prompts = [{"prompt_token_ids": ids} for ids in json.loads(line)]
    start = time.process_time()
    results = llm.generate(prompts, how, use_tqdm=False)
    assert all(len(result.outputs[0].token_ids) == how.max_tokens for result in results)
    print(time.process_time() - start, flush=True)
"""


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_server() -> tuple[subprocess.Popen[str], str]:
    """Return a server that is ready, and its address."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    command = [sys.executable, "-m", "pagefold.cli", "serve", "smollm2-135m", "--port=0", *flags]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("ready on "):
            return server, line.split()[2]
    sys.exit("the server ended before it was ready")


async def stream_all(url: str, prompts: list[list[int]]) -> None:
    """Stream all prompts at once, token by token, to their ends."""
    body = {"max_tokens": NUM_OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one(prompt: list[int]) -> None:
            last = ""
            async with client.stream("POST", "/v1/completions", json={**body, "prompt": prompt}) as response:
                async for line in response.aiter_lines():
                    last = line or last
            assert last == "data: [DONE]"

        await asyncio.gather(*(one(prompt) for prompt in prompts))


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args()
    rng = random.Random(0)
    offline = subprocess.Popen(
        [sys.executable, "-c", OFFLINE, json.dumps(SETTINGS), str(NUM_OUTPUT_TOKENS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert offline.stdin is not None
    assert offline.stdout is not None
    offline.stdout.readline()
    server, url = start_server()
    http, plain, walls = [], [], []
    try:
        repeats = range(-1, args.repeats)  # -1 warms up and is not counted
        for repeat in track(repeats, description="bursts", console=Console(stderr=True)):
            prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(NUM_PROMPT_TOKENS)] for _ in range(NUM_STREAMS)]
            before, start = cpu_seconds(server.pid), time.perf_counter()
            asyncio.run(stream_all(url, prompts))
            seconds, wall = cpu_seconds(server.pid) - before, time.perf_counter() - start
            offline.stdin.write(json.dumps(prompts) + "\n")
            offline.stdin.flush()
            alone = float(offline.stdout.readline())
            if repeat >= 0:
                http.append(seconds)
                plain.append(alone)
                walls.append(wall)
    finally:
        server.terminate()
        server.wait(60)
        offline.stdin.close()
        offline.wait(60)
    ratio = statistics.median(a / b for a, b in zip(http, plain, strict=True))
    what = f"CPU, {statistics.median(http):.1f} s at {NUM_STREAMS} streams, {statistics.median(plain):.1f} s offline"
    values: dict[str, object] = {"http_cpu_s": http, "offline_cpu_s": plain, "http_wall_s": walls}
    rows = [Row(what, asked=f"<= {ASKED} x", got=f"{ratio:.2f} x", ok=ratio <= ASKED, values=values)]
    print_report("HTTP overhead", rows, machine(), args.json)


if __name__ == "__main__":
    main()
