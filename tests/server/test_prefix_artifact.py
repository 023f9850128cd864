"""A prefix as a file, through the command line and over HTTP: what one server computed, another one finds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from local_server import LocalServer, ProcessServer, error_of, until
from store.memory_store import always_load
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.config import Account

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ADMIN = {"Authorization": "Bearer sk-admin"}
DOOR = {
    "accounts": (Account(key="sk-acme", tenant="acme"), Account(key="sk-beta", tenant="beta")),
    "api_keys": ("sk-plain",),
    "admin_api_key": "sk-admin",
    "open_metrics": True,
}
SYSTEM = "You are a careful librarian, and you never raise your voice. " * 20
LAYOUT_FLAGS = ("--dtype", "float64", "--attention-backend", "reference")
ASKED = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def served(model: Path, folder: Path | None, **settings: object) -> LocalServer:
    disk = {} if folder is None else {"kv_disk_path": str(folder), "kv_disk_size": 0.03, "kv_offloading_size": 0.01}
    server = LocalServer(
        model,
        door=DOOR,
        kv_cache_memory_bytes=2**22,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        **disk,
        **({"kv_write_policy": "write_through"} if disk else {}),
        **settings,
    )
    if disk:
        always_load(server.engine)
    return server


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.stdout if not code else result.stderr


def ask(server: LocalServer, prompt: str, key: str = "sk-plain", **fields: object) -> tuple[str, int]:
    """Return what follows a prompt, and how many of its tokens were found."""
    body = {"prompt": prompt, **ASKED, **fields}
    response = server.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def origin(tiny_chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    """A folder in which a server has left a prompt, for nobody, for a tenant, and with a salt; and what followed."""
    folder = tmp_path_factory.mktemp("origin")
    server = served(tiny_chat_model, folder / "kv")
    try:
        texts = {
            "nobody": ask(server, SYSTEM + "Go.")[0],
            "acme": ask(server, "Acme. " + SYSTEM, "sk-acme")[0],
            "salt": ask(server, "Salt. " + SYSTEM, cache_salt="pepper")[0],
        }
        num_blocks = sum(len(server.tokenizer.encode(prefix + SYSTEM)) // 16 for prefix in ("", "Acme. ", "Salt. "))
        written = "pagefold:tier_blocks_written_total"
        until(lambda: server.metric(written, "kept") >= num_blocks, "all blocks to be written")
    finally:
        server.close()
    (folder / "prompt.txt").write_text(SYSTEM + "\n")
    (folder / "acme.json").write_text(json.dumps({"prompt": "Acme. " + SYSTEM, "tenant": "acme"}))
    (folder / "salt.json").write_text(json.dumps({"prompt": "Salt. " + SYSTEM}))
    return {"folder": folder, "texts": texts, "model": tiny_chat_model}


def export(origin: dict, prompt: str, file: Path, *flags: object) -> dict:
    folder = origin["folder"]
    told = run(
        "cache", "export", folder / "kv", file, "--prompt", folder / prompt, "--model", origin["model"],
        *LAYOUT_FLAGS, *flags, "--json",
    )  # fmt: skip
    return json.loads(told)


@pytest.fixture
def plain(origin: dict, tmp_path: Path) -> Path:
    export(origin, "prompt.txt", tmp_path / "plain.kv")
    return tmp_path / "plain.kv"


def test_a_prompt_goes_by_file_into_the_folder_of_another_server(origin, plain, tmp_path):
    shown = json.loads(run("cache", "show", plain, "--json"))
    assert shown["layout"]["dtype"] == "torch.float64"
    assert shown["is_anybodys"]
    assert "anybody's" in run("cache", "show", plain)
    told = json.loads(run("cache", "import", plain, tmp_path / "kv", "--limit", "30M", "--json"))
    assert told["num_kept"] == told["num_blocks"] == shown["num_blocks"] > 10
    server = served(origin["model"], tmp_path / "kv")
    try:
        text, num_found = ask(server, SYSTEM + "Go.")
        assert num_found == shown["num_tokens"]
        assert text == origin["texts"]["nobody"]
        assert ask(server, SYSTEM + "Go.", "sk-acme") == (text, 0)
        assert ask(server, SYSTEM + "Go.", cache_salt="pepper") == (text, 0)
        server.check_pool()
    finally:
        server.close()


def test_a_running_server_takes_it_and_pins_it(origin, plain, tmp_path):
    num_tokens = json.loads(run("cache", "show", plain, "--json"))["num_tokens"]
    server = served(origin["model"], tmp_path / "kv")
    try:
        flags = ("--url", server.url, "--admin-api-key", "sk-admin")
        result = json.loads(run("warm", plain, *flags, "--pin", "--json"))
        assert result["num_kept"] == {"disk": result["num_blocks"]}
        assert result["warmed"]["num_cached_tokens"] >= num_tokens - 16
        assert result["warmed"]["pin"]["num_tokens"] == num_tokens
        text, num_found = ask(server, SYSTEM + "Go.")
        assert (text, num_found) == (origin["texts"]["nobody"], num_tokens)
        assert ask(server, SYSTEM + "Go.", "sk-acme") == (text, 0)
        told = run("warm", plain, *flags, "--tenant", "acme")
        assert f"{result['num_blocks']} in disk" in told
        assert ask(server, SYSTEM + "Go.", "sk-acme") == (text, num_tokens)
        server.check_pool()
    finally:
        server.close()


def test_what_is_a_tenants_or_has_a_salt_is_found_by_nobody_else(origin, tmp_path):
    assert not export(origin, "acme.json", tmp_path / "acme.kv")["is_anybodys"]
    assert not export(origin, "salt.json", tmp_path / "salt.kv", "--cache-salt", "pepper")["is_anybodys"]
    assert "has 0 of the prompt's" in run(
        "cache", "export", origin["folder"] / "kv", tmp_path / "none.kv", "--prompt", origin["folder"] / "acme.json",
        "--model", origin["model"], *LAYOUT_FLAGS, "--tenant", "beta", code=2,
    )  # fmt: skip
    server = served(origin["model"], tmp_path / "kv")
    try:
        flags = ("--url", server.url, "--admin-api-key", "sk-admin")
        for name in ("acme", "salt"):
            assert "not warmed: whose it is was not said" in run("warm", tmp_path / f"{name}.kv", *flags)
            assert "must be known whose" in run("warm", tmp_path / f"{name}.kv", *flags, "--pin", code=2)
        assert "another tenant or another salt" in run("warm", tmp_path / "acme.kv", *flags, "--tenant", "beta", code=2)
        assert ask(server, "Acme. " + SYSTEM)[1] == 0
        assert ask(server, "Acme. " + SYSTEM, "sk-beta")[1] == 0
        assert ask(server, "Salt. " + SYSTEM)[1] == 0
        assert ask(server, "Salt. " + SYSTEM, cache_salt="sugar")[1] == 0
        for prompt, key, fields, name in (
            ("Acme. " + SYSTEM, "sk-acme", {}, "acme"),
            ("Salt. " + SYSTEM, "sk-plain", {"cache_salt": "pepper"}, "salt"),
        ):
            text, num_found = ask(server, prompt, key, **fields)
            assert text == origin["texts"][name]
            assert num_found > 200
        warmed = json.loads(run("warm", tmp_path / "acme.kv", *flags, "--tenant", "acme", "--pin", "--json"))["warmed"]
        assert warmed["pin"]["tenant"] == "acme"
    finally:
        server.close()


def test_other_layouts_are_refused_by_name_before_anything_is_written(origin, plain, tmp_path):
    flags = ("--model", origin["model"], *LAYOUT_FLAGS)
    said = run("cache", "import", plain, tmp_path / "kv", "--limit", "30M", *flags, "--block-size", 32, code=2)
    assert "its blocks have 16 tokens, and here they have 32" in said
    for wrong in ({"prompt": [2**40]}, {"prompt": [-1]}):
        (tmp_path / "ids.json").write_text(json.dumps(wrong))
        assert "which no model has" in run(
            "cache",
            "export",
            origin["folder"] / "kv",
            tmp_path / "x",
            "--prompt",
            tmp_path / "ids.json",
            *flags,
            code=2,
        )
    said = run("cache", "import", plain, tmp_path / "kv", "--limit", "30M", "--model", "smollm2-135m", code=2)
    assert "its model is" in said
    assert "its dtype is torch.float64, and here torch." in said
    assert not (tmp_path / "kv").exists()
    server = served(origin["model"], tmp_path / "other", block_size=32)
    try:
        admin = ("--url", server.url, "--admin-api-key", "sk-admin")
        assert "its blocks have 16 tokens, and here they have 32" in run("warm", plain, *admin, code=2)
        assert server.engine.intake._stores[0].use().num_blocks == 0
    finally:
        server.close()


def test_a_damaged_file_is_refused_before_anything_is_sent_or_written(origin, plain, tmp_path):
    raw = bytearray(plain.read_bytes())
    raw[-1] ^= 1
    (tmp_path / "bad.kv").write_bytes(raw)
    server = served(origin["model"], tmp_path / "other")
    try:
        admin = ("--url", server.url, "--admin-api-key", "sk-admin")
        assert "is damaged: block" in run("warm", tmp_path / "bad.kv", *admin, code=2)
        assert server.engine.intake._stores[0].use().num_blocks == 0
    finally:
        server.close()
    assert "is damaged: block" in run("cache", "show", tmp_path / "bad.kv", code=2)
    assert "is damaged: block" in run("cache", "import", tmp_path / "bad.kv", tmp_path / "kv", "--limit", "30M", code=2)
    assert not (tmp_path / "kv").exists()


def test_what_makes_no_sense_is_refused(origin, plain, tmp_path):
    folder = origin["folder"]
    assert "--tenant can only go with --prompt" in run(
        "cache", "export", folder / "kv", tmp_path / "all", "--tenant", "acme", code=2
    )
    assert "none is given" in run(
        "cache", "export", folder / "kv", tmp_path / "one", "--prompt", folder / "prompt.txt", code=2
    )
    run("cache", "export", folder / "kv", tmp_path / "all")
    assert "go with the file of a prefix" in run(
        "cache", "import", tmp_path / "all", tmp_path / "kv", "--limit", "30M", "--model", "x", code=2
    )
    assert "is a whole exported cache" in run("cache", "show", tmp_path / "all", code=2)
    for text, said in (
        ('{"prompt": "a", "kv_keep": 0.5}', "packed chunks"),
        ('{"prompt": "a", "more": 1}', "more: Extra inputs"),
        ('{"prompt": ""}', ""),
        ("", ""),
    ):
        (tmp_path / "odd").write_text(text)
        assert said in run(
            "cache", "export", folder / "kv", tmp_path / "one", "--prompt", tmp_path / "odd", "--model",
            origin["model"], *LAYOUT_FLAGS, code=2,
        )  # fmt: skip
    assert "no Pagefold server" in run("warm", plain, "--url", "http://127.0.0.1:9", code=2).replace("No", "no")


def test_the_route_takes_whole_right_frames_and_nothing_else(origin, plain, tmp_path):
    frames = plain.read_bytes()[4096:]
    server = served(origin["model"], tmp_path / "kv")
    try:
        layout = server.http.get("/v1/cache/layout", headers=ADMIN).json()
        assert (layout["object"], layout["block_size"], layout["tiers"]) == ("cache.layout", 16, ["disk"])
        size = 4096 + layout["block_bytes"]
        num_before = server.engine.intake._stores[0].use().num_blocks

        def post(body: bytes, headers: dict = ADMIN):
            return server.http.post("/v1/cache/import", content=body, headers=headers)

        flipped = bytearray(frames[: 2 * size])
        flipped[-1] ^= 1
        other = frames[: 8 * 4].join([frames[:16], frames[48:size]])
        for body, said in (
            (b"", "The body has 0 bytes"),
            (frames[: size - 1], "and a frame of a block has"),
            (b"x" * size, "Block 0 of the body is not right (damaged)"),
            (bytes(flipped), "Block 1 of the body is not right (damaged)"),
            (other[:size].ljust(size, b"\0"), "is not right"),
        ):
            assert said in error_of(post(body), 400)["message"]
        assert error_of(post(frames[:size], {}), 401)
        assert error_of(post(frames[:size], {"Authorization": "Bearer sk-acme"}), 401)
        assert error_of(post(frames[:size] * (2**20 // size + 2)), 413)
        assert server.engine.intake._stores[0].use().num_blocks == num_before
        assert post(frames[: 2 * size]).json() == {"object": "cache.import", "num_blocks": 2, "num_kept": {"disk": 2}}
        assert server.engine.intake._stores[0].use().num_blocks == num_before + 2
    finally:
        server.close()


def test_a_server_without_slow_tiers_says_so(origin, plain):
    server = served(origin["model"], None)
    try:
        assert "keeps none on a disk" in error_of(server.http.get("/v1/cache/layout", headers=ADMIN), 400)["message"]
        assert "takes no blocks of others" in run(
            "warm", plain, "--url", server.url, "--admin-api-key", "sk-admin", code=2
        )
    finally:
        server.close()


@pytest.mark.long
def test_chats_of_the_built_in_model_between_processes(tmp_path):
    """As the page on prefix files shows it."""
    flags = (
        *("--kv-cache-memory-bytes", "64M", "--kv-offloading-size", "0.1", "--kv-disk-size", "0.3"),
        *("--max-model-len", "1024", "--admin-api-key", "sk-admin", "--kv-write-policy", "write_through"),
    )
    messages = [{"role": "system", "content": SYSTEM}]
    chat = {"messages": [*messages, {"role": "user", "content": "Where is the door?"}], **ASKED}
    (tmp_path / "chat.json").write_text(json.dumps({"messages": messages}))

    def answer(server):
        told = server.http.post("/v1/chat/completions", json=chat).raise_for_status().json()
        return told["choices"][0]["message"]["content"], told["usage"]["prompt_tokens_details"]["cached_tokens"]

    server = ProcessServer("smollm2-135m", *flags, "--kv-disk-path", str(tmp_path / "one"))
    try:
        first = answer(server)[0]
        until(lambda: server.metric("pagefold:tier_blocks_written_total", "kept") > 10, "the blocks are written")
    finally:
        server.close()
    file = tmp_path / "system.kv"
    run("cache", "export", tmp_path / "one", file, "--prompt", tmp_path / "chat.json", "--model", "smollm2-135m")
    other = ProcessServer("smollm2-135m", *flags, "--kv-disk-path", str(tmp_path / "two"), "--block-size", "32")
    try:
        run("warm", file, "--url", other.url, "--admin-api-key", "sk-admin")
        text, num_found = answer(other)
        assert text == first
        assert num_found > 200
    finally:
        other.close()
