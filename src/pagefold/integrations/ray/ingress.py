"""PagefoldIngress: the address that clients know. It follows which replicas there are, hears their events, relays."""

from __future__ import annotations

import asyncio
import contextlib
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
from pagefold.integrations.ray.front import Front, no_replica, refusal
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

_ALIVE = frozenset({"/health", "/ping"})
_OWN = frozenset({"/metrics", "/replicas"})
"""What the front itself tells, to those who may see what all tenants do."""
_TURN_S = 1.0
"""How long the front waits before it looks again for replicas that have not said who they are, or not finished."""

_FIRST_S = 600.0
"""How long a request waits for the first replica to load its model, in seconds."""


def _tell_failure(following: asyncio.Task[None]) -> None:
    if not following.cancelled() and following.exception() is not None:
        _log.error("the front has lost track of its replicas", exc_info=following.exception())


class _TooLargeError(Exception):
    """A body is longer than it may be."""


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
        path = request.url.path
        if path in _ALIVE:
            return JSONResponse({"status": "ok"})
        try:
            body = await self._body_of(request)
            async with asyncio.timeout(_FIRST_S):
                await self._is_open.wait()
        except TimeoutError:
            return _Relayed(no_replica())
        except _TooLargeError:
            most = self._settings.max_body_bytes
            message = f"The request's body is larger than {most:,} bytes. Send less, or raise --max-body-bytes."
            return _Relayed(refusal(413, message, "invalid_request_error", "request_too_large"))
        assert self._front is not None
        headers = passed_on(request.headers.items())
        if path in _OWN:
            refused = await self._front.may_see_traffic(headers)
            return self._own(path) if refused is None else _Relayed(refused)
        target = path + (f"?{request.url.query}" if request.url.query else "")
        return _Relayed(await self._front.answer(Forwarded(request.method, target, headers, body)))

    def _own(self, path: str) -> Response:
        """Return what the front tells of itself."""
        if path == "/replicas":
            return JSONResponse({"status": "ok", "replicas": self._told()})
        return Response(self._metrics.text(self._router, self._front), media_type=CONTENT_TYPE_LATEST)

    async def _body_of(self, request: Request) -> bytes:
        """Return a request's body, as long as it may be.

        Raises:
            _TooLargeError: it is longer.
        """
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._settings.max_body_bytes:
                raise _TooLargeError
        return bytes(body)

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
        ending: set[str] = set()
        while True:
            known = set(self._router.open_replicas)
            for name in known - self._wanted:
                self._router.drain(name)  # it finishes what it has, and gets nothing more
                self._forget(name)
                ending.add(name)
            for name in self._wanted - known:
                await self._meet(name)
            for name in [name for name in ending if not self._router.num_requests(name)]:
                self._router.remove(name)
                ending.discard(name)
            is_all = not ending and self._wanted <= set(self._router.open_replicas)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if is_all else _TURN_S):
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
