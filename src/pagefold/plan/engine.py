"""Engine: whose memory is planned, and of which version. What an engine takes differs from one to the next."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from pagefold.plan.tables import Device

__all__ = ["OWN", "Engine", "engine_names", "find_engine"]

_NAME = re.compile(r"(?P<name>[a-z]+)(?:\s*==?\s*v?(?P<version>\d{1,4}(?:\.\d{1,6}){0,3})\S{0,40})?")
_LARGE_BYTES = 70 * 2**30
"""vLLM takes a device of so much memory for a large one, unless it is an A100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine, as far as its memory is concerned.

    Attributes:
        name: ``vllm`` or ``pagefold``.
        version: that was asked for; the oldest of its row where none was.
        since: the first version that does as this row says.
        logit_bytes: bytes that sampling holds for each sequence and word of the vocabulary.
        has_row_buffers: whether it holds a row of float32 of the vocabulary for each multiprocessor beside them.
        utilization: share of a device's memory that it takes where nobody says.
        graphs_in_budget: whether CUDA graphs are taken off that share; else they lie beside it.
        even_ratio: kinds of layers with fewer than so many times as many layers as the rarest lie in one group each.
        sources: where this was read.
    """

    name: str
    version: str
    since: str
    logit_bytes: int
    has_row_buffers: bool
    utilization: float
    graphs_in_budget: bool
    even_ratio: float
    sources: tuple[str, ...]

    @property
    def is_ours(self) -> bool:
        """Whether it is Pagefold's own server."""
        return self.name == OWN.name

    @property
    def label(self) -> str:
        """What it is called in a plan."""
        return self.name if self.is_ours else f"{self.name} {self.version}"

    def num_seqs(self, device: Device) -> int:
        """Return how many sequences run at once where nobody says."""
        if self.is_ours:
            return 128
        return 1024 if _is_large(device) else 256

    def num_batched_tokens(self, device: Device) -> int:
        """Return how many tokens a step computes where nobody says."""
        if self.is_ours:
            return 512
        return 8192 if _is_large(device) else 2048


OWN = Engine(
    name="pagefold",
    version="",
    since="",
    logit_bytes=48,
    has_row_buffers=False,
    utilization=0.9,
    graphs_in_budget=True,
    even_ratio=1.0,
    sources=("this package: memory/card.py, memory/capacity.py, kv/geometry.py",),
)
"""Our own server: what it allocates is what is planned, to the byte on a CPU."""


def _is_large(device: Device) -> bool:
    return device.memory_bytes >= _LARGE_BYTES and not device.name.startswith("A100")


@cache
def _rows() -> tuple[dict[str, Any], ...]:
    """The table, the newest first."""
    rows = json.loads((files("pagefold.plan") / "data" / "engines.json").read_text(encoding="utf-8"))
    return tuple(sorted(rows, key=lambda row: _numbers(row["since"]), reverse=True))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def engine_names() -> list[str]:
    """Return what ``--engine`` takes: the oldest version of each row, the newest first, and our own."""
    return [f"{row['name']}=={row['since']}" for row in _rows()] + [OWN.name]


def find_engine(text: str) -> Engine:
    """Return the engine that ``text`` names: ``vllm==0.19``, ``vllm`` for the newest known, or ``pagefold``.

    Raises:
        ConfigError: there is none, or the version is older than all that are known.
    """
    found = _NAME.fullmatch(text.strip().lower())
    rows = _rows() if found is not None and found["name"] == "vllm" else ()
    if found is not None and found["name"] == OWN.name and not found["version"]:
        return OWN
    wanted = found["version"] if found is not None else None
    row = next((row for row in rows if wanted is None or _numbers(wanted) >= _numbers(row["since"])), None)
    if row is None:
        message = f"engine is {text!r}."
        if rows:
            message = f"engine is {text!r}, and of vllm nothing is known before {rows[-1]['since']}."
        raise ConfigError(message, remedy=f"It must be one of {', '.join(engine_names())}, or a version after these.")
    return Engine(version=wanted or row["since"], **(row | {"sources": tuple(row["sources"])}))
