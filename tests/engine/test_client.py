"""EngineThread: streams end, vanish, drain and fail without a hang and without a block left behind."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.engine_thread import EngineThread
from pagefold.engine.planning import plan_engine
from pagefold.errors import AdapterNotFoundError, EngineStoppedError, InvalidRequestError, QueueFullError
from pagefold.request import Caller
from pagefold.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def client(tiny_chat_model: Path) -> Iterator[EngineThread]:
    config = EngineConfig(model=str(tiny_chat_model), kv_cache_memory_bytes=2**20, max_model_len=128, max_num_seqs=4)
    thread = EngineThread(build_engine(plan_engine(config)))
    thread.start()
    yield thread
    thread.drain(0.0)


async def _collect(client: EngineThread, request_id: str, how: SamplingParams) -> list[int]:
    token_ids: list[int] = []
    with closing(client.submit(request_id, [1, 2, 3], how)) as deltas:
        async for delta in deltas:
            token_ids += delta.token_ids
            if delta.finish_reason:
                assert delta.finish_reason == "length"
    return token_ids


async def _until_idle(client: EngineThread) -> None:
    while (status := client.status()).num_running or status.num_waiting:
        await asyncio.sleep(0.005)
    assert status.num_free_blocks + status.num_cached_blocks == status.num_blocks


def test_what_the_engine_refuses_does_not_end_it(client: EngineThread) -> None:
    """As a look into the cache with an adapter that has been unloaded meanwhile."""

    async def run() -> None:
        with pytest.raises(AdapterNotFoundError):
            await client.foresee([1, 2, 3], Caller(adapter="gone"))
        assert client.status().is_healthy
        assert len(await _collect(client, "later", SHORT)) == 5
        assert (await client.foresee([1, 2, 3])).num_hit_tokens >= 0

    asyncio.run(asyncio.wait_for(run(), 120))


def test_streams_run_together_to_their_ends(client: EngineThread) -> None:
    async def run() -> None:
        outputs = await asyncio.gather(*(_collect(client, str(i), SHORT) for i in range(20)))
        assert all(output == outputs[0] and len(output) == 5 for output in outputs)
        await _until_idle(client)

    asyncio.run(asyncio.wait_for(run(), 120))


def test_who_stops_reading_frees_the_blocks(client: EngineThread) -> None:
    async def run() -> None:
        with closing(client.submit("early", [1, 2, 3], LONG)) as deltas:
            async for _ in deltas:
                break
        await _until_idle(client)
        waiting = [asyncio.create_task(_collect(client, f"{i}", LONG)) for i in range(12)]  # more than seats
        while not client.status().num_running:  # the first of them have begun, and none has come far
            await asyncio.sleep(0)
        for task in waiting[::2]:
            task.cancel()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
        assert all(len(result) == 100 for result in results[1::2])
        await _until_idle(client)

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_stream_of_samples_ends_with_the_last_of_them(client: EngineThread) -> None:
    async def run() -> None:
        how = SamplingParams(n=4, max_tokens=5, ignore_eos=True, seed=1)
        with closing(client.submit("samples", [1, 2, 3], how)) as deltas:
            got = [delta async for delta in deltas]
        # A reader that falls behind gets several tokens in a delta.
        assert Counter(delta.index for delta in got for _ in delta.token_ids) == dict.fromkeys(range(4), 5)
        assert [delta.index for delta in got if delta.finish_reason] == [0, 1, 2, 3]
        assert [delta.is_last for delta in got] == [False] * (len(got) - 1) + [True]
        await _until_idle(client)

    asyncio.run(asyncio.wait_for(run(), 120))


def test_each_sample_takes_a_place_until_all_have_ended(tiny_chat_model: Path) -> None:
    config = EngineConfig(model=str(tiny_chat_model), kv_cache_memory_bytes=2**20, max_model_len=128, max_num_seqs=4)
    client = EngineThread(build_engine(plan_engine(config)), max_requests=6)
    client.start()

    async def run() -> None:
        three, four = (SamplingParams(n=n, max_tokens=100, ignore_eos=True) for n in (3, 4))
        first = client.submit("first", [1, 2, 3], three)
        with pytest.raises(QueueFullError, match="queue is full"):
            client.submit("refused", [1, 2, 3], four)
        second = client.submit("second", [1, 2, 3], three)
        with pytest.raises(QueueFullError):
            client.submit("refused", [1, 2, 3], SHORT)
        await anext(first)
        for stream in (first, second):
            stream.close()
        await _until_idle(client)
        assert client._queue.num_requests == 0

    asyncio.run(asyncio.wait_for(run(), 120))
    client.drain(0.0)


def test_what_can_never_be_served_is_refused_at_once(client: EngineThread) -> None:
    async def run() -> None:
        with pytest.raises(InvalidRequestError):
            client.submit("bad", [], SHORT)
        with closing(client.submit("twice", [1, 2, 3], LONG)) as deltas:
            await anext(deltas)
            with pytest.raises(InvalidRequestError, match="in use"):
                await anext(client.submit("twice", [1, 2, 3], LONG))
        await _until_idle(client)

    asyncio.run(asyncio.wait_for(run(), 120))


def test_draining_lets_running_requests_finish(client: EngineThread) -> None:
    async def run() -> None:
        streams = [asyncio.create_task(_collect(client, str(i), LONG)) for i in range(6)]
        while not client.status().num_running:
            await asyncio.sleep(0.005)
        drained = asyncio.create_task(asyncio.to_thread(client.drain, 100.0))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineStoppedError):
            await _collect(client, "late", SHORT)
        assert [len(output) for output in await asyncio.gather(*streams)] == [100] * 6
        assert await drained

    asyncio.run(asyncio.wait_for(run(), 120))


def test_draining_without_time_ends_what_runs(client: EngineThread) -> None:
    async def run() -> None:
        with closing(client.submit("long", [1, 2, 3], LONG)) as deltas:
            await anext(deltas)
            drained = asyncio.create_task(asyncio.to_thread(client.drain, 0.0))
            reasons = [delta.finish_reason async for delta in deltas]
        assert reasons[-1] in {"abort", "length"}
        assert await drained == (reasons[-1] == "length")

    asyncio.run(asyncio.wait_for(run(), 120))


def test_an_engine_that_fails_tells_everybody(client: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        msg = "a bug"
        raise AssertionError(msg)

    async def run() -> None:
        streams = [asyncio.create_task(_collect(client, str(i), LONG)) for i in range(6)]
        while not client.status().num_running:
            await asyncio.sleep(0.005)
        monkeypatch.setattr(client._engine, "step", broken)
        for stream in streams:
            with pytest.raises(EngineStoppedError, match="a bug"):
                await stream
        assert not client.status().is_healthy
        with pytest.raises(EngineStoppedError):
            await _collect(client, "late", SHORT)

    asyncio.run(asyncio.wait_for(run(), 120))


def test_an_engine_that_fails_while_it_drains_tells_everybody(
    client: EngineThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        msg = "a bug"
        raise AssertionError(msg)

    async def run() -> None:
        streams = [asyncio.create_task(_collect(client, str(i), LONG)) for i in range(6)]
        while not client.status().num_running:
            await asyncio.sleep(0.005)
        client._commands.put(lambda: monkeypatch.setattr(client._engine, "step", broken))
        assert not await asyncio.to_thread(client.drain, 100.0)
        for stream in streams:
            with pytest.raises(EngineStoppedError, match="a bug"):
                await stream
        assert client.has_failed

    asyncio.run(asyncio.wait_for(run(), 120))


def test_a_slow_reader_gets_what_waits_as_one(client: EngineThread) -> None:
    """But the end comes alone, and so does every token that has logprobs."""

    async def read(how: SamplingParams) -> list[tuple[str, tuple[int, ...], str | None]]:
        stream = client.submit("slow", [5, 6, 7], how)
        first = await anext(stream)
        await _until_idle(client)
        rest = [delta async for delta in stream]
        return [(delta.text, delta.token_ids, delta.finish_reason) for delta in (first, *rest)]

    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    slow = asyncio.run(read(plain))
    told = asyncio.run(read(dataclasses.replace(plain, logprobs=0)))
    assert [len(token_ids) for _, token_ids, _ in told] == [1] * 12
    assert 2 <= len(slow) <= 4
    assert slow[-1][2] == "length"
    for column in (0, 1):
        joined = [piece for delta in slow for piece in delta[column]]
        assert joined == [piece for delta in told for piece in delta[column]]


def test_a_slow_reader_of_several_samples_gets_what_waits_of_each_as_one(client: EngineThread) -> None:
    how = SamplingParams(n=3, max_tokens=60, ignore_eos=True, seed=1)

    async def read(*, slowly: bool) -> list[tuple[int, str, int]]:
        with closing(client.submit("n", [5, 6, 7], how)) as stream:
            while slowly and client._queue.num_requests:
                await asyncio.sleep(0.005)
            return [(delta.index, delta.text, len(delta.token_ids)) async for delta in stream]

    def by_sample(told: list[tuple[int, str, int]]) -> list[tuple[str, int]]:
        mine = [[delta for delta in told if delta[0] == index] for index in range(3)]
        return [("".join(text for _, text, _ in some), sum(num for *_, num in some)) for some in mine]

    at_once, slow = asyncio.run(read(slowly=False)), asyncio.run(read(slowly=True))
    assert by_sample(slow) == by_sample(at_once)
    assert [num for _, num in by_sample(slow)] == [60] * 3
    assert len(slow) == 6, "of each sample what waits, and its end"
