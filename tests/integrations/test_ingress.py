"""The front's own process, with a Ray that tells late who is there."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

import pytest
from starlette.requests import Request

from pagefold.integrations.ray.forwarded import Head, ReplicaAddress
from pagefold.integrations.ray.replica_watch import tell_watchers
from pagefold.integrations.ray.settings import FleetSettings

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # of Ray, when it is imported
]


class LateHandle:
    """Ray's handle of one replica, which says who it is when the test lets it."""

    def __init__(self, folder) -> None:
        events, replay = (f"ipc://{folder}/{name}" for name in ("events", "replay"))
        self._address = ReplicaAddress("a", events, replay, 16, 1024)
        self.may_tell = asyncio.Event()
        self.tell = self.forward = self

    def options(self, **_):
        return self

    def remote(self, *asked, replica=""):
        return Answered() if asked else self._tell()

    async def _tell(self):
        await self.may_tell.wait()
        return self._address


class Answered:
    """A whole answer."""

    def __init__(self) -> None:
        self._pieces = [Head("a", 200, ())]

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._pieces:
            raise StopAsyncIteration
        return self._pieces.pop()

    def cancel(self):
        pass


def test_who_comes_before_the_front_knows_a_replica_waits_for_it(tmp_path):
    from pagefold.integrations.ray.ingress import PagefoldIngress

    async def ask():
        handle = LateHandle(tmp_path)
        front = PagefoldIngress(handle, FleetSettings(arguments=("m",)))
        tell_watchers(frozenset({"a"}))
        scope = {"type": "http", "method": "GET", "path": "/replicas", "headers": [], "query_string": b""}
        answer = asyncio.create_task(front(Request(scope)))
        await asyncio.sleep(0.1)  # it would have been told by now that there is no replica
        handle.may_tell.set()
        try:
            return (await answer).status_code
        finally:
            front._following.cancel()
            for heard in [] if front._roster is None else front._roster.heard:
                heard.close()

    assert asyncio.run(ask()) == 200
