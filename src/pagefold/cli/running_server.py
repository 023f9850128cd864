"""RunningServer: a Pagefold server as commands that ask one see it."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from pagefold.errors import ConfigError, InvalidRequestError

__all__ = ["NO_SERVER", "NoAnswerError", "RunningServer"]

_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 401, 403, 404
_AWAY = (502, 503, 504)
_PATIENCE_S = 600.0
NO_SERVER = "Start one with pagefold serve, or give its --url."


class NoAnswerError(ConfigError):
    """Nobody answers now. Later somebody may: a server that starts anew is away for a while."""


class RunningServer:
    """A server that answers HTTP.

    Args:
        url: of it, with or without ``/v1``.
        key: that is sent along, if there is one.
        patience_s: that it may be silent for.

    Raises:
        ConfigError: that is no URL.
    """

    def __init__(self, url: str, key: str | None, patience_s: float = _PATIENCE_S) -> None:
        if not url.startswith(("http://", "https://")):
            msg = f"--url is {url}."
            raise ConfigError(msg, remedy="It looks like http://127.0.0.1:8000.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._patience_s = patience_s
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def ask(self, path: str, told: str, fields: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what the server answers.

        Args:
            path: with what stands behind it.
            told: what ``object`` says in its answer.
            fields: of the body of a POST; None for a GET.

        Raises:
            InvalidRequestError: this is refused.
            NoAnswerError: nobody is there, or a server that cannot answer now.
            ConfigError: everything would be refused: it is not for us, or no Pagefold server.
        """
        body = None if fields is None else json.dumps(fields).encode()
        return self._ask(urllib.request.Request(f"{self.url}{path}", body, self._headers), told)  # noqa: S310 - checked

    def send(self, path: str, told: str, body: bytes) -> dict[str, Any]:
        """Return what the server answers to a POST of bytes.

        Args:
            path: of the route.
            told: what ``object`` says in its answer.
            body: the bytes.

        Raises:
            InvalidRequestError, NoAnswerError, ConfigError: as :meth:`ask`.
        """
        headers = {**self._headers, "Content-Type": "application/octet-stream"}
        return self._ask(urllib.request.Request(f"{self.url}{path}", body, headers), told)  # noqa: S310 - as above

    def _ask(self, request: urllib.request.Request, told: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(request, timeout=self._patience_s) as response:  # noqa: S310 - as above
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            message = _message(error)
            if error.code in _AWAY:
                raise NoAnswerError(message) from None
            if error.code in (_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND):
                raise ConfigError(message) from None
            raise InvalidRequestError(message) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            msg = f"No Pagefold server answers at {self.url}: {reason}."
            raise NoAnswerError(msg, remedy=NO_SERVER) from None
        if not isinstance(answer, dict) or answer.get("object") != told:
            msg = f"What answers at {self.url} is no Pagefold server."
            raise ConfigError(msg, remedy=NO_SERVER)
        return answer


def _message(error: urllib.error.HTTPError) -> str:
    """Return what the server says is wrong; or whoever answers in its place."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"The server answers {error.code} {error.reason}."
