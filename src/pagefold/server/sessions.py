"""``/v1/sessions/{session_id}``: where a client ends an agent's session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from pagefold.request import MAX_SESSION_ID, session_ref
from pagefold.server.answer_schemas import DeletedSession
from pagefold.server.checked_route import CheckedRoute
from pagefold.server.errors import SessionNotFoundError
from pagefold.server.keys import account_of

if TYPE_CHECKING:
    from pagefold.server.served import Served

__all__ = ["session_routes"]

_NUM_SHOWN_CHARACTERS = 60


def session_routes(served: Served) -> APIRouter:
    """Return the routes."""
    router = APIRouter(route_class=CheckedRoute)

    @router.delete("/v1/sessions/{session_id:path}", responses={200: {"model": DeletedSession}})
    async def end_session(session_id: str, request: Request) -> dict[str, Any]:
        """End a session, with those of its sub-agents: what they alone have cached is evicted first."""
        ended = None
        is_whole = request.scope["path"].endswith(session_id)  # the router leaves a newline at the end out
        if is_whole and 0 < len(session_id) <= MAX_SESSION_ID:
            ended = await served.client.end_session(session_ref(account_of(request.scope).tenant, session_id))
        if ended is None:
            msg = f"Session with id {ascii(session_id)[:_NUM_SHOWN_CHARACTERS]} not found."
            remedy = "It has ended, was forgotten, or none of your requests has named it."
            raise SessionNotFoundError(msg, remedy=remedy)
        return {"id": session_id, "object": "session", "deleted": True, **ended._asdict()}

    return router
