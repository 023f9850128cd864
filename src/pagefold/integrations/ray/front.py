"""Front: an OpenAI address before many servers. It reads what a request begins with, has a replica chosen, and relays.

A request whose replica goes before anything of its answer was sent is tried on another. Once something was sent its
client is told by an error in the stream. Nothing is tried twice on the same replica.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pagefold.integrations.ray.forwarded import Forwarded, Head, ReplicaLostError, passed_on
from pagefold.routing import Prompt
from pagefold.server.errors import error_response

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from pagefold.routing import Choice, Router

__all__ = ["Answer", "Front", "PromptSource", "Send", "no_replica", "refusal"]

_log = logging.getLogger(__name__)

_GENERATE = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
"""What computes a prompt: it is routed by that. All else goes to whoever has least to do."""

_TO_ALL = frozenset({"/reset_prefix_cache", "/v1/cache/warm"})
"""What each replica must do."""

_OF_ONE_SERVER = ("/v1/responses/", "/v1/explain/", "/v1/sessions/")
"""What one server remembers of a request, and nobody can say which."""

_OK, _NOT_OK, _UNAVAILABLE = 200, 400, 503
_BYTES_PER_TOKEN = 4
_LOST_S = 10.0
"""So long a replica that was lost is the last to be tried; Ray sees within some seconds whether it has gone."""


class Send(Protocol):
    """Sends a request to a replica."""

    def __call__(self, replica: str, asked: Forwarded) -> AsyncGenerator[Head | bytes]:
        """Yield the head of the answer, then its body.

        Raises:
            ReplicaLostError: the replica has gone.
        """


class PromptSource(Protocol):
    """Finds out what a request begins with."""

    async def read(self, asked: Forwarded, replica: str) -> Prompt | None:
        """Return the prompt, in names of blocks; None where that cannot be said. ``replica`` may be asked."""


class Answer(NamedTuple):
    """What a client gets.

    Attributes:
        head: status and headers.
        body: the rest, as it comes. Whoever has the answer closes it, read or not.
    """

    head: Head
    body: AsyncGenerator[bytes]


class Front:
    """Answers requests with replicas' answers.

    Args:
        router: chooses among replicas.
        send: sends.
        prompts: finds out what requests begin with.
        clock: seconds.

    Attributes:
        num_retried: requests that were tried again since their replica had gone or took none, with nothing sent.
        num_broken: answers that ended with an error in the middle, since their replica had gone.
    """

    def __init__(self, router: Router, send: Send, prompts: PromptSource, clock: Callable[[], float]) -> None:
        self._router = router
        self._send = send
        self._prompts = prompts
        self._clock = clock
        self._numbers = count()
        self.num_retried = 0
        self.num_broken = 0
        self._lost_at_s: dict[str, float] = {}

    async def answer(self, asked: Forwarded) -> Answer:
        """Return a replica's answer, or an error in OpenAI's form if none can be had."""
        if asked.path in _TO_ALL:
            return await self._ask_all(asked)
        if asked.path.startswith(_OF_ONE_SERVER):
            message = (
                f"{asked.path} asks for what one server remembers, and there are several. Send all that is to be read."
            )
            return refusal(404, message)
        if asked.path not in _GENERATE:
            return await self._ask_any(asked)
        return await self._generate(asked, await self._prompt(asked))

    async def may_see_traffic(self, headers: tuple[tuple[str, str], ...]) -> Answer | None:
        """Ask a replica whether headers bring a key to what all tenants do; return its refusal, None if they do."""
        answer = await self._ask_any(Forwarded("GET", "/load", headers))
        if answer.head.status == _OK:
            await answer.body.aclose()
            return None
        return answer

    # What a relayed answer tells.

    def started(self, request_id: str) -> None:
        """The first event has come."""
        self._router.started(request_id)

    def ended(self, request_id: str, num_output_tokens: int) -> None:
        """An answer is over, or is not wanted any more."""
        self._router.ended(request_id, self._clock(), num_output_tokens)

    def broken(self) -> bytes:
        """The replica has gone in the middle of an answer. Return what its client is told."""
        self.num_broken += 1
        _log.warning("a replica has gone in the middle of an answer")
        message = "The server that answered has gone in the middle of this answer. Send the request again."
        return b"data: " + bytes(error_response(_UNAVAILABLE, message, code="replica_lost").body) + b"\n\n"

    # Inside.

    async def _generate(self, asked: Forwarded, prompt: Prompt) -> Answer:
        """Have a replica compute an answer, another one if that has gone or takes none."""
        tried: frozenset[str] = frozenset()
        refused: Answer | None = None
        while True:
            request_id = f"request-{next(self._numbers)}"
            try:
                choice = self._route(request_id, prompt, tried)
            except LookupError:
                return refused or no_replica()
            self.num_retried += bool(tried)
            tried |= {choice.replica}
            stream = self._send(choice.replica, asked)
            try:
                head = await anext(stream)
                assert isinstance(head, Head)
                if head.status < _NOT_OK and head.is_stream:
                    return Answer(head, _Relay(self, request_id, stream))
                body = await _joined(stream)
            except ReplicaLostError:
                self._note_lost(choice.replica, asked)
                self._router.failed(request_id)
                continue
            except BaseException:
                self._router.ended(request_id, self._clock())
                raise
            if head.status < _NOT_OK:
                self._router.ended(request_id, self._clock(), _num_output_tokens(body))
                return Answer(head, _of([body]))
            self._router.failed(request_id)  # nothing was computed
            refused = Answer(head, _of([body]))
            if head.status != _UNAVAILABLE:  # who starts, drains or has failed says so: perhaps another one does not
                return refused

    def _route(self, request_id: str, prompt: Prompt, tried: frozenset[str]) -> Choice:
        """Choose a replica where a request was not tried; one that was lost just now only if there is no other.

        Raises:
            LookupError: there is none.
        """
        now, is_again = self._clock(), bool(tried)
        with suppress(LookupError):
            return self._router.route(request_id, prompt, now, without=tried | self._lost(), is_again=is_again)
        return self._router.route(request_id, prompt, now, without=tried, is_again=is_again)

    def _least_loaded(self, tried: frozenset[str]) -> str | None:
        """Return the replica with the fewest requests that was not tried; those that were lost just now come last."""
        least = self._router.least_loaded(without=tried | self._lost())
        return least or self._router.least_loaded(without=tried)

    def _lost(self) -> frozenset[str]:
        """Return the replicas that were lost just now."""
        now = self._clock()
        self._lost_at_s = {name: at_s for name, at_s in self._lost_at_s.items() if now - at_s < _LOST_S}
        return frozenset(self._lost_at_s)

    async def _prompt(self, asked: Forwarded) -> Prompt:
        """Return what a request begins with; where nobody can say, how long it may be."""
        if self._router.sees_prefixes:
            tried: frozenset[str] = frozenset()
            while (least := self._least_loaded(tried)) is not None:
                tried |= {least}
                try:
                    prompt = await self._prompts.read(asked, least)
                except ReplicaLostError:
                    self._note_lost(least, asked)
                    continue
                if prompt is not None:
                    return prompt
                break
        return Prompt((), max(1, len(asked.body) // _BYTES_PER_TOKEN), is_read=False)

    async def _ask_any(self, asked: Forwarded) -> Answer:
        """Ask the replica with the fewest requests what each knows alike."""
        tried: frozenset[str] = frozenset()
        while (least := self._least_loaded(tried)) is not None:
            tried |= {least}
            answer = await self._whole(least, asked)
            if answer is not None:
                return answer
        return no_replica()

    async def _ask_all(self, asked: Forwarded) -> Answer:
        """Ask each replica; return the worst answer."""
        answers = [await self._whole(replica, asked) for replica in self._router.open_replicas]
        there = (answer for answer in answers if answer is not None)
        return max(there, key=lambda answer: answer.head.status, default=no_replica())

    async def _whole(self, replica: str, asked: Forwarded) -> Answer | None:
        """Return a replica's answer when it is complete; None if the replica is lost."""
        stream = self._send(replica, asked)
        try:
            head = await anext(stream)
            assert isinstance(head, Head)
            return Answer(head, _of([await _joined(stream)]))
        except ReplicaLostError:
            self._note_lost(replica, asked)
            return None

    def _note_lost(self, replica: str, asked: Forwarded) -> None:
        _log.warning("%s has gone before it answered %s", replica, asked.path)
        self._lost_at_s[replica] = self._clock()


class _Relay(AsyncGenerator[bytes]):
    """Events as they come; at the end an error, if the replica goes in the middle.

    It is closed once, whether or not anybody has begun to read it: only then the router knows that it has ended.
    """

    def __init__(self, front: Front, request_id: str, stream: AsyncGenerator[Head | bytes]) -> None:
        self._front = front
        self._request_id = request_id
        self._stream = stream
        self._num_events = 0
        self._is_over = False

    async def asend(self, value: None) -> bytes:
        """Return the next piece."""
        assert value is None
        if self._is_over:
            raise StopAsyncIteration
        try:
            piece = await anext(self._stream)
        except StopAsyncIteration:
            await self.aclose()
            raise
        except ReplicaLostError:
            await self.aclose()
            return self._front.broken()
        assert isinstance(piece, bytes)
        if not self._num_events:
            self._front.started(self._request_id)
        self._num_events += piece.count(b"\ndata:") + piece.startswith(b"data:")
        return piece

    async def athrow(self, kind: Any, value: Any = None, trace: Any = None) -> bytes:  # noqa: ANN401 - as the protocol
        """Close, and raise what is thrown."""
        await self.aclose()
        return await super().athrow(kind, value, trace)

    async def aclose(self) -> None:
        """Let go of the replica, which ends the request there if it has not ended."""
        if not self._is_over:
            self._is_over = True
            self._front.ended(self._request_id, self._num_events)
            await self._stream.aclose()


async def _of(pieces: list[bytes]) -> AsyncGenerator[bytes]:
    for piece in pieces:
        yield piece


async def _joined(stream: AsyncIterator[Head | bytes]) -> bytes:
    return b"".join([piece async for piece in stream if isinstance(piece, bytes)])


def _num_output_tokens(body: bytes) -> int:
    """Return what an answer says of its own length; 0 if it says nothing."""
    try:
        usage = json.loads(body)["usage"]
        num_tokens = usage.get("completion_tokens", usage.get("output_tokens", 0))
    except (ValueError, TypeError, KeyError, AttributeError):
        return 0
    return num_tokens if isinstance(num_tokens, int) else 0


def no_replica() -> Answer:
    """Return what is told where no replica takes requests."""
    message = "No replica takes requests now. Try again later."
    return refusal(_UNAVAILABLE, message, code="engine_unavailable", headers={"retry-after": "1"})


def refusal(status: int, message: str, *, code: str | None = None, headers: Mapping[str, str] | None = None) -> Answer:
    """Return an error of the front's own, as the server writes its errors."""
    response = error_response(status, message, code=code, headers=headers)
    return Answer(Head("", status, passed_on(response.headers.items())), _of([bytes(response.body)]))
