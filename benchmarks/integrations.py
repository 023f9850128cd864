"""Pagefold inside other engines: what each part finds and keeps, against what the engine has itself.

    python benchmarks/integrations.py [--only PART ...] [--trace FILE] [--stores N] [--kills N] [--json FILE]

- ``policy``: hit tokens of vLLM's CPU tier on mooncake_conversation.jsonl with ``PagefoldPolicy``, LRU and ARC at equal
  sizes, vLLM's own manager driven as its scheduler drives it (``integrations/policy_replay.py``), and Belady's bound.
- ``tier``: bytes on the disk over the limit while chunks are stored and processes are killed, and flipped bytes that
  become anything but a miss, of ``PagefoldTier`` and of vLLM's own filesystem tier (``integrations/tier_kill.py``).
- ``connector``: vLLM on this CPU with ``PagefoldConnector`` over vLLM alone, as ``vllm_connector.py`` says; it takes an
  hour, and its options.

They run in vLLM's Python, from ``.peers/vllm`` (``make peers``). The trace is looked for in the folder
$PAGEFOLD_TRACES, else in ../shared/traces beside the repository.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm_connector
from report import Row, machine, parser, print_report

from pagefold.sim.belady import BeladyCache, next_uses
from pagefold.sim.traces import traces_folder

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("PAGEFOLD_PEERS", HERE.parent / ".peers")) / "vllm" / "bin" / "python"
TRACE = "mooncake_conversation.jsonl"
CHUNK_TOKENS = 512
SIZES = {3_000: "1.5M", 5_859: "3.0M", 10_000: "5.1M", 20_000: "10.2M"}
ASKED_AT = 5_859
ASKED_OF_LRU = 1.2
FS_SHARE = 10
"""vLLM's own tier gets one store and one kill in so many: it has no limit, and to look at all its files takes long."""


def in_vllm(script: str, *arguments: object) -> dict[str, Any]:
    """Run a script in vLLM's Python, and return the line of JSON that it prints last."""
    with tempfile.TemporaryDirectory() as lent:  # what the extra "vllm" installs there
        for name in ("xxhash",):
            spec = find_spec(name)
            assert spec is not None, f"{name} is of the extra serve"
            assert spec.origin is not None, "a package"
            (Path(lent) / name).symlink_to(Path(spec.origin).parent)
        env = {**os.environ, "PYTHONPATH": f"{HERE.parent / 'src'}:{lent}", "VLLM_LOGGING_LEVEL": "ERROR"}
        command = [str(PYTHON), str(HERE / "integrations" / script), *map(str, arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def belady_hit_tokens(trace: Path, num_chunks: int) -> int:
    """Return how many tokens whoever knows the future finds, with bypass."""
    paths = []
    with trace.open(encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            paths.append(request["hash_ids"][: request["input_length"] // CHUNK_TOKENS])
    cache = BeladyCache(num_chunks)
    nexts = next_uses(paths)
    return CHUNK_TOKENS * sum(cache.use(path, after) for path, after in zip(paths, nexts, strict=True))


def measure_policy(args: argparse.Namespace) -> list[Row]:
    """Return hit tokens by size and policy."""
    folder = traces_folder()
    trace = args.trace or (folder and folder / TRACE)
    if trace is None:
        return [Row(f"{TRACE} was not found: give --trace", "", "skipped")]
    rows = []
    for num_chunks, size in SIZES.items():
        found = {
            policy: in_vllm("policy_replay.py", trace, policy, num_chunks)
            for policy in ("lru", "arc", "PagefoldPolicy")
        }
        lru, ours = found["lru"]["hit_tokens"], found["PagefoldPolicy"]["hit_tokens"]
        belady = belady_hit_tokens(trace, num_chunks)
        rows.append(
            Row(
                f"hit tokens, vLLM's CPU tier of {size} tokens: PagefoldPolicy over LRU",
                f">= {ASKED_OF_LRU} x" if num_chunks == ASKED_AT else "",
                f"{ours / lru:.2f} x ({ours / 1e6:.1f}M; LRU {lru / 1e6:.1f}M, "
                f"ARC {found['arc']['hit_tokens'] / 1e6:.1f}M, Belady {belady / 1e6:.1f}M)",
                ours / lru >= ASKED_OF_LRU if num_chunks == ASKED_AT else None,
                {**found, "belady_hit_tokens": belady},
            )
        )
    return rows


def measure_tier(args: argparse.Namespace) -> list[Row]:
    """Return what kills and flipped bytes do to our tier, and to vLLM's own."""
    rows = []
    for tier, name, share in (("pagefold", "PagefoldTier", 1), ("fs", "vLLM's fs tier", FS_SHARE)):
        asked = ("--stores", args.stores // share, "--kills", max(1, args.kills // share))
        with tempfile.TemporaryDirectory() as folder:
            found = in_vllm("tier_kill.py", tier, Path(folder) / "tier", *asked)
        over = max(0, found["most_bytes"] - found["limit_bytes"])
        wrong = found["wrong_after_kills"] + found["wrong_after_flips"]
        ours = tier == "pagefold"
        what = f"{found['num_stores']:,} stores, {found['num_kills']} times kill -9"
        rows += [
            Row(
                f"{name}: bytes over {found['limit_bytes']:,}, {what}",
                "0" if ours else "",
                f"{over:,}",
                not over if ours else None,
                found,
            ),
            Row(
                f"{name}: chunks with wrong bytes that vLLM got, of {found['num_flipped']} with a flipped bit",
                "0" if ours else "",
                f"{wrong}",
                not wrong if ours else None,
            ),
        ]
    return rows


PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "tier": measure_tier,
    "policy": measure_policy,
    "connector": vllm_connector.connector,
}


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--trace", type=Path, help="the trace of conversations")
    options.add_argument("--stores", type=int, default=100_000)
    options.add_argument("--kills", type=int, default=100)
    vllm_connector.add_options(options)
    args = options.parse_args()
    rows = [Row(f"{PYTHON} is not there: make peers", "", "skipped")]
    if PYTHON.exists():
        rows = [row for part in args.only for row in PARTS[part](args)]
    print_report("Inside other engines", rows, machine(), args.json)


if __name__ == "__main__":
    main()
