"""Who may see what: the metrics beside tenants, pages of other websites, probes, and what a start warns of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fastapi.testclient import TestClient
from local_server import error_of

from pagefold.cli.options import listed
from pagefold.cli.serve import warn_if_open
from pagefold.config import Account, ServerConfig
from pagefold.errors import ConfigError
from pagefold.observe.ledger import Ledger
from pagefold.observe.metrics import Metrics
from pagefold.server import create_app
from pagefold.server.late_engine import LateEngine
from pagefold.server.listener import is_beyond_this_machine

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

ACCOUNTS = (Account(key="sk-acme", tenant="acme"), Account(key="sk-beta", tenant="beta"))
ORIGIN = "https://app.example"


def door(**settings: Any) -> TestClient:
    """A door behind which no engine has arrived yet: what stands before it does not ask for one."""
    config = ServerConfig(**settings)
    app = create_app(LateEngine(), model_name="tiny", config=config, metrics=Metrics("tiny"), ledger=Ledger())
    return TestClient(app, raise_server_exceptions=False)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def statuses(get: Callable[..., httpx.Response], *keys: str) -> list[int]:
    return [get("/metrics", headers=bearer(key)).status_code for key in keys]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("path", ["/metrics", "/load"])
def test_beside_tenants_traffic_is_closed_unless_somebody_has_chosen(path):
    """One tenant is not shown what the others do, and whoever runs the server is told which flags there are."""
    http = door(accounts=ACCOUNTS)
    for headers in ({}, bearer("sk-acme")):
        error = error_of(http.get(path, headers=headers), 403)
        assert "--metrics-key" in error["message"]
        assert "--open-metrics" in error["message"]
    assert door(accounts=ACCOUNTS, open_metrics=True).get(path).status_code == 200
    assert door(api_keys=("sk-one",)).get(path).status_code == 200
    assert door().get(path).status_code == 200


def test_the_admin_sees_the_traffic_of_tenants():
    http = door(accounts=ACCOUNTS, admin_api_key="sk-admin")
    assert statuses(http.get, "sk-acme", "sk-admin", "") == [401, 200, 401]
    assert "--metrics-key" in http.get("/metrics").json()["error"]["message"]


@pytest.mark.parametrize("accounts", [ACCOUNTS, ()], ids=["tenants", "none"])
def test_the_metrics_key_opens_the_metrics_and_nothing_else(accounts):
    http = door(accounts=accounts, api_keys=("sk-one",), admin_api_key="sk-admin", metrics_key="sk-prom")
    assert statuses(http.get, "sk-prom", "sk-admin", "sk-one", "") == [200, 200, 401, 401]
    assert http.get("/load", headers=bearer("sk-prom")).json() == {"server_load": 0}
    assert http.get("/v1/models", headers=bearer("sk-prom")).status_code == 401
    assert http.post("/reset_prefix_cache", headers=bearer("sk-prom")).status_code == 401
    assert "sk-prom" not in repr(ServerConfig(metrics_key="sk-prom"))


@pytest.mark.parametrize(
    "settings",
    [
        {"metrics_key": "sk-acme", "accounts": ACCOUNTS},
        {"metrics_key": "sk-x", "open_metrics": True},
        {"metrics_key": "two words"},
        {"allowed_origins": ("*",), "allow_credentials": True},
        {"http_header_timeout_s": 0.0},
        {"http_body_timeout_s": float("inf")},
        {"timeout_keep_alive_s": float("nan")},
        {"max_connections": 0},
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused(settings):
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**settings)
    assert "sk-" not in str(caught.value)


def test_probes_of_other_systems(tiny):
    for response in (tiny.http.get("/ping"), tiny.http.post("/ping"), tiny.http.get("/health")):
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
    assert door(accounts=ACCOUNTS).post("/ping").status_code == 200


def test_the_load_is_what_runs_and_waits(narrow):
    assert narrow.http.get("/load").json() == {"server_load": 0}
    narrow.runner.close_gate()
    clients = [narrow.post_raw("/v1/completions", {"prompt": "a", "max_tokens": 2}) for _ in range(2)]
    narrow.runner.wait_in_step()
    assert narrow.http.get("/load").json()["server_load"] >= 1
    narrow.runner.allow()
    for client in clients:
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        client.close()


def test_server_info_is_open_where_nothing_has_a_key(tiny):
    info = tiny.http.get("/server_info").json()
    assert info["model"]["id"] == "tiny"
    assert info["server"]["max_body_bytes"] == 2**20
    assert info["engine"]["num_blocks"] == tiny.num_blocks


def test_server_info_is_the_admins_where_keys_are():
    assert error_of(door(api_keys=("sk-one",)).get("/server_info", headers=bearer("sk-one")), 403)
    http = door(accounts=ACCOUNTS, api_keys=("sk-one",), admin_api_key="sk-admin", metrics_key="sk-prom")
    for key in ("sk-one", "sk-acme", "sk-prom"):
        assert error_of(http.get("/server_info", headers=bearer(key)), 401)
    error_of(http.get("/server_info", headers=bearer("sk-admin")), 503)  # no model has arrived


def test_no_secret_is_told(tiny):
    """Whatever is added to the config."""
    told = tiny.http.get("/server_info").json()["server"]
    hidden = {field.name for field in ServerConfig.__dataclass_fields__.values() if not field.repr}
    assert hidden
    assert not (hidden | {"accounts"}) & set(told)


def test_pages_of_other_websites_are_let_in_by_name_only():
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    http = door(allowed_origins=(ORIGIN,), api_keys=("sk-one",))
    asked = http.options("/v1/chat/completions", headers=preflight)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == ORIGIN
    refused = http.post("/v1/chat/completions", headers={"Origin": ORIGIN}, json={})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN  # so that the page gets to read why
    assert "x-request-id" in refused.headers["access-control-expose-headers"]
    other = http.get("/health", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    assert http.options("/v1/models", headers={**preflight, "Origin": "https://evil.example"}).status_code == 400


def test_without_origins_no_page_is_let_in():
    response = door().get("/health", headers={"Origin": ORIGIN})
    assert "access-control-allow-origin" not in response.headers


def test_methods_headers_and_credentials_of_pages():
    http = door(allowed_origins=(ORIGIN,), allowed_methods=("GET",), allowed_headers=("x-a",), allow_credentials=True)
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "x-a"}
    asked = http.options("/v1/models", headers=preflight)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-credentials"] == "true"
    assert http.options("/v1/models", headers={**preflight, "Access-Control-Request-Method": "PUT"}).status_code == 400


@pytest.mark.parametrize(
    ("flags", "origins"),
    [
        ((), ()),
        (("*",), ("*",)),
        (('["https://a.org", "https://b.org"]',), ("https://a.org", "https://b.org")),
        (("https://a.org", "https://b.org"), ("https://a.org", "https://b.org")),
    ],
)
def test_origins_are_written_as_vllm_does_or_one_by_one(flags, origins):
    assert listed(flags, ()) == origins


@pytest.mark.parametrize("flag", ["[", "[5]", '[["https://a.org"]]'])
def test_what_is_no_list_of_origins_is_told(flag):
    with pytest.raises(ConfigError, match="JSON list"):
        listed([flag], ())


def test_a_start_warns_of_an_open_door(capsys):
    open_door = ServerConfig(host="0.0.0.0")
    warn_if_open("0.0.0.0", open_door)
    assert "--api-key" in capsys.readouterr().err
    warn_if_open("127.0.0.1", open_door)
    warn_if_open("0.0.0.0", ServerConfig(api_keys=("sk-one",)))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "is_beyond"),
    [
        ("127.0.0.1", False),
        ("127.8.0.1", False),
        ("::1", False),
        ("0.0.0.0", True),
        ("::", True),
        ("192.168.1.5", True),
        ("fe80::1%eth0", True),
    ],
)
def test_who_reaches_an_address(host, is_beyond):
    assert is_beyond_this_machine(host) == is_beyond
