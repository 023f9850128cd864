"""Passing on: a request goes to a server over HTTP as it came, and the answer comes back as it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from pagefold.integrations.ray.forwarded import Head, ReplicaLostError, passed_on

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from pagefold.integrations.ray.forwarded import Forwarded

__all__ = ["pass_on"]


async def pass_on(http: httpx.AsyncClient, replica: str, asked: Forwarded) -> AsyncGenerator[Head | bytes]:
    """Yield the head of a server's answer, then its body as it comes. Closed early, it ends the request there.

    Args:
        http: a client of the server, without time limits.
        replica: the server's name.
        asked: the request.

    Raises:
        ReplicaLostError: the server does not answer, or not to the end.
    """
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in asked.headers]
    request = http.build_request(asked.method, asked.target, headers=headers, content=asked.body or None)
    try:
        answer = await http.send(request, stream=True)
        try:
            told = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in answer.headers.raw)
            yield Head(replica, answer.status_code, passed_on(told))
            async for piece in answer.aiter_raw():
                yield piece
        finally:
            await answer.aclose()
    except httpx.TransportError as error:
        msg = f"The server of replica {replica} does not answer: {error!r}."
        raise ReplicaLostError(msg, remedy="Send the request again.") from None
