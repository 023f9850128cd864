"""FrontMetrics: what the front of many servers tells of itself, as Prometheus reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from pagefold.index import PrefixIndex
    from pagefold.integrations.ray.front import Front
    from pagefold.routing import Router

__all__ = ["FrontMetrics"]


class FrontMetrics:
    """Collects what router, front and index count.

    Args:
        index: of what replicas hold.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def text(self, router: Router | None, front: Front | None) -> bytes:
        """Return all metrics; of who has met no replica yet only how many there are."""
        registry = CollectorRegistry()
        registry.register(_Now(list(self._families(router, front))))
        return generate_latest(registry)

    def _families(self, router: Router | None, front: Front | None) -> Iterator[Metric]:
        open_replicas = router.open_replicas if router is not None else []
        states = self._index.replicas()
        unknown = [name for name in open_replicas if name not in states or not states[name].is_known]
        yield GaugeMetricFamily("pagefold:router_replicas", "Replicas that get requests.", len(open_replicas))
        yield GaugeMetricFamily(
            "pagefold:router_unknown_replicas",
            "Of those, whose events do not come: what they hold is not known.",
            len(unknown),
        )
        if router is None or front is None:
            return
        requests = CounterMetricFamily("pagefold:router_requests", "Requests routed, by reason.", labels=["reason"])
        for reason, num in sorted(router.num_choices.items()):
            requests.add_metric([reason], num)
        yield requests
        for name, told, num in (
            (
                "retried",
                "Requests that were tried again, their replica having gone with nothing sent.",
                front.num_retried,
            ),
            ("broken", "Answers that ended with an error, their replica having gone in the middle.", front.num_broken),
            ("unread", "Requests whose prompt could not be read, routed by load.", front.num_unread),
        ):
            yield CounterMetricFamily(f"pagefold:router_{name}_requests", told, num)


class _Now:
    """Metrics as they were when they were asked for."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        """Return them."""
        return self._families
