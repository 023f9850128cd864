"""The app: routes, limits and errors put together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI

from pagefold import __version__
from pagefold.observe.overview import Overview
from pagefold.server.adapters import adapter_routes
from pagefold.server.advices import Advices
from pagefold.server.anthropic import AnthropicErrors, message_routes
from pagefold.server.body_checker import BodyChecker
from pagefold.server.body_limit import BodyLimit
from pagefold.server.cache import cache_routes
from pagefold.server.chat import chat_routes
from pagefold.server.completions import completion_routes
from pagefold.server.dashboard import dashboard_routes
from pagefold.server.description import describe
from pagefold.server.diagnoses import Diagnoses
from pagefold.server.errors import add_error_handlers
from pagefold.server.explain import explain_routes
from pagefold.server.explanations import Explanations
from pagefold.server.head import HeadAsGet
from pagefold.server.ignored import TellIgnored
from pagefold.server.keys import Keys, Locks
from pagefold.server.models import model_routes
from pagefold.server.origins import allow_origins
from pagefold.server.prefix import prefix_routes
from pagefold.server.probes import probe_routes
from pagefold.server.request_log import RequestLog
from pagefold.server.responses import ResponseStore, response_routes
from pagefold.server.served import Served
from pagefold.server.sessions import session_routes
from pagefold.server.tokenize import tokenize_routes
from pagefold.server.tracing import TraceRequests
from pagefold.server.warming import Warmer, tenants_of
from pagefold.server.whatif import whatif_routes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.config import ServerConfig
    from pagefold.engine.client import EngineClient
    from pagefold.observe.ledger import Ledger
    from pagefold.observe.metrics import Metrics
    from pagefold.observe.traces import Traces

__all__ = ["create_app"]


def create_app(  # noqa: PLR0913 - the parts that it puts together, by name
    client: EngineClient,
    *,
    model_name: str,
    config: ServerConfig,
    metrics: Metrics,
    ledger: Ledger,
    overview: Overview | None = None,
    traces: Traces | None = None,
) -> FastAPI:
    """Return the ASGI app that serves ``client``.

    Args:
        client: the engine.
        model_name: what clients call the model.
        config: of the door.
        metrics: what ``/metrics`` shows; the engine's events must go to its ``emit``.
        ledger: what ``/v1/explain`` and ``/v1/cache/whatif`` tell of; they must go to it too.
        overview: what the dashboard shows; they must go to it behind the ledger. None for one that hears nothing.
        traces: told when an HTTP request has ended; they must go to it too. None where nobody traces.
    """
    app = FastAPI(title="Pagefold", version=__version__, redirect_slashes=False)
    app.state.checker = BodyChecker(config.max_body_bytes)  # for every CheckedRoute
    app.add_middleware(TellIgnored)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, timeout_s=config.http_body_timeout_s)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Keys, locks=Locks.of(config))
    add_error_handlers(app)
    app.add_middleware(AnthropicErrors)
    allow_origins(app, config)
    if traces is not None:
        app.add_middleware(TraceRequests, end=traces.end_http)
    decode = partial(_text_of, client)
    explanations = Explanations(ledger, decode)
    diagnoses = Diagnoses(explanations)
    advices = Advices(ledger, diagnoses, decode)
    app.add_middleware(  # the last added is the outermost
        RequestLog,
        count=metrics.count_response,
        explanations=explanations if ledger.is_on else None,
        on_end=advices.look,
    )
    metrics.watch(client.status)
    overview = overview or Overview(ledger)
    overview.watch(client.status)
    served = Served(client, model_name, config.tool_call_parser, config.reasoning_parser)
    app.include_router(completion_routes(served))
    app.include_router(chat_routes(served, diagnoses))
    responses = ResponseStore(config.responses_store_bytes)
    metrics.watch_cache(responses.size)
    app.include_router(response_routes(served, responses, diagnoses))
    app.include_router(message_routes(served, diagnoses))
    app.include_router(tokenize_routes(served))
    app.include_router(session_routes(served))
    app.include_router(cache_routes(Warmer(served, tenants_of(config))))
    app.include_router(prefix_routes(served, config))
    app.include_router(explain_routes(served, explanations, advices, config))
    app.include_router(whatif_routes(ledger, config))
    app.include_router(dashboard_routes(model_name, config, overview))
    app.include_router(model_routes(served))
    app.include_router(adapter_routes(served))
    app.include_router(probe_routes(served, config, metrics))
    describe(app, config)
    return app


def _text_of(client: EngineClient, token_ids: Sequence[int]) -> str | None:
    """Return the text of tokens; None where the model has no tokenizer."""
    tokenizer = client.tokenizer
    return None if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=False)
