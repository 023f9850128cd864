"""Load: when requests are sent. An open loop at a rate, a closed loop with so many at once, or both bounds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from pagefold.bench.gauge import Gauge
from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from pagefold.bench.client import Client
    from pagefold.bench.prompts import Prompt
    from pagefold.bench.record import Record

__all__ = ["LoadResult", "LoadSettings", "run_load"]

_EVERY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """When requests are sent; names and meaning as in ``vllm bench serve``.

    Attributes:
        request_rate: requests a second, on average; infinite for all at once.
        burstiness: 1 for a Poisson process; below, more bursty; above, more even.
        max_concurrency: requests under way at once; None for no bound. With an infinite rate this is a closed loop.
        seed: of the gaps between requests.

    Raises:
        ConfigError: a value is out of range.
    """

    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise _bad("request_rate", self.request_rate, "above 0, or inf")
        if not 0 < self.burstiness < float("inf"):
            raise _bad("burstiness", self.burstiness, "above 0, and finite")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise _bad("max_concurrency", self.max_concurrency, "at least 1")


@dataclass(slots=True)
class LoadResult:
    """What a load came to.

    Attributes:
        records: of all requests, in order of their prompts.
        duration_s: seconds from the first request to the end of the last.
        gauge: what the server's metrics said meanwhile.
    """

    records: list[Record]
    duration_s: float
    gauge: Gauge = field(default_factory=Gauge)


async def run_load(
    client: Client, prompts: Sequence[Prompt], settings: LoadSettings, *, on_done: Callable[[Record], None]
) -> LoadResult:
    """Send all prompts and wait for their ends.

    Args:
        client: of the server.
        prompts: each is sent once.
        settings: when which request is sent.
        on_done: told of each request that has ended.
    """
    bound = asyncio.Semaphore(settings.max_concurrency or len(prompts))
    gauge = Gauge()
    watching = asyncio.create_task(_watch(client, gauge))
    began = time.perf_counter()

    async def send(index: int, prompt: Prompt) -> Record:
        async with bound:
            record = await client.send(prompt, index, began)
        on_done(record)
        return record

    tasks = [asyncio.create_task(send(index, prompts[index])) async for index in _arrivals(len(prompts), settings)]
    records = list(await asyncio.gather(*tasks))
    duration = time.perf_counter() - began
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    gauge.look(await client.metrics(), is_last=True)
    return LoadResult(records, duration, gauge)


async def _arrivals(num_requests: int, settings: LoadSettings) -> AsyncIterator[int]:
    """Yield each request when its time has come; due times do not move when one is late."""
    rng = Random(settings.seed)  # noqa: S311 - a workload, no secret
    began = time.perf_counter()
    due = 0.0
    for index in range(num_requests):
        wait = due - (time.perf_counter() - began)
        if wait > 0:
            await asyncio.sleep(wait)
        yield index
        if settings.request_rate != float("inf"):
            due += rng.gammavariate(settings.burstiness, 1 / (settings.request_rate * settings.burstiness))


async def _watch(client: Client, gauge: Gauge) -> None:
    gauge.look(await client.metrics())
    while gauge.is_there:
        await asyncio.sleep(_EVERY_S)
        gauge.look(await client.metrics())


def _bad(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name} is {value}.", remedy=f"It must be {allowed}.")
