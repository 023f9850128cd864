"""ConnectorStats: what the connector has done since it was last asked, for vLLM's log and its ``/metrics``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["COUNTERS", "GAUGES", "ConnectorPromMetrics", "ConnectorStats"]

COUNTERS = {
    "load_bytes": "Bytes restored from the host's memory into vLLM's KV cache.",
    "load_seconds": "Seconds that restoring took.",
    "store_bytes": "Bytes copied from vLLM's KV cache into the host's memory.",
    "store_seconds": "Seconds that copying into the host's memory took.",
    "loaded_blocks": "Blocks restored into vLLM's KV cache.",
    "stored_blocks": "Blocks copied into the host's memory.",
    "damaged_blocks": "Blocks whose bytes had changed in the host's memory; vLLM computed them anew.",
    "unroomed_blocks": "Blocks that were not copied into the host's memory for want of room.",
    "fetched_blocks": "Blocks brought from slow tiers.",
    "lost_blocks": "Blocks that slow tiers were asked for in vain.",
    "written_blocks": "Blocks that at least one slow tier was given and keeps.",
    "unwritten_blocks": "Blocks that slow tiers were not given, or did not keep.",
    "differing_bytes": "Bytes read back after a restore that are not what was stored; counted with verifies_restored.",
}
"""What only grows, and what it is."""

GAUGES = {
    "held_blocks": "Blocks that the host's memory holds.",
    "host_blocks": "Blocks that the host's memory can hold.",
    "waiting_requests": "Requests that wait for blocks from slow tiers.",
}
"""What goes up and down, and what it is."""

_PREFIX = "vllm:pagefold_"


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Numbers by name: those of :data:`COUNTERS` are added up, of those of :data:`GAUGES` the last one counts."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Begin anew."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Take in what came later."""
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM logs: what is not zero."""
        return {name: round(value, 4) for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not any(value for name, value in self.data.items() if name not in GAUGES)


class ConnectorPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """The same for Prometheus, each beginning with ``vllm:pagefold_``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._of_engine: dict[tuple[str, int], Any] = {}
        kinds = [
            (COUNTERS, metric_types[Counter], {}),
            (GAUGES, metric_types[Gauge], {"multiprocess_mode": "mostrecent"}),
        ]
        for texts, kind, more in kinds:
            for name, text in texts.items():
                metric = kind(name=_PREFIX + name, documentation=text, labelnames=labelnames, **more)
                for engine, values in per_engine_labelvalues.items():
                    self._of_engine[name, engine] = metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in what one engine has done."""
        for name, value in transfer_stats_data.items():
            metric = self._of_engine.get((name, engine_idx))
            if metric is not None and name in GAUGES:
                metric.set(value)
            elif metric is not None and value:
                metric.inc(value)
