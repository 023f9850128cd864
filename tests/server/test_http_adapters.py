"""Adapters over HTTP: named as models, loaded and unloaded while others are served, and whatever is refused."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from adapters.written import write_adapter
from local_server import LocalServer, error_of, until

ADMIN = {"Authorization": "Bearer sk-admin"}
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def folders(tiny_chat_model, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(root / name, tiny_chat_model, seed=seed, alpha=32)
        for seed, name in enumerate(("a", "b", "c"), 1)
    }


@pytest.fixture(scope="module")
def served(tiny_chat_model, folders):
    server = LocalServer(
        tiny_chat_model,
        door={"admin_api_key": "sk-admin"},
        kv_cache_memory_bytes=2**22,
        enable_lora=True,
        max_loras=2,
        lora_modules=(f"a={folders['a']}",),
    )
    yield server
    server.close()


@contextlib.contextmanager
def opened_at_the_end(server):
    """Open the gate at the end, also if the test has failed: others use this server too."""
    try:
        yield
    finally:
        server.runner.allow()


def _load(server, name, folder, **fields):
    body = {"lora_name": name, "lora_path": str(folder), **fields}
    return server.http.post("/v1/load_lora_adapter", json=body, headers=ADMIN)


def _unload(server, name):
    return server.http.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN)


def _text(server, model, prompt="Once upon a time there was a cat who"):
    answer = server.complete(prompt, model=model, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    assert answer["model"] == model
    return answer["choices"][0]["text"]


def _names(server):
    return [model["id"] for model in server.http.get("/v1/models").json()["data"]]


def test_adapters_are_models(served, folders):
    listed = served.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["tiny", "a"]
    assert (listed[1]["root"], listed[1]["parent"]) == (str(folders["a"]), "tiny")
    assert served.http.get("/v1/models/a").json() == listed[1]
    assert _text(served, "a") != _text(served, "tiny")
    error = error_of(served.http.post("/v1/completions", json={"model": "b", "prompt": "x"}), 404)
    assert error["code"] == "model_not_found"
    assert "This server has tiny, a." in error["message"]


def test_every_form_of_requests_takes_an_adapter(served):
    messages = [{"role": "user", "content": "hello"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 2}),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": messages, "max_tokens": 2}),
    ):
        response = served.http.post(path, json={"model": "a", **body})
        assert response.status_code == 200, response.text
        assert response.json()["model"] == "a"
    assert served.http.post("/tokenize", json={"model": "a", "prompt": "hello"}).status_code == 200
    assert served.http.post("/v1/explain", json={"model": "a", "prompt": "hello"}).status_code == 200
    warm = {"model": "a", "prompt": "hello there, how are you today, and what is it that you want from me now?"}
    assert served.http.post("/v1/cache/warm", json=warm, headers=ADMIN).status_code == 200


def test_an_adapter_has_a_cache_of_its_own(served):
    prompt = (
        "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness"
    )
    for model in ("tiny", "a"):
        for is_cached in (False, True):
            answer = served.complete(prompt, model=model, max_tokens=2)
            assert bool(answer["usage"]["prompt_tokens_details"]["cached_tokens"]) == is_cached


def test_adapters_come_and_go_while_others_are_served(served, folders):
    expected = {name: _text(served, name) for name in ("tiny", "a")}
    ends = threading.Event()

    def keep_asking(name):
        num = 0
        while not ends.is_set() or not num:
            assert _text(served, name) == expected[name]
            num += 1
        return num

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(keep_asking, name) for name in expected]
        texts = set()
        try:
            for _ in range(3):
                for folder in ("b", "c"):
                    loaded = _load(served, "x", folders[folder])
                    assert loaded.status_code == 200
                    assert loaded.text == "Success: LoRA adapter 'x' added successfully."
                    texts.add((folder, _text(served, "x")))
                    assert _names(served) == ["tiny", "a", "x"]
                    gone = _unload(served, "x")
                    assert gone.text == "Success: LoRA adapter 'x' removed successfully."
                    assert _names(served) == ["tiny", "a"]
                    assert served.http.post("/v1/completions", json={"model": "x", "prompt": "x"}).status_code == 404
        finally:
            ends.set()
        assert all(one.result() for one in asking)
    assert len(texts) == 2, "each adapter says its own, every time"
    served.check_pool()


def test_unloading_waits_for_requests_and_their_name_is_free_at_once(served, folders):
    assert _load(served, "x", folders["b"]).status_code == 200
    served.runner.close_gate()
    with ThreadPoolExecutor(2) as pool, opened_at_the_end(served):
        text = pool.submit(_text, served, "x")
        served.runner.wait_in_step()
        gone = pool.submit(_unload, served, "x")
        until(lambda: not served.client._commands.empty(), "the engine to be asked")
        served.runner.allow(1)  # it hears of it between steps
        until(lambda: _names(served) == ["tiny", "a"], "the name to go")
        assert not gone.done()
        assert "max_loras is 2" in error_of(_load(served, "y", folders["c"]), 400)["message"]
        served.runner.allow()
        assert text.result()
        assert gone.result().status_code == 200
    assert _load(served, "x", folders["c"]).status_code == 200
    assert _unload(served, "x").status_code == 200


def test_metrics_tell_of_adapters(served, folders):
    served.runner.close_gate()
    with ThreadPoolExecutor(1) as pool, opened_at_the_end(served):
        text = pool.submit(_text, served, "a")
        served.runner.wait_in_step()
        lines = served.http.get("/metrics").text.splitlines()
        served.runner.allow()
        text.result()
    (info,) = (line for line in lines if line.startswith("vllm:lora_requests_info{"))
    for label in ('running_lora_adapters="a"', 'waiting_lora_adapters=""', 'max_lora="2"'):
        assert label in info
    assert served.metric("pagefold:lora_adapters", "loaded") == 1
    assert served.metric("pagefold:lora_adapters", "leaving") == 0
    size = (folders["a"] / "adapter_model.safetensors").stat().st_size
    assert 0 < served.metric("pagefold:lora_bytes") <= size


@pytest.mark.parametrize(
    ("path", "body", "status", "what"),
    [
        ("load", {"lora_name": "x"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ("load", {"lora_path": "/x"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ("load", {"lora_name": "x", "lora_path": ""}, 400, "Both"),
        ("load", {"lora_name": 1, "lora_path": "/x"}, 400, "lora_name"),
        ("load", {"lora_name": "x", "lora_path": "/x", "load_inplace": "yes"}, 400, "load_inplace"),
        ("load", {"lora_name": "tiny", "lora_path": "/x"}, 400, "the name of the model"),
        ("load", {"lora_name": "a", "lora_path": "/x"}, 400, "The lora adapter 'a' has already been loaded."),
        ("load", {"lora_name": "x", "lora_path": "/no/such/folder"}, 404, "no adapter_config.json"),
        ("load", {"lora_name": "x", "lora_path": "a" * 5000}, 404, "cannot be read: File name too long"),
        ("load", {"lora_name": "x\n", "lora_path": "/x"}, 400, "characters"),
        ("load", {"lora_name": "x/..", "lora_path": "/x"}, 400, "which no URL could tell"),
        ("load", {"lora_name": "x" * 300, "lora_path": "/x"}, 400, "300 characters"),
        ("unload", {}, 400, "'lora_name' needs to be provided to unload a LoRA adapter."),
        ("unload", {"lora_name": "x"}, 404, "The lora adapter 'x' cannot be found."),
        ("unload", {"lora_name": "tiny"}, 404, "cannot be found"),
    ],
)
def test_what_is_refused_changes_nothing(path, body, status, what, served):
    response = served.http.post(f"/v1/{path}_lora_adapter", json=body, headers=ADMIN)
    assert what in error_of(response, status)["message"]
    assert _names(served) == ["tiny", "a"]


def test_adapters_that_do_not_go_are_refused_and_the_server_goes_on(served, folders, tmp_path):
    def config(folder, **fields):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    for fields, what in (({"use_dora": True}, "DoRA"), ({"r": 64}, "config says 64"), ({"peft_type": "IA3"}, "IA3")):
        folder = tmp_path / what
        shutil.copytree(folders["b"], folder)
        config(folder, **fields)
        error = error_of(_load(served, "x", folder), 400)
        assert error["code"] == "adapter_refused"
        assert what in error["message"]
    cut = tmp_path / "cut"
    shutil.copytree(folders["b"], cut)
    file = cut / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "damaged" in error_of(_load(served, "x", cut), 400)["message"]
    assert _text(served, "a")


def test_the_routes_are_the_admins(served, folders):
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert served.http.post(path, json={"lora_name": "a"}).status_code == 401
    assert _names(served) == ["tiny", "a"]


def test_loading_in_place_gives_the_name_to_another(served, folders):
    before = _text(served, "a")
    assert _load(served, "a", folders["b"], load_inplace=True).status_code == 200
    assert _text(served, "a") != before
    assert _load(served, "a", folders["a"], load_inplace=True).status_code == 200
    assert _text(served, "a") == before
    assert _names(served) == ["tiny", "a"]


def test_without_enable_lora_there_are_none(tiny, tiny_chat_model):
    assert error_of(tiny.http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/x"}), 403)
    server = LocalServer(tiny_chat_model, door={"admin_api_key": "sk-admin"}, kv_cache_memory_bytes=2**22)
    try:
        assert "--enable-lora" in error_of(_load(server, "a", "/x"), 404)["message"]
        assert "--enable-lora" in error_of(_unload(server, "a"), 404)["message"]
        assert not server.metrics("vllm:lora_requests_info")
    finally:
        server.close()
