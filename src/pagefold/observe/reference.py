"""The reference of all metrics, made from the code: ``python -m pagefold.observe.reference > docs/metrics.md``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pagefold.engine.client import EngineStatus
from pagefold.observe.metrics import Metrics

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["reference"]

_HEAD = """# Metrics

`GET /metrics` is Prometheus' text. This page is made from the code (`python -m pagefold.observe.reference`).

Names, labels and buckets are vLLM's where vLLM has the metric, so dashboards made for it work; what it lacks is
`pagefold:`. Every series has the labels `model_name` and `engine`. No label takes a value that clients choose.

Times are the engine's: a request arrives when it is queued, and a token is there when its step has run. What is told of
whole requests (`request_...`, `e2e_...`) is told when they end, for whatever reason. What warms the server up before
`/ready` answers 200 is counted nowhere.
"""

_ALWAYS = ("model_name", "engine", "le")


def reference() -> str:
    """Return the page, in Markdown."""
    metrics = Metrics("m")
    metrics.watch(EngineStatus)
    families = metrics.read()
    tables = [
        _table("vLLM's", [family for family in families if family.name.startswith("vllm:")]),
        _table("Pagefold's own", [family for family in families if family.name.startswith("pagefold:")]),
    ]
    assert sum(table.count("\n| `") for table in tables) == len(families), "a metric with a prefix of its own"
    return "\n".join((_HEAD, *tables))


def _table(title: str, families: list[Metric]) -> str:
    rows = [f"| {_name(family)} | {family.type} | {family.documentation} |" for family in families]
    return "\n".join((f"## {title}\n", "| metric | type | |", "| --- | --- | --- |", *rows, ""))


def _name(family: Metric) -> str:
    """Return the name as a query has it, with its labels and what they can be."""
    name = f"{family.name}_total" if family.type == "counter" else family.name
    values: dict[str, list[str]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label not in _ALWAYS and value not in values.setdefault(label, []):
                values[label].append(value)
    labels = " ".join(f"`{label}`: {', '.join(known)}" for label, known in values.items())
    return f"`{name}` {labels}".rstrip()


if __name__ == "__main__":
    sys.stdout.write(reference())
