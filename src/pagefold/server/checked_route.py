"""CheckedRoute: a route whose body is checked by a :class:`~pagefold.server.body_checker.BodyChecker`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from pagefold.server.body_checker import BodyChecker, UnreadableBodyError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from fastapi import Response
    from pydantic import BaseModel
    from starlette.types import Receive, Scope

__all__ = ["HELD_BODY", "CheckedRoute"]

HELD_BODY = "held_body"
"""In the request's state: what to call when its bytes are let go of."""


class CheckedRoute(APIRoute):
    """A route of FastAPI. What its body holds may cost others nothing: see ``App.state.checker``.

    A body's bytes are let go of as soon as they are checked; FastAPI would keep them until the answer has ended.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler of this route, with another reader of bodies in it."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model: type[BaseModel] = self.body_field.field_info.annotation  # type: ignore[assignment]

        async def handle_checked(request: Request) -> Response:
            checker = request.app.state.checker
            assert isinstance(checker, BodyChecker)
            checked = _CheckedRequest(request.scope, request.receive, checker, model)
            try:
                return await handle(checked)
            except HTTPException:
                if checked.refusal is not None:
                    raise checked.refusal from None
                raise

        return handle_checked


class _CheckedRequest(Request):
    """A request whose ``json`` is checked already, if it is large."""

    def __init__(self, scope: Scope, receive: Receive, checker: BodyChecker, model: type[BaseModel]) -> None:
        super().__init__(scope, receive)
        self._checker = checker
        self._model = model
        self._unread = b""
        self.refusal: Exception | None = None

    async def body(self) -> bytes:
        """Return something in place of the body: FastAPI looks only whether there is one."""
        if not hasattr(self, "_body"):
            self._unread = await super().body()
            self._body = self._unread[:1]
        return self._body

    async def json(self) -> Any:  # noqa: ANN401 - whatever the JSON was
        """Return the body's JSON, or what that came to. FastAPI makes a 400 of what it does not know."""
        body, self._unread = self._unread, b""
        try:
            return await self._checker.read(body, self._model)
        except (ValueError, UnreadableBodyError):  # FastAPI knows what to say of them
            raise
        except Exception as error:
            self.refusal = error
            raise
        finally:
            del body
            release = self.scope.get("state", {}).get(HELD_BODY)
            if release is not None:
                release()
