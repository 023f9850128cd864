"""The app: routes, limits and errors put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST

from pagefold import __version__
from pagefold.config import Account
from pagefold.errors import EngineStoppedError
from pagefold.server.answer_schemas import Model, Models
from pagefold.server.body_limit import BodyLimit
from pagefold.server.cache import cache_routes
from pagefold.server.chat import chat_routes
from pagefold.server.completions import completion_routes
from pagefold.server.description import describe
from pagefold.server.errors import add_error_handlers
from pagefold.server.ignored import TellIgnored
from pagefold.server.keys import Keys
from pagefold.server.request_log import RequestLog
from pagefold.server.responses import response_routes
from pagefold.server.served import Served
from pagefold.server.tokenize import tokenize_routes
from pagefold.server.warming import Warmer, tenants_of

if TYPE_CHECKING:
    from pagefold.config import ServerConfig
    from pagefold.engine.client import EngineClient
    from pagefold.observe.metrics import Metrics

__all__ = ["create_app"]


def create_app(client: EngineClient, *, model_name: str, config: ServerConfig, metrics: Metrics) -> FastAPI:
    """Return the ASGI app that serves ``client``.

    Args:
        client: the engine.
        model_name: what clients call the model.
        config: of the door.
        metrics: what ``/metrics`` shows; the engine's events must go to its ``emit``.
    """
    app = FastAPI(title="Pagefold", version=__version__, redirect_slashes=False)
    app.add_middleware(TellIgnored)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    accounts = [*(Account(key=key) for key in config.api_keys), *config.accounts]
    app.add_middleware(Keys, accounts=accounts, admin_key=config.admin_api_key)
    add_error_handlers(app)
    app.add_middleware(RequestLog, count=metrics.count_response)  # the last added is the outermost
    metrics.watch(client.status)
    served = Served(client, model_name, config.tool_call_parser, config.reasoning_parser)
    app.include_router(completion_routes(served))
    app.include_router(chat_routes(served))
    app.include_router(response_routes(served))
    app.include_router(tokenize_routes(served))
    app.include_router(cache_routes(Warmer(served, tenants_of(config))))

    @app.get("/v1/models", responses={200: {"model": Models}})
    async def list_models() -> dict[str, Any]:
        """List the one model that is served."""
        return {"object": "list", "data": [served.about_model()]}

    @app.get("/v1/models/{model_id:path}", responses={200: {"model": Model}})
    async def retrieve_model(model_id: str) -> dict[str, Any]:
        """Describe the model."""
        served.check_model(model_id)
        return served.about_model()

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Tell which Pagefold this is."""
        return {"version": __version__}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> dict[str, int]:
        """Forget every cached prefix; running requests go on. For the admin."""
        return {"num_blocks_freed": await client.reset_prefix_cache()}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Tell whether the process is alive: 503 only after a failure that it does not survive."""
        if not client.status().is_healthy:
            msg = "The engine has failed."
            raise EngineStoppedError(msg, remedy="Restart the server.")
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Tell whether requests are taken now: 503 while the model loads and while the server drains."""
        client.ensure_ready()
        return {"status": "ready"}

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def read_metrics() -> Response:
        """Return Prometheus' text."""
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    describe(app, config)
    return app
