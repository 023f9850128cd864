"""SeriesMaker: makes metrics that have some labels in common, each with all its series from the beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter

from pagefold.observe.histogram import Histogram, Histograms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prometheus_client import CollectorRegistry

__all__ = ["SeriesMaker"]


class SeriesMaker:
    """Makes metrics, and registers them.

    Args:
        registry: of those who read them.
        labels: of every series.
    """

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = labels

    def counter(self, name: str, what: str) -> Counter:
        """Make a counter, with what is said of it; ``_total`` is put behind its name."""
        return Counter(name, what, tuple(self._labels), registry=self._registry).labels(**self._labels)

    def counters(self, name: str, what: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        """Make a series for each value of a label, so that a reader sees zeros and not gaps."""
        counter = Counter(name, what, (*self._labels, label), registry=self._registry)
        return {value: counter.labels(**self._labels, **{label: value}) for value in values}

    def histogram(self, name: str, what: str, bounds: Sequence[float]) -> Histogram:
        """Make a histogram; ``bounds`` are the largest value of each bucket."""
        histogram = Histogram(name, what, self._labels, bounds)
        self._registry.register(histogram)
        return histogram

    def histograms(
        self, name: str, what: str, bounds: Sequence[float], label: str, values: Sequence[str]
    ) -> Histograms:
        """Make a histogram for each value of a label."""
        histograms = Histograms(name, what, self._labels, bounds, label=label, values=values)
        self._registry.register(histograms)
        return histograms
