"""Second start of the server, from process start to ``/ready``, against plain transformers' import and load.

Workload: ``pagefold serve smollm2-135m`` on a free port, polled every 10 ms until ``/ready`` is 200; and a Python
process that imports transformers and torch and loads tokenizer and model from the same folder, float32. Interleaved
repeats, medians. The first start (which compiles) is not counted. Asserted: the counted starts compile no kernel (Numba
reports each file that it writes to its cache; there must be none, and at least one that it reads).

With ``--first`` instead: CPU time of a first start, which compiles kernels, in a cache folder that has but the model;
of the default, and of codecs, which need more of the kernels.

With ``--peer`` instead: a second start on the 4-bit file that the model's wheel has, to ``/ready``, over that of
llama.cpp's ``llama-server --no-repack`` on the same file, to ``/health``; and a Python that only imports torch, over
the same.

    python benchmarks/startup.py [--first | --peer] [--repeats 5] [--environments .peers] [--json FILE]
"""

from __future__ import annotations

import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from report import Row, machine, parser, print_report
from rich.console import Console
from rich.progress import track

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1])
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
"""
MODEL, FILE = "smollm2-135m", "smollm2-135m:Q4_1"
ASKED, ASKED_PEER = 2.0, 1.5
FIRST_STARTS = ("auto", "int8_per_token_head", "kivi2")


class Start(NamedTuple):
    """How long a server took to answer, and what it printed."""

    seconds: float
    output: str


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def until(path: str, command: list[str], **environment: str) -> Start:
    """Start a server on a free port, poll ``path`` until it answers 200, and end the server."""
    port = free_port()
    began = time.perf_counter()
    server = subprocess.Popen(
        [*command, "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        while True:
            if server.poll() is not None:
                sys.exit(f"the server ended:\n{server.communicate()[0]}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
                    seconds = time.perf_counter() - began
                    break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.01)
    finally:
        server.terminate()
        output = server.communicate(timeout=60)[0]
    return Start(seconds, output)


def start_server(*flags: str, model: str = MODEL, **environment: str) -> Start:
    """Start ours."""
    command = [sys.executable, "-m", "pagefold.cli", "serve", model, *flags]
    return until("/ready", command, **{"NUMBA_DEBUG_CACHE": "1"} | environment)


def first_start(kv_cache_dtype: str, models: Path) -> float:
    """Return the CPU seconds of a start that finds nothing compiled, until it is ended."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / models.name).symlink_to(models)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start_server("--dtype=float32", "--kv-cache-dtype", kv_cache_dtype, PAGEFOLD_CACHE=folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run_python(code: str, *arguments: str) -> float:
    """Return the seconds of a Python process that runs some lines."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def load_plain(folder: str) -> float:
    """Return seconds of a process that only imports and loads."""
    return run_python(PLAIN, folder)


def beside_llama(environments: Path, repeats: int) -> list[Row]:
    """Compare second starts on a 4-bit file with llama.cpp's."""
    from peers import llamacpp_program, places

    binary = llamacpp_program(environments, "llama-server")
    if binary is None:
        return [Row("second start over llama.cpp's", "", "not measured: llama.cpp is not installed (make peers)")]
    # Weights as they lie in the file, which is the faster start; those that it repacks for AMX end it by a signal here
    # and there.
    command = [str(binary), "--no-repack", "-m", places(environments, MODEL)["gguf"], "--host", "127.0.0.1"]
    runs: dict[str, Callable[[], float]] = {
        "ours": lambda: start_server(model=FILE, NUMBA_DEBUG_CACHE="0").seconds,
        "llama.cpp": lambda: until("/health", command).seconds,
        "torch": lambda: run_python("import torch"),
    }
    took: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in track(range(-1, repeats), description="starts", console=Console(stderr=True)):
        for name, run in runs.items():
            seconds = run()
            if repeat >= 0:  # the first of each fills the system's cache of files
                took[name].append(seconds)
    medians = {name: statistics.median(each) for name, each in took.items()}
    theirs = took["llama.cpp"]
    ratios = {name: statistics.median(a / b for a, b in zip(took[name], theirs, strict=True)) for name in runs}
    what = f"second start on {FILE} {medians['ours']:.2f} s over llama.cpp's {medians['llama.cpp']:.2f} s"
    only = f"a Python that only imports torch {medians['torch']:.2f} s, likewise"
    ratio = ratios["ours"]
    return [
        Row(what, f"<= {ASKED_PEER} x", f"{ratio:.2f} x", ratio <= ASKED_PEER, {"seconds": took}),
        Row(only, "", f"{ratios['torch']:.2f} x"),
    ]


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=5)
    others = options.add_mutually_exclusive_group()
    others.add_argument("--first", action="store_true", help="measure first starts instead")
    others.add_argument("--peer", action="store_true", help="measure starts beside llama.cpp instead")
    options.add_argument("--environments", type=Path, default=Path(__file__).parents[1] / ".peers")
    args = options.parse_args()
    if args.peer:
        print_report("startup", beside_llama(args.environments.resolve(), args.repeats), machine(), args.json)
        return

    from pagefold.config import cache_dir
    from pagefold.hub.catalog import resolve

    folder = str(resolve("smollm2-135m", cache_dir()))
    if args.first:
        seconds = {name: first_start(name, cache_dir() / "models") for name in FIRST_STARTS}
        rows = [
            Row(
                f"first start, --kv-cache-dtype {name}: CPU time", asked="", got=f"{one:.0f} s", values={"seconds": one}
            )
            for name, one in seconds.items()
        ]
        print_report("startup", rows, machine(), args.json)
        return
    start_server("--dtype=float32")
    load_plain(folder)
    ours, plain, num_compiled, num_loaded = [], [], 0, 0
    for _ in track(range(args.repeats), description="starts", console=Console(stderr=True)):
        seconds, output = start_server("--dtype=float32")
        ours.append(seconds)
        plain.append(load_plain(folder))
        num_compiled += len(re.findall(r"\[cache\] data saved to", output))
        num_loaded += len(re.findall(r"\[cache\] data loaded from", output))
    assert num_compiled == 0, f"{num_compiled} kernels were compiled by second starts"
    assert num_loaded > 0, "no kernel was loaded from the cache: nothing was shown"
    ratio = statistics.median(a / b for a, b in zip(ours, plain, strict=True))
    what = f"second start to /ready {statistics.median(ours):.2f} s over transformers {statistics.median(plain):.2f} s"
    rows = [
        Row(what, asked=f"<= {ASKED} x", got=f"{ratio:.2f} x", ok=ratio <= ASKED),
        Row("kernels compiled by second starts", asked="0", got=str(num_compiled), ok=num_compiled == 0),
    ]
    print_report("startup", rows, machine(), args.json)


if __name__ == "__main__":
    main()
