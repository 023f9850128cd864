"""The metrics of a front of many servers, as Prometheus reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.core import Metric

    from pagefold.index import PrefixIndex
    from pagefold.index.order import EventCounts
    from pagefold.integrations.ray.front import Front
    from pagefold.routing import Router

__all__ = ["front_metrics"]


def front_metrics(router: Router, front: Front, index: PrefixIndex, heard: Sequence[EventCounts]) -> bytes:
    """Return all metrics.

    Args:
        router: counts its choices.
        front: counts what was lost.
        index: knows which replicas are known.
        heard: what has come of each replica's events.
    """
    registry = CollectorRegistry()
    registry.register(_Now(list(_families(router, front, index, heard))))
    return generate_latest(registry)


def _families(router: Router, front: Front, index: PrefixIndex, heard: Sequence[EventCounts]) -> Iterator[Metric]:
    replicas = router.open_replicas
    yield GaugeMetricFamily("pagefold:router_replicas", "Replicas that get requests.", len(replicas))
    yield GaugeMetricFamily(
        "pagefold:router_unknown_replicas",
        "Of those, whose events do not come: what they hold is not known.",
        sum(not index.is_known(name) for name in replicas),
    )
    yield _counter("requests", "Requests routed, by reason.", "reason", router.num_choices)
    batches = {
        "sent": sum(each.num_applied - each.num_replayed for each in heard),
        "replayed": sum(each.num_replayed for each in heard),
    }
    told = "Batches of KV events of the replicas that are there, as they were sent or when they were asked for."
    yield _counter("event_batches", told, "how", batches)
    told = "Requests that were tried again, their replica having gone with nothing sent."
    yield CounterMetricFamily("pagefold:router_retried_requests", told, front.num_retried)
    told = "Answers that ended with an error, their replica having gone in the middle."
    yield CounterMetricFamily("pagefold:router_broken_requests", told, front.num_broken)


def _counter(name: str, told: str, label: str, nums: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"pagefold:router_{name}", told, labels=[label])
    for value, num in sorted(nums.items()):
        family.add_metric([value], num)
    return family


class _Now:
    """Metrics as they were when they were asked for."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """Return them."""
        return self._families
