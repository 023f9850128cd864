"""Origins: which websites' pages may use the server from a browser. Starlette's CORS, as vLLM's flags set it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware

from pagefold.server.ignored import IGNORED_HEADER

if TYPE_CHECKING:
    from fastapi import FastAPI

    from pagefold.config import ServerConfig

__all__ = ["allow_origins"]

_EXPOSED = ("retry-after", "x-request-id", IGNORED_HEADER)


def allow_origins(app: FastAPI, config: ServerConfig) -> None:
    """Let pages of ``config.allowed_origins`` use ``app``; where there are none, browsers keep all pages out.

    Preflights bring no key, so they are answered before anybody asks for one.
    """
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=_EXPOSED,
        )
