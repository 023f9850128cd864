"""Histograms that take many equal observations at once; ``prometheus_client``'s own takes them one by one."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric

__all__ = ["Histogram", "Histograms"]


class Histogram:
    """Counts values in buckets; a collector of ``prometheus_client``. Not locked: whoever calls it is.

    Args:
        name: of the metric.
        what: help of the metric.
        labels: of its series.
        bounds: the largest value of each bucket, ascending; one without a bound follows.
    """

    def __init__(self, name: str, what: str, labels: Mapping[str, str], bounds: Sequence[float]) -> None:
        self._name = name
        self._what = what
        self._labels = dict(labels)
        self._bounds = [float(bound) for bound in bounds]
        self._nums = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, num: int = 1) -> None:
        """Count ``value`` so many times."""
        self._nums[bisect_left(self._bounds, value)] += num
        self._sum += value * num

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram as it is now."""
        family = HistogramMetricFamily(self._name, self._what, labels=tuple(self._labels))
        self.add_to(family)
        yield family

    def add_to(self, family: HistogramMetricFamily) -> None:
        """Add its series to a family that has its labels."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._nums), strict=True))
        family.add_metric(tuple(self._labels.values()), buckets, self._sum)


class Histograms:
    """One histogram for each value of a label; a collector as :class:`Histogram` is.

    Args:
        name, what, labels, bounds: as of each of them.
        label: in which they differ.
        values: that it takes. There is a series for each from the beginning.
    """

    def __init__(  # noqa: PLR0913 - a metric, by name
        self,
        name: str,
        what: str,
        labels: Mapping[str, str],
        bounds: Sequence[float],
        *,
        label: str,
        values: Sequence[str],
    ) -> None:
        self._name = name
        self._what = what
        self._labels = (*labels, label)
        self._of = {value: Histogram(name, what, {**labels, label: value}, bounds) for value in values}

    def __getitem__(self, value: str) -> Histogram:
        """Return the histogram of a value."""
        return self._of[value]

    def collect(self) -> Iterator[Metric]:
        """Yield them as they are now."""
        family = HistogramMetricFamily(self._name, self._what, labels=self._labels)
        for histogram in self._of.values():
            histogram.add_to(family)
        yield family
