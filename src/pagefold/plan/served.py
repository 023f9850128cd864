"""Served: what a running server says of its cache and of what it does now, in the words of its metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.plan.start_log import StartLog

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Served", "read_served"]

_LINE = re.compile(
    r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\d{1,18}(?:\.\d{1,18})?(?:[eE][-+]?\d{1,2})?)(?: \d+)?$",
    re.MULTILINE,
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_CACHE = "vllm:cache_config_info"
_NOW: Mapping[str, str] = {
    "vllm:num_requests_running": "requests that run",
    "vllm:num_requests_waiting": "requests that wait",
    "vllm:kv_cache_usage_perc": "share of KV blocks in use",
    "vllm:gpu_cache_usage_perc": "share of KV blocks in use",
    "vllm:num_preemptions_total": "preemptions since the start",
}
_OPTIONS: Mapping[str, str] = {
    "block_size": "block_size",
    "cache_dtype": "kv_cache_dtype",
    "gpu_memory_utilization": "gpu_memory_utilization",
}
_VALUES = {
    "block_size": re.compile(r"[1-9]\d{0,11}"),
    "kv_cache_dtype": re.compile(r"(?!None$|auto$)\w{1,40}"),
    "gpu_memory_utilization": re.compile(r"[01](?:\.\d{1,9})?"),
}
"""What an option may be."""
_LONGEST = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Served:
    """A running server.

    Attributes:
        log: what its start would have said, as far as it still says so.
        now: what it does now, by what it is.
    """

    log: StartLog
    now: Mapping[str, float]


def read_served(
    metrics: str, url: str, *, model: str = "", max_model_len: int | None = None, version: str = ""
) -> Served:
    """Return what a server says.

    Args:
        metrics: as ``/metrics`` has them.
        url: of the server, for errors.
        model: that it serves, where it says so.
        max_model_len: the longest sequence that it serves, where it says so.
        version: of vLLM, where it says so.

    Raises:
        ConfigError: there is no cache in it.
    """
    found = [
        (line["name"], dict(_LABEL.findall(line["labels"] or "")), line["value"])
        for line in _LINE.finditer(metrics[:_LONGEST])
    ]
    cache = next((labels for name, labels, _ in found if name == _CACHE), None)
    if cache is None:
        message = f"{url} has no {_CACHE} among its metrics."
        raise ConfigError(
            message, remedy="Name the server of a vLLM or of Pagefold; vLLM must not have --disable-log-stats."
        )
    is_ours = any(name.startswith("pagefold:") for name, _, _ in found)
    options = {"model": model} if model else {}
    if max_model_len is not None:
        options["max_model_len"] = str(max_model_len)
    for label, option in _OPTIONS.items():
        value = cache.get(label, "")
        if _VALUES[option].fullmatch(value):
            options[option] = value
    num_blocks = cache.get("num_gpu_blocks", "")
    counts = {"num_blocks": float(num_blocks)} if _VALUES["block_size"].fullmatch(num_blocks) else {}
    now: dict[str, float] = {}
    for name, _, value in found:
        if name in _NOW:
            now[_NOW[name]] = now.get(_NOW[name], 0.0) + float(value)
    engine = "pagefold" if is_ours else f"vllm=={version}" if version else "vllm"
    return Served(StartLog(engine, options, {}, counts), now)
