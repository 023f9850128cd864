"""A real server under open load over HTTP, for ``benchmarks/load.py``.

The server is ``pagefold serve`` in a process of its own, on 127.0.0.1, with a random Llama of two layers, which says
nothing that makes sense; or vLLM from ``.peers/vllm``, with the same model, the same bytes of KV and as many sequences.
How long an output is, no server knows: until a request has so many tokens it may not end (``min_tokens``), and then it
wants nothing else (``logit_bias`` of the end-of-sequence token).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import httpx
from load_traffic import MAX_TOKENS, Outcome, Sent
from plan_concurrency import tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PEER", "HttpRun", "serve"]

PEER = Path(__file__).parents[1] / ".peers" / "vllm" / "bin" / "python"
NUM_TOKEN_IDS = 49_152
EOS = 2
KV_BYTES = 2**20 * 48
"""Of 24,576 tokens: two layers of two heads of 64 numbers, K and V in float32, are 2,048 bytes a token."""
START_S = 300.0
PATIENCE_S = 600.0
_LISTENS = re.compile(r"http://127\.0\.0\.1:(\d+)")


@dataclass
class HttpRun:
    """How it went: as :class:`load_sim.Run`, as far as it can be seen from outside."""

    outcomes: list[Outcome]
    seconds: float
    num_tokens: int
    num_leaked: int
    num_checked: int = 0
    num_within: int = 0
    num_preempted: float = 0.0

    @property
    def share_preempted(self) -> float:
        """Preemptions by requests; who was preempted twice counts twice."""
        return self.num_preempted / max(1, len(self.outcomes))


@contextmanager
def _server(command: list[str], environment: dict[str, str], url: str = "") -> Iterator[str]:
    """Start a server, wait until it answers, and end it by its own process. Yield its address."""
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **environment})
        try:
            began = time.perf_counter()
            while True:
                log.seek(0)
                said = log.read()
                if server.poll() is not None or time.perf_counter() - began > START_S:
                    sys.exit(f"The server did not start:\n{said[-3000:]}")
                found = _LISTENS.search(said)
                url = url or (found.group(0) if found else "")
                if url and _answers(url):
                    break
                time.sleep(0.1)
            yield url
            assert server.poll() is None, "the server ended by itself"
        finally:
            server.terminate()
            server.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=5).is_success
    except httpx.HTTPError:
        return False


def serve(sent: list[Sent], flags: list[str], *, is_peer: bool = False) -> HttpRun:
    """Serve ``sent`` on a server that was just started with ``flags``, and return what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "model", 2 * MAX_TOKENS)
        if is_peer:
            environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
            # As in peers.toml: it keeps a core for itself otherwise, and its documentation asks for libiomp.
            environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            environment["LD_PRELOAD"] = str(PEER.parents[1] / "lib" / "libiomp5.so")
            # Its command asks for the package's name, which the CPU build does not have.
            command = [str(PEER), "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--dtype=float32"]
            command += ["--host=127.0.0.1", "--port=18931"]
            command += [f"--max-model-len={2 * MAX_TOKENS}", f"--kv-cache-memory-bytes={KV_BYTES}", *flags]
            with _server(command, environment, "http://127.0.0.1:18931") as url:
                return asyncio.run(_drive(url, str(model), sent, has_metrics=False))
        command = [sys.executable, "-m", "pagefold.cli", "serve", str(model), "--port=0", "--dtype=float32"]
        command += [f"--kv-cache-memory-bytes={KV_BYTES}", f"--max-model-len={2 * MAX_TOKENS}", *flags]
        with _server(command, {}) as url:
            return asyncio.run(_drive(url, "", sent, has_metrics=True))


async def _drive(url: str, model: str, sent: list[Sent], *, has_metrics: bool) -> HttpRun:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=1.0)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as http:
        name = model or (await http.get("/v1/models")).json()["data"][0]["id"]
        outcomes = [Outcome(one) for one in sent]
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number, outcome in enumerate(outcomes):
                group.create_task(_send(http, name, number, outcome, began))
        seconds = time.perf_counter() - began
        metrics = _metrics((await http.get("/metrics")).text) if has_metrics else {}
    num_leaked = 0
    if metrics:
        idle = metrics["pagefold:num_free_blocks"] + metrics["pagefold:num_cached_blocks"]
        num_leaked = int(metrics["pagefold:num_blocks"] - idle)
    num_tokens = sum(len(one.gaps_s) + one.sent.prompt_tokens for one in outcomes if one.end_s is not None)
    return HttpRun(
        outcomes, seconds, num_tokens, num_leaked, num_preempted=metrics.get("vllm:num_preemptions_total", 0.0)
    )


async def _send(http: httpx.AsyncClient, model: str, number: int, outcome: Outcome, began: float) -> None:
    """Send one request when its time has come, whatever became of others, and time every piece of its answer."""
    sent = outcome.sent
    await asyncio.sleep(max(0.0, began + sent.at_s - time.perf_counter()))
    rng = Random(number)
    body: dict[str, Any] = {
        "model": model,
        "prompt": [rng.randrange(10, NUM_TOKEN_IDS) for _ in range(sent.prompt_tokens)],
        "max_tokens": sent.max_tokens,
        "min_tokens": sent.output_tokens - 1,
        "logit_bias": {str(EOS): 100},
        "temperature": 0.0,
        "stream": True,
    }
    last = start = time.perf_counter()
    has_ended = False
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == httpx.codes.TOO_MANY_REQUESTS:
                await response.aread()
                outcome.is_shed = True
                assert response.headers.get("retry-after"), "refused without a word on when to come again"
                return
            if response.is_error:
                outcome.error = f"HTTP {response.status_code}: {(await response.aread()).decode()[:200]}"
                return
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                choices = json.loads(line[5:]).get("choices") or ()
                now = time.perf_counter()
                has_ended = has_ended or any(choice.get("finish_reason") for choice in choices)
                if outcome.ttft_s is None:
                    outcome.ttft_s = now - start
                else:
                    outcome.gaps_s.append(now - last)
                last = now
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}"
        return
    if has_ended:
        outcome.end_s = last - began
    else:
        outcome.error = "the stream broke off"


def _metrics(text: str) -> dict[str, float]:
    """Return each metric, its series added up."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name.split("{")[0]] = found.get(name.split("{")[0], 0.0) + float(value)
    return found
