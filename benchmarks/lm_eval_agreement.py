"""lm-eval against a server, and against transformers on the same weights: how many answers differ.

The harness itself (``lm-eval`` from PyPI) asks a ``pagefold serve`` in float32 through its ``local-completions`` model,
by ``/v1/completions`` with ``echo`` and ``logprobs``, and transformers in float32 through its ``hf`` model. The task is
made here of text that every Python brings: how a sentence of the standard library's documentation goes on. Of four ways
three are of other sentences. So no data set is fetched.

lm-eval lives in an environment of its own in the cache folder, made by pip at the first run, which sees this one's
torch and transformers.

    python benchmarks/lm_eval_agreement.py [--items 500] [--model smollm2-135m] [--json FILE]
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import random
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import venv
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGES = ["lm-eval[api]==0.4.13"]
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
MODULES = (
    *(
        "argparse",
        "ast",
        "asyncio",
        "calendar",
        "collections",
        "configparser",
        "contextlib",
        "csv",
        "ctypes",
        "datetime",
    ),
    *(
        "decimal",
        "difflib",
        "doctest",
        "email",
        "fractions",
        "functools",
        "gettext",
        "heapq",
        "html",
        "http",
        "heapq",
    ),
    *("inspect", "io", "ipaddress", "json", "locale", "logging", "mailbox", "multiprocessing", "optparse"),
    *(
        "pathlib",
        "pdb",
        "pickle",
        "platform",
        "plistlib",
        "pprint",
        "queue",
        "random",
        "re",
        "sched",
        "secrets",
        "shelve",
    ),
    *("shlex", "shutil", "smtplib", "socket", "sqlite3", "ssl", "statistics", "string", "subprocess", "tarfile"),
    *("tempfile", "textwrap", "threading", "timeit", "tokenize", "trace", "turtle", "types", "typing"),
    *("unittest", "urllib.parse", "urllib.request", "uuid", "warnings", "wave", "weakref", "zipfile"),
)
NUM_CHOICES = 4
START_TIMEOUT_S = 300.0


# The harness.


def harness(cache: Path) -> Path:
    """Return the Python of an environment that has lm-eval; made at the first call.

    Raises:
        subprocess.CalledProcessError: pip could not install it.
    """
    folder = cache / "lm-eval"
    python, whole = folder / "bin" / "python", folder / "whole"
    outer = sysconfig.get_path("purelib")
    made_of = " ".join([*PACKAGES, outer])
    if whole.exists() and whole.read_text() == made_of and python.exists():
        return python
    venv.create(folder, with_pip=True, clear=True)
    # What this environment has, that one has too: torch and transformers are not installed again.
    inside = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (inside / "outer.pth").write_text(outer + "\n")
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), *PACKAGES], check=True)
    whole.write_text(made_of)
    return python


def evaluate(python: Path, tasks: Path, names: list[str], kind: str, **model_args: Any) -> dict[str, Any]:  # noqa: ANN401 - whatever lm-eval takes
    """Run lm-eval and return what it writes: ``results``, and ``samples`` by task.

    Args:
        python: see :func:`harness`.
        tasks: the folder of the tasks' files.
        names: of the tasks.
        kind: lm-eval's name of a kind of models.
        model_args: of that.

    Raises:
        subprocess.CalledProcessError: it failed; its log is on stderr.
    """
    with tempfile.TemporaryDirectory() as out:
        batch_size = model_args.pop("batch_size", 1)
        written = ",".join(f"{name}={value}" for name, value in model_args.items())
        command = [str(python), "-m", "lm_eval", "run", "--model", kind, "--model_args", written]
        command += ["--tasks", ",".join(names), "--include_path", str(tasks), "--output_path", out, "--log_samples"]
        command += ["--batch_size", str(batch_size)]
        command += ["--device", "cpu"] if kind == "hf" else []
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(done.stdout + done.stderr)
            done.check_returncode()
        (results,) = Path(out).rglob("results_*.json")
        told = json.loads(results.read_text())
        told["samples"] = {}
        for name in names:
            (file,) = Path(out).rglob(f"samples_{name}_[0-9]*.jsonl")
            samples = [json.loads(line) for line in file.read_text().splitlines()]
            told["samples"][name] = sorted(samples, key=lambda sample: sample["doc_id"])
        return told


def write_task(folder: Path, name: str, items: list[dict[str, Any]], settings: str) -> None:
    """Write a task: its items, one a line, and the YAML that lm-eval reads."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    head = f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
    (folder / f"{name}.yaml").write_text(head + settings)


GOING_ON = """output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_choice: "choices"
doc_to_target: "{{label}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
"""Settings of :func:`going_on`."""


def going_on(num_items: int) -> list[dict[str, Any]]:
    """Return items: half a sentence, and four ways in which it may go on."""
    rng = random.Random(0)
    sentences = _sentences()
    rng.shuffle(sentences)
    if len(sentences) < num_items:
        msg = f"{len(sentences)} sentences were found, and {num_items} are needed"
        raise SystemExit(msg)
    halves = [_halves(sentence) for sentence in sentences]
    items = []
    for at, (query, ending) in enumerate(halves[:num_items]):
        others = [rng.choice(halves)[1] for _ in range(NUM_CHOICES)]
        choices = [other for other in others if other != ending][: NUM_CHOICES - 1]
        label = at % NUM_CHOICES
        choices.insert(label, ending)
        items.append({"query": query, "choices": choices, "label": min(label, len(choices) - 1)})
    return items


def _sentences() -> list[str]:
    """Return sentences of the standard library's documentation, 12 to 30 words each."""
    found: dict[str, None] = {}
    for name in MODULES:
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some are deprecated in some Pythons
            module = importlib.import_module(name)
            for documented in [module, *vars(module).values()]:
                for one in [documented, *(vars(documented).values() if inspect.isclass(documented) else ())]:
                    text = one.__doc__ if isinstance(getattr(one, "__doc__", None), str) else ""
                    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
                        for sentence in re.split(r"(?<=[.])\s+", " ".join(paragraph.split())):
                            plain = re.fullmatch(r"[A-Z][A-Za-z ,.'-]*\.", sentence)
                            if plain and 12 <= len(sentence.split()) <= 30:
                                found[sentence] = None
    return sorted(found)


def _halves(sentence: str) -> tuple[str, str]:
    words = sentence.split()
    middle = len(words) * 3 // 5
    return " ".join(words[:middle]), " " + " ".join(words[middle:])


# The server.


@contextlib.contextmanager
def served(model: str) -> Iterator[str]:
    """Yield the address of a ``pagefold serve`` in float32, and end it."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pagefold.cli", "serve", model, "--dtype", "float32", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        end_s = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > end_s:
                msg = "pagefold serve did not start"
                raise SystemExit(msg)
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:  # noqa: S310 - ours
        return answer.status == 200
    return False


def main() -> None:
    """Measure, print, write."""
    from report import Row, machine, parser, print_report

    from pagefold.config import cache_dir
    from pagefold.hub.catalog import resolve

    options = parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--items", type=int, default=500)
    args = options.parse_args()
    folder = resolve(args.model, cache_dir())
    python = harness(cache_dir())
    with tempfile.TemporaryDirectory() as tasks:
        write_task(Path(tasks), "going_on", going_on(args.items), GOING_ON)
        runs, seconds = {}, {}
        for name in ("pagefold", "hf"):
            begin = time.perf_counter()
            if name == "hf":
                how: dict[str, Any] = {"pretrained": folder, "dtype": "float32", "batch_size": 8}
                runs[name] = evaluate(python, Path(tasks), ["going_on"], "hf", **how)
            else:
                with served(args.model) as url:
                    how = {"base_url": f"{url}/v1/completions", "model": args.model, "tokenizer": folder}
                    how |= {"tokenizer_backend": "huggingface", "batch_size": 16}
                    runs[name] = evaluate(python, Path(tasks), ["going_on"], "local-completions", **how)
            seconds[name] = time.perf_counter() - begin
    right = {name: [bool(sample["acc"]) for sample in run["samples"]["going_on"]] for name, run in runs.items()}
    differ = sum(ours != theirs for ours, theirs in zip(right["pagefold"], right["hf"], strict=True))
    apart = abs(sum(right["pagefold"]) - sum(right["hf"]))
    farthest = max(_apart(*pair) for pair in zip(*(run["samples"]["going_on"] for run in runs.values()), strict=True))
    most = args.items / 500
    shares = ", ".join(f"{name} {sum(many) / len(many):.4f}" for name, many in right.items())
    rows = [
        Row(f"right of {args.items}, share", "", shares, values={name: sum(many) for name, many in right.items()}),
        Row("items apart in that figure", f"<= {most:g}", str(apart), apart <= most, {"apart": apart}),
        Row("items judged differently", "", str(differ), values={"differ": differ}),
        Row("farthest log-likelihoods of a choice", "", f"{farthest:.1e}", values={"farthest": farthest}),
        Row(
            "seconds, starts included", "", ", ".join(f"{name} {s:.0f}" for name, s in seconds.items()), values=seconds
        ),
    ]
    print_report("lm_eval_agreement", rows, machine(), args.json)


def _apart(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return how far the log-likelihoods of an item's choices are apart at most."""
    told = [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in (ours, theirs)]
    return max(abs(one - other) for one, other in zip(*told, strict=True))


if __name__ == "__main__":
    main()
