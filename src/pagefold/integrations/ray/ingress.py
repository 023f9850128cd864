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
from pagefold.errors import PagefoldError
from pagefold.index import DEFAULT_SEED, PrefixIndex
from pagefold.index.subscriber import KVEventSubscriber
from pagefold.integrations.ray.accounts import tenants_of
from pagefold.integrations.ray.forwarded import Forwarded, ReplicaLostError, passed_on
from pagefold.integrations.ray.front import Front, no_replica, refusal
from pagefold.integrations.ray.front_metrics import front_metrics
from pagefold.integrations.ray.prompts import TokenizedPrompts
from pagefold.integrations.ray.replica_watch import watch_replicas
from pagefold.integrations.ray.roster import Roster
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
_MOST_BODIES = 64
"""So many bodies of the largest size may be on their way at once."""
_MEET_S = 5.0
"""How long requests wait at a front that has just started until it knows a replica: Ray sends them at once."""
_BODY_S = 300.0
"""How long a body may take to come, in seconds."""


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
        self._tenant_of = tenants_of(settings.api_key_file)
        self._router: Router | None = None
        self._front: Front | None = None
        self._loop = asyncio.get_running_loop()
        self._roster: Roster | None = None
        self._wanted: frozenset[str] = frozenset()
        self._num_body_bytes = 0
        self._has_met = asyncio.Event()
        self._waits_until_s = self._loop.time() + _MEET_S
        watch_replicas(self._note_soon)
        self._following = self._loop.create_task(self._follow())

    async def __call__(self, request: Request) -> Response:
        """Answer a client."""
        path = request.url.path
        if path in _ALIVE:
            return JSONResponse({"status": "ok"})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(None if self._has_met.is_set() else self._waits_until_s):
                await self._has_met.wait()
        front, router = self._front, self._router
        if front is None or router is None or not router.open_replicas:
            return _Relayed(no_replica())
        headers = passed_on(request.headers.items())
        if path in _OWN:
            refused = await front.may_see_traffic(headers)
            return self._own(path, front, router) if refused is None else _Relayed(refused)
        return _Relayed(await self._relay(front, request, headers))

    async def _relay(self, front: Front, request: Request, headers: tuple[tuple[str, str], ...]) -> Answer:
        """Return what replicas answer to a request, if it can be read."""
        if self._num_body_bytes >= _MOST_BODIES * self._settings.max_body_bytes:
            return refusal(429, "Too many bodies are on their way. Try again.")
        try:
            body = await self._body_of(request)
        except _TooLargeError:
            most = self._settings.max_body_bytes
            message = f"The request's body is larger than {most:,} bytes. Send less, or raise --max-body-bytes."
            return refusal(413, message)
        except TimeoutError:
            message = f"The request's body did not come within {_BODY_S:g} s."
            return refusal(408, message)
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return await front.answer(Forwarded(request.method, target, headers, body))

    def check_health(self) -> None:
        """Raise if it does not follow its replicas any more: Ray puts another front in this one's place.

        Raises:
            PagefoldError: so it is.
        """
        if self._following.done():
            msg = "The front has lost track of its replicas."
            raise PagefoldError(msg, remedy="Ray starts another one.")

    def _own(self, path: str, front: Front, router: Router) -> Response:
        """Return what the front tells of itself."""
        if path == "/replicas":
            return JSONResponse({"status": "ok", "replicas": self._told(router)})
        heard = [] if self._roster is None else [each.counts for each in self._roster.heard]
        return Response(front_metrics(router, front, self._index, heard), media_type=CONTENT_TYPE_LATEST)

    async def _body_of(self, request: Request) -> bytes:
        """Return a request's body, as long as it may be.

        Raises:
            _TooLargeError: it is longer.
            TimeoutError: it does not come.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                async for piece in request.stream():
                    self._num_body_bytes += len(piece)
                    body += piece
                    if len(body) > self._settings.max_body_bytes:
                        raise _TooLargeError
        finally:
            self._num_body_bytes -= len(body)
        return bytes(body)

    # Who there is.

    def _told(self, router: Router) -> list[dict[str, Any]]:
        states = self._index.replicas()
        return [
            {
                "replica": name,
                "is_known": name in states and states[name].is_known,
                "num_blocks": states[name].num_blocks if name in states else 0,
                "num_requests": router.num_requests(name),
            }
            for name in router.open_replicas
        ]

    def _note_soon(self, names: frozenset[str]) -> None:
        """Note who there is; on any thread."""
        self._loop.call_soon_threadsafe(self._note, names)

    def _note(self, names: frozenset[str]) -> None:
        self._wanted = names
        if self._roster is not None:
            self._roster.want(names)

    async def _follow(self) -> None:
        """Let the router know who comes and goes, as soon as there is anybody."""
        first: ReplicaAddress | None = None
        while first is None:
            try:
                first = await self._replicas.tell.remote()  # which makes Ray tell who there is
            except (ray.exceptions.RayError, RayServeException) as error:
                _log.warning("no replica has said yet who it is: %s", error)
                await asyncio.sleep(1.0)
        policy = ROUTING_POLICIES[self._settings.routing]()
        self._router = Router(policy, self._index, block_size=first.block_size, cache_tokens=first.cache_tokens)
        seed = environment_hash_seed()
        prompts = TokenizedPrompts(
            self._send,
            block_size=first.block_size,
            most_tokens=first.cache_tokens,
            tenant_of=self._tenant_of,
            seed=DEFAULT_SEED if seed is None else seed,
        )
        self._front = Front(self._router, self._send, prompts, time.monotonic)
        self._roster = Roster(self._router, self._index, self._ask, self._hear)
        self._roster.want(self._wanted)
        await self._roster.follow()

    async def _ask(self, replica: str) -> ReplicaAddress:
        """Ask a replica who it is; see :class:`Roster`."""
        try:
            address: ReplicaAddress = await self._replicas.tell.remote(replica=replica)
        except (ray.exceptions.RayError, RayServeException) as error:
            raise LookupError(str(error)) from None
        return address

    def _hear(self, address: ReplicaAddress) -> KVEventSubscriber:
        hearing = KVEventSubscriber(self._index, address.replica, address.events, replay_endpoint=address.replay)
        self._has_met.set()
        return hearing

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
