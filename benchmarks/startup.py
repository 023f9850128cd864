"""Second start of the server, from process start to ``/ready``, against plain transformers' import and load.

Workload: ``pagefold serve smollm2-135m`` on a free port, polled every 10 ms until ``/ready`` is 200; and a Python
process that imports transformers and torch and loads tokenizer and model from the same folder, float32. Interleaved
repeats, medians. The first start (which compiles) is not counted. Asserted: the counted starts compile no kernel (Numba
reports each file that it writes to its cache; there must be none, and at least one that it reads).

With ``--first`` instead: CPU time of a first start, which compiles kernels, in a cache folder that has but the model;
of the default, and of codecs, which need more of the kernels.

    python benchmarks/startup.py [--first] [--repeats 5] [--json FILE]
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

from report import Row, machine, parser, print_report
from rich.console import Console
from rich.progress import track

PLAIN = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoTokenizer.from_pretrained(sys.argv[1])
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
"""
ASKED = 2.0
FIRST_STARTS = ("auto", "int8_per_token_head", "kivi2")


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def start_server(*flags: str, **environment: str) -> tuple[float, str]:
    """Return seconds until ``/ready``, and what the server printed."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "pagefold.cli",
        "serve",
        "smollm2-135m",
        "--dtype=float32",
        "--port",
        str(port),
        *flags,
    ]
    start = time.perf_counter()
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "NUMBA_DEBUG_CACHE": "1", **environment},
    )
    try:
        while True:
            if server.poll() is not None:
                sys.exit(f"the server ended:\n{server.communicate()[0]}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                    seconds = time.perf_counter() - start
                    break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.01)
    finally:
        server.terminate()
        output = server.communicate(timeout=60)[0]
    return seconds, output


def first_start(kv_cache_dtype: str, models: Path) -> float:
    """Return the CPU seconds of a start that finds nothing compiled, until it is ended."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / models.name).symlink_to(models)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start_server("--kv-cache-dtype", kv_cache_dtype, PAGEFOLD_CACHE=folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def load_plain(folder: str) -> float:
    """Return seconds of a process that only imports and loads."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", PLAIN, folder], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--first", action="store_true", help="measure first starts instead")
    args = options.parse_args()

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
    start_server()
    load_plain(folder)
    ours, plain, num_compiled, num_loaded = [], [], 0, 0
    for _ in track(range(args.repeats), description="starts", console=Console(stderr=True)):
        seconds, output = start_server()
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
