"""KVEventMetrics: what became of batches of KV events, for who reads metrics. They are there while events are sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.observe.kv_event_publisher import KVEventPublisher

__all__ = ["KVEventMetrics"]

_COUNTERS = {
    "pagefold:kv_event_batches_sent": ("num_sent", "Batches of KV events that were published."),
    "pagefold:kv_event_batches_dropped": ("num_dropped", "Batches that were not, since too many waited."),
    "pagefold:kv_event_batches_replayed": ("num_replayed", "Batches that were sent once more to who asked."),
    "pagefold:kv_events_told_anew": ("num_told_anew", "Times that all blocks were told of anew, after a loss."),
    "pagefold:kv_events_told_anew_put_off": (
        "num_put_off",
        "Askings for that which waited, since it had just been done.",
    ),
}
"""Counter to (field of ``SentCounts``, help)."""


class KVEventMetrics:
    """A collector of ``prometheus_client``: looks when it is asked.

    Args:
        model_name: label ``model_name`` of every series, beside ``engine="0"``.
        publisher: what is asked.
    """

    def __init__(self, model_name: str, publisher: KVEventPublisher) -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._publisher = publisher

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counters; ``prometheus_client`` calls it at each reading."""
        counts = self._publisher.counts
        for name, (field, what) in _COUNTERS.items():
            family = CounterMetricFamily(name, what, labels=tuple(self._labels))
            family.add_metric(tuple(self._labels.values()), getattr(counts, field))
            yield family
