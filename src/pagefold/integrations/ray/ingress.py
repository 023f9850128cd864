"""PagefoldIngress: the address that clients know. It follows which replicas there are, hears their events, relays."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import ray
from prometheus_client import CONTENT_TYPE_LATEST
from ray.serve.exceptions import RayServeException
from starlette.responses import JSONResponse, Response, StreamingResponse

from pagefold.config import environment_hash_seed
from pagefold.index import DEFAULT_SEED, PrefixIndex
from pagefold.index.subscriber import KVEventSubscriber
from pagefold.integrations.ray.accounts import tenants_of
from pagefold.integrations.ray.forwarded import Forwarded, ReplicaLostError, passed_on
from pagefold.integrations.ray.front import Front
from pagefold.integrations.ray.front_metrics import FrontMetrics
from pagefold.integrations.ray.prompts import TokenizedPrompts
from pagefold.integrations.ray.replica_watch import watch_replicas
from pagefold.routing import ROUTING_POLICIES, Router

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ray.serve.handle import DeploymentHandle
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from pagefold.integrations.ray.forwarded import Head, ReplicaAddress
    from pagefold.integrations.ray.front import Answer
    from pagefold.integrations.ray.settings import FleetSettings

__all__ = ["PagefoldIngress"]

_log = logging.getLogger("ray.serve")

_OF_ONE = "/replicas/"
_FIRST_S = 600.0
"""How long a request waits for the first replica to load its model, in seconds."""


def _tell_failure(following: asyncio.Task[None]) -> None:
    if not following.cancelled() and following.exception() is not None:
        _log.error("the front has lost track of its replicas", exc_info=following.exception())


class _Relayed(StreamingResponse):
    """A response that lets go of its answer however it ends."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.body, answer.head.status)
        self._answer = answer
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.head.headers]
        self.raw_headers = encoded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._answer.body.aclose()


class PagefoldIngress:
    """The front of replicas.

    Args:
        replicas: Ray's handle of them.
        settings: of them and of the front.
    """

    def __init__(self, replicas: DeploymentHandle, settings: FleetSettings) -> None:
        self._replicas = replicas
        self._settings = settings
        self._index = PrefixIndex()
        self._subscribers: dict[str, KVEventSubscriber] = {}
        self._tenant_of = tenants_of(settings.api_key_file)
        self._router: Router | None = None
        self._front: Front | None = None
        self._loop = asyncio.get_running_loop()
        self._wanted: frozenset[str] = frozenset()
        self._has_changed = asyncio.Event()
        self._is_open = asyncio.Event()
        self._metrics = FrontMetrics(self._index)
        watch_replicas(self._note_soon)
        self._following = self._loop.create_task(self._follow())
        self._following.add_done_callback(_tell_failure)

    async def __call__(self, request: Request) -> Response:
        """Answer a client."""
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        if target == "/metrics":
            return Response(self._metrics.text(self._router, self._front), media_type=CONTENT_TYPE_LATEST)
        if target in ("/replicas", "/health", "/ping"):
            return JSONResponse({"status": "ok", "replicas": self._told()})
        asked = Forwarded(request.method, target, passed_on(request.headers.items()), await request.body())
        async with asyncio.timeout(_FIRST_S):
            await self._is_open.wait()
        assert self._front is not None
        return _Relayed(await self._front.answer(asked))

    # Who there is.

    def _told(self) -> list[dict[str, Any]]:
        states = self._index.replicas()
        open_replicas = self._router.open_replicas if self._router is not None else []
        return [
            {
                "replica": name,
                "is_known": name in states and states[name].is_known,
                "num_blocks": states[name].num_blocks if name in states else 0,
                "num_requests": self._router.num_requests(name) if self._router is not None else 0,
            }
            for name in open_replicas
        ]

    def _note_soon(self, names: frozenset[str]) -> None:
        """Note who there is; on any thread."""
        self._loop.call_soon_threadsafe(self._note, names)

    def _note(self, names: frozenset[str]) -> None:
        self._wanted = names
        self._has_changed.set()

    async def _follow(self) -> None:
        """Let the router know who comes and goes."""
        first: ReplicaAddress = await self._replicas.tell.remote()  # which makes Ray tell who there is
        self._open(first)
        assert self._router is not None
        while True:
            known = set(self._router.open_replicas)
            for name in known - self._wanted:
                self._router.drain(name)  # it finishes what it has, and gets nothing more
                self._forget(name)
            for name in self._wanted - known:
                await self._meet(name)
            await self._has_changed.wait()
            self._has_changed.clear()

    def _open(self, first: ReplicaAddress) -> None:
        policy = ROUTING_POLICIES[self._settings.routing]()
        self._router = Router(policy, self._index, block_size=first.block_size, cache_tokens=first.cache_tokens)
        seed = environment_hash_seed() or DEFAULT_SEED
        prompts = TokenizedPrompts(self._send, first.block_size, self._tenant_of, seed)
        self._front = Front(self._router, self._send, prompts, time.monotonic)

    async def _meet(self, name: str) -> None:
        """Hear a new replica's events, and give it requests from now on."""
        assert self._router is not None
        try:
            address = await self._replicas.tell.remote(replica=name)
        except (ray.exceptions.RayError, RayServeException):
            _log.warning("%s is gone before it said where it is", name)
            return
        if address.replica != name:  # it has gone, and another one answered
            return
        self._subscribers[name] = KVEventSubscriber(self._index, name, address.events, replay_endpoint=address.replay)
        self._router.add(name)
        self._is_open.set()

    def _forget(self, name: str) -> None:
        subscriber = self._subscribers.pop(name, None)
        if subscriber is not None:
            self._loop.run_in_executor(None, subscriber.close).add_done_callback(
                lambda _: self._index.replica_gone(name)
            )
        assert self._router is not None
        if not self._router.open_replicas:
            self._is_open.clear()

    async def _send(self, replica: str, asked: Forwarded) -> AsyncGenerator[Head | bytes]:
        """Send a request to a replica through Ray, which counts it there; see :class:`Send`."""
        pieces = self._replicas.options(stream=True).forward.remote(asked, replica=replica)
        try:
            async for piece in pieces:
                yield piece
        except (ray.exceptions.RayActorError, RayServeException) as error:
            msg = f"Replica {replica} has gone: {error}"
            raise ReplicaLostError(msg) from None
        finally:
            pieces.cancel()
