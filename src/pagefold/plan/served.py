"""Served: what a running server says of its cache and of what it does now, in the words of its metrics."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from pagefold.errors import ConfigError
from pagefold.plan.start_log import RUNS, StartLog

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prometheus_client.samples import Sample

__all__ = ["Served", "read_served"]

_CACHE = "vllm:cache_config_info"
_SUMS: Mapping[str, str] = {
    "vllm:num_requests_running": "requests that run",
    "vllm:num_requests_waiting": "requests that wait",
    "vllm:num_preemptions_total": "preemptions since the start",
}
"""What all engines of a server have together."""
_SHARE_NAMES = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""Names of one share, the newest first: a version may have both."""
_OPTIONS: Mapping[str, str] = {
    "block_size": "block_size",
    "cache_dtype": "kv_cache_dtype",
    "gpu_memory_utilization": "gpu_memory_utilization",
}
_VALUES = {
    "block_size": re.compile(r"[1-9]\d{0,11}"),
    "kv_cache_dtype": re.compile(r"(?!None$|auto$)\w{1,40}"),
    "gpu_memory_utilization": re.compile(r"[01](?:\.\d{1,20})?"),
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
        ConfigError: these are no metrics, or there is no cache in them.
    """
    try:
        families = text_string_to_metric_families(metrics[:_LONGEST])
        found = [sample for family in families for sample in family.samples]
    except (ValueError, IndexError) as error:
        message = f"What {url} has as its metrics cannot be read: {error}."
        raise ConfigError(message, remedy="Name the server of a vLLM or of Pagefold, not a page about it.") from None
    cache = next((sample.labels for sample in found if sample.name == _CACHE), None)
    if cache is None:
        message = f"{url} has no {_CACHE} among its metrics."
        raise ConfigError(
            message, remedy="Name the server of a vLLM or of Pagefold; vLLM must not have --disable-log-stats."
        )
    is_ours = any(sample.name.startswith("pagefold:") for sample in found)
    options = {"model": model} if model else {}
    if max_model_len is not None:
        options["max_model_len"] = str(max_model_len)
    for label, option in _OPTIONS.items():
        value = cache.get(label, "")
        if _VALUES[option].fullmatch(value):
            options[option] = value
    num_blocks = cache.get("num_gpu_blocks", "")
    counts = {"num_blocks": float(num_blocks)} if _VALUES["block_size"].fullmatch(num_blocks) else {}
    engine = "pagefold" if is_ours else f"vllm=={version}" if version else "vllm"
    return Served(StartLog(engine, options, {}, counts, RUNS, url), _now(found))


def _now(found: Sequence[Sample]) -> dict[str, float]:
    """Return what goes on: sums over the engines of a server, and of shares their mean."""
    now = {}
    for name, what in _SUMS.items():
        values = _finite(found, name)
        if values and math.isfinite(sum(values)):
            now[what] = sum(values)
    shares = next((values for name in _SHARE_NAMES if (values := _finite(found, name))), [])
    if shares and math.isfinite(sum(shares)):
        now["share of KV blocks in use"] = sum(shares) / len(shares)
    return now


def _finite(found: Sequence[Sample], name: str) -> list[float]:
    return [sample.value for sample in found if sample.name == name and math.isfinite(sample.value)]
