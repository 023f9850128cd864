"""The API holds what its own description says, whatever is sent: schemathesis makes the requests out of it.

Bodies that fit it, and bodies that do not. No answer may be a 5xx, have a status, a content type or a form that is not
described, or take what the description forbids.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from local_server import LocalServer, error_of
from schemathesis import GenerationMode, checks
from schemathesis.config import SchemathesisConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEYS = {"api_keys": ("sk-one",), "admin_api_key": "sk-admin"}
REFUSED = [400, 401, 404, 413]
"""No key, too, is something that the description forbids; and too many messages can be too many bytes."""

CONFIG = SchemathesisConfig.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": REFUSED}}})

CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]

POSTS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/explain",
    "/v1/cache/warm",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
]
GETS = [
    *("/v1/models", "/v1/models/{model_id}", "/version", "/health", "/ping", "/ready", "/load", "/metrics"),
    "/dashboard",
]
EXPLAINED = "/v1/explain/{request_id}"
ADVICE = "/v1/advice"
WHATIF = "/v1/cache/whatif"
STORED = "/v1/responses/{response_id}"
SESSION = "/v1/sessions/{session_id}"
ADMINS = ["/reset_prefix_cache", "/server_info", "/v1/dashboard", "/v1/cache/pins", "/v1/cache/pins/{pin_id}"]
ADMINS += ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
ADMINS += ["/v1/cache/quotas", "/v1/cache/layout", "/v1/cache/import"]


@pytest.fixture(scope="module")
def short(tiny_chat_model: Path) -> Iterator[LocalServer]:
    """A server whose answers are short."""
    server = LocalServer(
        tiny_chat_model,
        door=KEYS,
        kv_cache_memory_bytes=2**22,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=64,
    )
    yield server
    server.check_pool()
    server.close()


@pytest.fixture(scope="module")
def description(short: LocalServer) -> dict:
    return short.http.get("/openapi.json").json()


def send(
    server: LocalServer,
    description: dict,
    path: str,
    mode: GenerationMode,
    num_cases: int,
    *,
    method: str | None = None,
) -> int:
    """Send so many cases of what can be done with ``path``; return how many there were."""
    asked = {"path": path} | ({} if method is None else {"method": method.upper()})
    schema = schemathesis.openapi.from_dict(description, config=CONFIG).include(**asked)
    operation = next(result.ok() for result in schema.get_all_operations())
    key = "sk-admin" if path in ADMINS or path.startswith("/v1/cache/") else "sk-one"
    num_sent = 0

    @seed(0)
    @settings(
        max_examples=num_cases,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        nonlocal num_sent
        num_sent += 1
        case.call_and_validate(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, checks=CHECKS)

    run()
    return num_sent


def refusal_of(response, status: int) -> dict:
    """The error of a response, in the form of the API whose route it is."""
    if not response.request.url.path.startswith("/v1/messages"):
        return error_of(response, status)
    assert response.status_code == status
    assert response.json()["type"] == "error"
    return response.json()["error"]


MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", POSTS)
def test_what_comes_back_is_as_described(short, description, path, mode):
    assert send(short, description, path, mode, 8) == 8


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", POSTS)
def test_so_it_is_in_2000_cases(short, description, path, mode):
    num_cases = math.ceil(2000 / len(POSTS) / len(MODES))
    assert send(short, description, path, mode, num_cases) == num_cases


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("path", [*GETS, *ADMINS])
def test_small_routes_answer_as_described(short, description, path):
    assert send(short, description, path, GenerationMode.POSITIVE, 10)


@pytest.mark.parametrize("path", ["/v1/explain", EXPLAINED, ADVICE, WHATIF])
def test_explanations_answer_as_described(short, description, path):
    assert send(short, description, path, GenerationMode.POSITIVE, 10, method="get")


@pytest.mark.parametrize("method", ["get", "delete"])
def test_stored_responses_answer_as_described(short, description, method):
    assert send(short, description, STORED, GenerationMode.POSITIVE, 10, method=method)


@pytest.mark.long
def test_ended_sessions_answer_as_described(short, description):
    assert send(short, description, SESSION, GenerationMode.POSITIVE, 10, method="delete")


@pytest.mark.parametrize("path", [*POSTS, *GETS, *ADMINS, STORED, SESSION, EXPLAINED, ADVICE, WHATIF])
def test_other_methods_and_no_keys_are_refused(short, description, path):
    """As the description says which are open."""
    methods = list(description["paths"][path])
    for other in {"get", "post", "put", "patch", "delete"} - {*methods}:
        response = short.http.request(other, path, headers={"Authorization": "Bearer sk-admin"})
        assert refusal_of(response, 405)
        assert methods[0].upper() in response.headers["allow"]
    method = methods[0]
    if "security" in description["paths"][path][method]:
        assert refusal_of(short.http.request(method, path), 401)
    else:
        assert short.http.request(method, path).status_code == 200


def test_every_route_is_here(description):
    assert set(description["paths"]) == {*POSTS, *GETS, *ADMINS, STORED, SESSION, EXPLAINED, ADVICE, WHATIF}
