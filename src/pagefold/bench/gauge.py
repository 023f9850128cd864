"""Gauge: what a server's own metrics say during a load, under vLLM's names."""

from __future__ import annotations

import re

__all__ = ["Gauge"]

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_SAMPLE = re.compile(rf"^([a-zA-Z_:][\w:]*)(?:\{{.*\}})?[ \t]+({_NUMBER})(?:[ \t]+\d+)?[ \t]*$", re.MULTILINE)
_RUNNING, _WAITING, _USAGE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
_PREEMPTIONS, _BLOCKS = "vllm:num_preemptions_total", "pagefold:num_blocks"


class Gauge:
    """Looks at metrics now and then.

    Attributes:
        is_there: whether the server has these metrics.
    """

    def __init__(self) -> None:
        self.is_there = False
        self._running: list[float] = []
        self._waiting: list[float] = []
        self._usage: list[float] = []
        self._preemptions: list[float] = []
        self._num_blocks: int | None = None

    def look(self, metrics: str | None, *, is_last: bool = False) -> None:
        """Take note of a reading in Prometheus' text form; None where there was none."""
        if metrics is None:
            return
        samples: dict[str, float] = {}
        for name, value in _SAMPLE.findall(metrics):  # of several engines behind one address, counts add up
            found = float(value)
            samples[name] = max(samples.get(name, 0.0), found) if name == _USAGE else samples.get(name, 0.0) + found
        if _RUNNING not in samples:
            return
        self.is_there = True
        self._preemptions.append(samples.get(_PREEMPTIONS, 0.0))
        if _BLOCKS in samples:
            self._num_blocks = int(samples[_BLOCKS])
        if not is_last:
            self._running.append(samples[_RUNNING])
            self._waiting.append(samples.get(_WAITING, 0.0))
            self._usage.append(samples.get(_USAGE, 0.0))

    def figures(self) -> dict[str, float | int | None]:
        """Return what was seen: nothing where the server has no such metrics.

        ``mean_running_while_waiting`` is over the readings at which requests waited: what the server holds at most.
        """
        if not self._running:
            return {}
        held = [running for running, waiting in zip(self._running, self._waiting, strict=True) if waiting]
        steady = held[len(held) // 3 :]
        return {
            "max_num_requests_running": max(self._running),
            "mean_running_while_waiting": sum(steady) / len(steady) if steady else None,
            "max_num_requests_waiting": max(self._waiting),
            "max_kv_cache_usage_perc": max(self._usage),
            "num_preemptions": self._preemptions[-1] - self._preemptions[0],
            "num_blocks": self._num_blocks,
        }
