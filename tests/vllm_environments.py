"""vLLM for tests, each version that is known in an environment of its own: where it is, and what a process is told.

``benchmarks/peers/install.py vllm vllm-0.31`` makes them, in ``.peers/`` or wherever ``$PAGEFOLD_PEERS`` says.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from pagefold.integrations.vllm.versions import KNOWN_VERSIONS

__all__ = ["NAMES", "VERSIONS", "python_of", "variables"]

ROOT = Path(__file__).parents[1]
PEERS = Path(os.environ.get("PAGEFOLD_PEERS", ROOT / ".peers"))
NAMES = dict(zip(KNOWN_VERSIONS, ("vllm", "vllm-0.31"), strict=True))
"""What the environment of a version is called in ``peers.toml``."""


def python_of(version: str) -> Path:
    """The interpreter of a version's environment; it may not be there."""
    return PEERS / NAMES[version] / "bin" / "python"


VERSIONS = [
    pytest.param(
        version,
        marks=pytest.mark.skipif(
            not python_of(version).exists(),
            reason=f"vLLM {version} is not there: benchmarks/peers/install.py {NAMES[version]}",
        ),
    )
    for version in KNOWN_VERSIONS
]
"""Values for a test or a fixture: the versions, each skipped where it is not there."""


def variables(lent: Path) -> dict[str, str]:
    """The environment variables of a process in vLLM's interpreter: Pagefold as it lies here, and nothing of the hub's.

    Args:
        lent: an empty folder, or one that this has filled: what ``pip install 'pagefold[vllm]'`` would bring.
    """
    for name in ("xxhash", "redis"):
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None, "a package"
        if not (lent / name).exists():
            (lent / name).symlink_to(Path(spec.origin).parent)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", lent))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
