"""Our histogram beside prometheus_client's own, which takes observations one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as TheirHistogram

from pagefold.observe.histogram import Histogram

BOUNDS = (0.001, 0.5, 1, 2.5, 1_000_000)
VALUES = st.one_of(st.sampled_from([0.0, *BOUNDS, 2e6]), st.floats(0, 3e6))


@given(st.lists(st.tuples(VALUES, st.integers(0, 9))))
def test_equals_prometheus_client_s(observations):
    labels = {"model_name": "m", "engine": "0"}
    ours = Histogram("vllm:x_seconds", "What it is.", labels, BOUNDS)
    registry = CollectorRegistry()
    theirs = TheirHistogram("vllm:x_seconds", "What it is.", tuple(labels), buckets=BOUNDS, registry=registry)
    for value, num in observations:
        ours.observe(value, num)
        for _ in range(num):
            theirs.labels(**labels).observe(value)
    theirs.labels(**labels)
    got, expected = _lines(ours), _lines(registry)
    assert [line for line in got if "_sum" not in line] == [line for line in expected if "_sum" not in line]
    (got_sum,) = [float(line.split()[-1]) for line in got if "_sum" in line]
    (expected_sum,) = [float(line.split()[-1]) for line in expected if "_sum" in line]
    assert got_sum == pytest.approx(expected_sum)


def _lines(collector) -> list[str]:
    return [line for line in generate_latest(collector).decode().splitlines() if "_created" not in line]
