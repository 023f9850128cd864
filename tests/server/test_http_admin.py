"""Keys, the admin's routes, and the model's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import openai
import pytest
from local_server import LocalServer, error_of

from pagefold import __version__
from pagefold.config import ServerConfig
from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEYS = {"api_keys": ("sk-one", "sk-two"), "admin_api_key": "sk-admin"}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def guarded(tiny_chat_model: Path) -> Iterator[LocalServer]:
    server = LocalServer(tiny_chat_model, door=KEYS, kv_cache_memory_bytes=2**22)
    yield server
    server.close()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("sk-on"),
        bearer("sk-one2"),
        {"Authorization": "Bearer"},
        {"Authorization": "sk-one"},
        {"Authorization": "Basic sk-one"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("POST", "/reset_prefix_cache"),
        ("GET", "/no/such/route"),
    ],
)
def test_without_a_key_every_route_is_closed(guarded, caplog, method, path, headers):
    response = guarded.http.request(method, path, headers=headers, json={"prompt": "x"} if method == "POST" else None)
    assert error_of(response, 401)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert "sk-" not in response.text + caplog.text


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version"])
def test_probes_need_no_key(guarded, path):
    assert guarded.http.get(path).status_code == 200


@pytest.mark.parametrize("key", ["sk-one", "sk-two", "sk-admin"])
def test_any_key_opens(guarded, key):
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as client:
        assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices
        assert list(client.completions.create(model="tiny", prompt="x", max_tokens=2, stream=True))
        assert [model.id for model in client.models.list()] == ["tiny"]
    wrong = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="sk-wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_only_the_admin_resets(guarded):
    prompt = {"prompt": list(range(500, 600)), "max_tokens": 2, "temperature": 0}
    ask = [guarded.http.post("/v1/completions", json=prompt, headers=bearer("sk-one")).json() for _ in range(2)]
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in ask] == [0, 96]
    assert guarded.http.post("/reset_prefix_cache", headers=bearer("sk-one")).status_code == 401
    reset = guarded.http.post("/reset_prefix_cache", headers=bearer("sk-admin"))
    assert reset.json()["num_blocks_freed"] >= 6
    again = guarded.http.post("/v1/completions", json=prompt, headers=bearer("sk-one")).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["choices"] == ask[0]["choices"]
    guarded.check_pool()


def test_a_reset_does_not_disturb_what_runs(guarded):
    body = {"prompt": [7] * 40, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    expected = guarded.http.post("/v1/completions", json=body, headers=bearer("sk-one")).json()["choices"]
    guarded.runner.close_gate()
    with guarded.http.stream(
        "POST", "/v1/completions", json={**body, "stream": True}, headers=bearer("sk-one")
    ) as response:
        guarded.runner.allow(3)
        guarded.runner.wait_in_step()
        guarded.runner.allow()
        assert httpx.post(f"{guarded.url}/reset_prefix_cache", headers=bearer("sk-admin")).status_code == 200
        text = "".join(response.iter_text())
    assert "[DONE]" in text
    after = guarded.http.post("/v1/completions", json=body, headers=bearer("sk-one")).json()["choices"]
    assert after == expected


def test_without_an_admin_key_admin_routes_are_closed(tiny):
    error = error_of(tiny.http.post("/reset_prefix_cache"), 403)
    assert "--admin-api-key" in error["message"]


@pytest.mark.parametrize("key", ["", "two words", "käse", "line\n"])
def test_what_no_header_can_carry_is_no_key(key):
    for field in ({"api_keys": (key,)}, {"admin_api_key": key}):
        with pytest.raises(ConfigError, match="api_key is no key"):
            ServerConfig(**field)


def test_keys_are_never_shown():
    assert "sk-" not in repr(ServerConfig(**KEYS))


def test_version(tiny):
    assert tiny.http.get("/version").json() == {"version": __version__}


# Tokens.


@pytest.mark.parametrize("text", ["", "Hello world", "naïve 🐧 日本語", "<|im_start|>user"])
def test_tokens_and_back(tiny, text):
    told = tiny.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert told["tokens"] == tiny.tokenizer.encode(text)
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == 2048
    assert tiny.http.post("/detokenize", json={"model": "tiny", "tokens": told["tokens"]}).json() == {"prompt": text}


def test_a_chat_in_tokens_is_what_the_chat_route_computes(tiny):
    messages = [{"role": "user", "content": "Hi there"}]
    told = tiny.http.post("/tokenize", json={"messages": messages}).json()
    assert told["token_strs"] is None
    answer = tiny.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2}).json()
    assert answer["usage"]["prompt_tokens"] == told["count"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [49152]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
    ids=str,
)
def test_bad_tokens_are_refused(tiny, path, body, status, param):
    assert error_of(tiny.http.post(path, json=body), status)["param"] == param
