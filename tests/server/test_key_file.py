"""The key file: read whole or refused with a line, never quoted; tenants never share a block."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import pytest
from local_server import LocalServer, ProcessServer, error_of, start_cli

from pagefold.config import Account, ServerConfig, TenantQuota, quotas_of
from pagefold.errors import ConfigError
from pagefold.server.completion_schemas import CompletionRequest
from pagefold.server.key_file import read_key_file
from pagefold.server.warming import tenants_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE = """\
# Who may ask.
[classes]
gold = -10
batch = 10

[[keys]]
key = "sk-acme-1"
tenant = "acme"
class = "gold"

[[keys]]
key = "sk-acme-2"
tenant = "acme"

[[keys]]
key = "sk-beta"
tenant = "beta"
class = "batch"
"""
KEEPING = """
[[keys]]
key = "sk-gamma"
tenant = "gamma"
kv_keep = 0.5
"""
ACCOUNTS = (
    Account(key="sk-acme-1", tenant="acme", customer_class="gold", priority=-10),
    Account(key="sk-acme-2", tenant="acme"),
    Account(key="sk-beta", tenant="beta", customer_class="batch", priority=10),
)


def written(folder: Path, text: str | bytes, mode: int = 0o600) -> str:
    file = folder / "keys.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    file.chmod(mode)
    return str(file)


def test_a_key_file(tmp_path):
    said: list[str] = []
    assert read_key_file(written(tmp_path, FILE), said.append) == ACCOUNTS
    keeping = Account(key="sk-gamma", tenant="gamma", kv_keep=0.5)
    assert read_key_file(written(tmp_path, FILE + KEEPING), said.append) == (*ACCOUNTS, keeping)
    assert said == []


def test_weights_and_rates_name_their_tenant_when_they_are_refused(tmp_path):
    entry = '[[keys]]\nkey = "sk-secret"\ntenant = "acme"\n'
    text = entry + "weight = 2\ntokens_per_s = 500\nburst_tokens = 20000\n"
    (account,) = read_key_file(written(tmp_path, text), print)
    assert (account.weight, account.tokens_per_s, account.burst_tokens) == (2.0, 500.0, 20000.0)
    assert CompletionRequest(prompt="x").caller(account).weight == 2.0
    with pytest.raises(ConfigError, match=r'gives tenant "acme" weight -3; write 0\.001 to 1000, such as 1'):
        read_key_file(written(tmp_path, entry + "weight = -3\n"), print)
    for field in ("weight", "tokens_per_s"):
        with pytest.raises(ConfigError, match=f'gives tenant "acme" {field} inf; write'):
            read_key_file(written(tmp_path, f"{entry}{field} = 1{'0' * 400}\n"), print)
        with pytest.raises(ConfigError, match=f'gives tenant "acme" {field} -inf; write'):
            read_key_file(written(tmp_path, f"{entry}{field} = -1{'0' * 400}\n"), print)


def test_quotas_of_kv_are_of_tenants(tmp_path):
    entry = '[[keys]]\nkey = "sk-secret"\ntenant = "acme"\n'
    accounts = read_key_file(written(tmp_path, entry + "kv_floor = 0.25\nkv_cap = 0.5\n"), print)
    assert quotas_of(accounts) == (TenantQuota(tenant="acme", kv_floor=0.25, kv_cap=0.5),)
    assert quotas_of(read_key_file(written(tmp_path, entry + "kv_cap = 1\n"), print))[0].kv_cap == 1.0
    assert quotas_of(read_key_file(written(tmp_path, entry), print)) == ()
    for said, told in (
        ('kv_cap = "25%"', 'gives tenant "acme" a kv_cap that is no number; write one, such as 0.25 for a quarter'),
        ("kv_cap = 25", 'gives tenant "acme" kv_cap 25; write 1e-06 to 1, such as 0.25 for a quarter'),
        ("kv_floor = -0.1", 'gives tenant "acme" kv_floor -0.1; write 0 to 0.99, such as'),
        ("kv_floor = 0.5\nkv_cap = 0.25", 'gives tenant "acme" kv_floor 0.5, and kv_cap 0.25, which is less'),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)):
            read_key_file(written(tmp_path, f"{entry}{said}\n"), print)


def test_a_tenants_share_is_for_requests_and_prefixes_that_ask_for_none():
    gamma = Account(key="sk-gamma", tenant="gamma", kv_keep=0.5)
    for fields, wanted in (({}, (0.5, "")), ({"kv_keep": 1}, (1.0, "")), ({"kv_quality": "exact"}, (None, "exact"))):
        caller = CompletionRequest(prompt="x", **fields).caller(gamma)
        assert (caller.kv_keep, caller.kv_quality) == wanted
    tenants = tenants_of(ServerConfig(accounts=(*ACCOUNTS, gamma)))
    assert {tenant: account.kv_keep for tenant, account in tenants.items()} == {
        "acme": None,
        "beta": None,
        "gamma": 0.5,
    }


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o644])
def test_others_may_not_read_it(tmp_path, mode):
    said: list[str] = []
    path = written(tmp_path, FILE, mode)
    read_key_file(path, said.append)
    assert len(said) == 1
    assert f"{path} (mode {mode:04o})" in said[0]
    assert f"chmod 600 {path}" in said[0]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("keys = []", 1),
        ("[classes]\ngold = 1\n", 1),
        ('[[keys]]\nkey = "sk-secret"\ntenant "acme"\n', 3),
        ('[[keys]]\nkey = "sk-secret\n', 2),
        ("sk-secret\n", 1),
        ('[[keys]]\nkey = "sk-secret"\nkey = "sk-secret2"\n', 3),
        ('[sk-secret]\n[[keys]]\nkey = "a"\ntenant = "b"\n', 1),
        ('[[keys]]\nkey = "sk-secret"\n', 1),
        ('# a\n\n[[keys]]\nkey = "sk-a"\ntenant = "a"\n\n[[keys]]\nkey = "sk-secret"\ntenant = ""\n', 7),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a"\n[[keys]]\nkey = "sk-secret"\ntenant = "b"\n', 4),
        ('[[keys]]\nkey = "two words"\ntenant = "a"\n', 1),
        ('[[keys]]\nkey = 5\ntenant = "a"\n', 1),
        ('[[keys]]\nkey = ""\ntenant = "a"\n', 1),
        ('[[keys]]\nkey = "sk-secret"\ntenant = 7\n', 1),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a\\u0007"\n', 1),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a"\nclass = "gold"\n', 1),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a"\nclass = 5\n', 1),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a"\nsk-secret = 5\n', 1),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a"\n[classes]\ngold = "high"\n', 5),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a"\n[classes]\ngold = 1\nbatch = true\n', 6),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a"\n[classes]\ngold = 99999999999\n', 5),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a"\nkv_keep = 0\n', 1),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a"\nkv_keep = nan\n', 1),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a"\nkv_keep = "half"\n', 1),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a"\nweight = 0\n', 1),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a"\nweight = nan\n', 1),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a"\nweight = "heavy"\n', 1),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a"\ntokens_per_s = -5\n', 1),
        ('[[keys]]\nkey = "sk-secret"\ntenant = "a"\nburst_tokens = 50\n', 1),
        ('[[keys]]\nkey = "a"\ntenant = "a"\nweight = 2\n[[keys]]\nkey = "sk-secret"\ntenant = "a"\n', 5),
        ('[[keys]]\nkey = "a"\ntenant = "a"\nkv_keep = 0.5\n[[keys]]\nkey = "sk-secret"\ntenant = "a"\n', 5),
        ('keys = ["sk-secret"]\n', 1),
        ('keys = "sk-secret"\n', 1),
        (f'[[keys]]\nkey = "sk-secret"\ntenant = {"9" * 5000}\n', 3),
        (f'[[keys]]\nkey = "sk-secret"\ntenant = {"[" * 5000}\n', 3),
    ],
)
def test_what_is_wrong_is_told_by_line_and_never_quoted(tmp_path, text, line):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"^Line {line} of the key file {path} ") as error:
        read_key_file(path, print)
    assert "secret" not in str(error.value)
    chain = error.value.__cause__
    assert chain is None or "secret" not in str(chain)


def test_what_cannot_be_read(tmp_path):
    for path, reason in (
        (str(tmp_path / "none.toml"), "No such file"),
        (str(tmp_path), "Is a directory"),
        (written(tmp_path, b'[[keys]]\nkey = "\xff"\n'), "not UTF-8"),
    ):
        with pytest.raises(ConfigError, match=f"cannot be read: .*{reason}"):
            read_key_file(path, print)


def test_keys_are_never_shown():
    config = ServerConfig(accounts=ACCOUNTS, api_keys=("sk-x",), admin_api_key="sk-admin")
    assert "sk-" not in repr(config) + repr(ACCOUNTS)


@pytest.mark.parametrize("field", [{"api_keys": ("sk-beta",)}, {"admin_api_key": "sk-beta"}])
def test_a_key_has_one_meaning(field):
    with pytest.raises(ConfigError, match="given twice") as error:
        ServerConfig(accounts=ACCOUNTS, **field)
    assert "sk-" not in str(error.value)


# Behind the door.


@pytest.fixture(scope="module")
def shared(tiny_chat_model: Path) -> Iterator[LocalServer]:
    door = {"accounts": ACCOUNTS, "api_keys": ("sk-plain",), "admin_api_key": "sk-admin", "open_metrics": True}
    server = LocalServer(
        tiny_chat_model, door=door, kv_cache_memory_bytes=2**22, scheduling_policy="priority", max_num_seqs=2
    )
    yield server
    server.close()


def ask(server: LocalServer, key: str, prompt: object, **fields: object) -> dict:
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    response = server.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    return response.json()


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_tenants_never_share_a_block(shared):
    prompt = list(range(1000, 1100))
    first = ask(shared, "sk-acme-1", prompt)
    others = [ask(shared, key, prompt) for key in ("sk-beta", "sk-plain")]
    assert [cached(answer) for answer in (first, *others)] == [0, 0, 0]
    again = [ask(shared, key, prompt) for key in ("sk-acme-2", "sk-beta", "sk-plain", "sk-admin")]
    assert [cached(answer) for answer in again] == [
        96,
        96,
        96,
        96,
    ]  # the admin's requests are nobody's, like a plain key's
    assert len({str(answer["choices"]) for answer in (first, *others, *again)}) == 1


def test_salts_separate_within_a_tenant(shared):
    prompt = list(range(2000, 2100))
    hits = [
        cached(ask(shared, key, prompt, **fields))
        for key, fields in (
            ("sk-acme-1", {"cache_salt": "x"}),
            ("sk-acme-2", {"cache_salt": "x"}),
            ("sk-acme-2", {}),
            ("sk-beta", {"cache_salt": "x"}),
        )
    ]
    assert hits == [0, 96, 0, 0]


def test_chats_are_the_tenants_too(shared):
    body = {"messages": [{"role": "user", "content": "How many blocks does a tenant share?"}], "max_tokens": 2}

    def chat(key: str) -> int:
        response = shared.http.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        return cached(response.json())

    assert chat("sk-acme-1") == 0
    assert chat("sk-beta") == 0
    assert chat("sk-acme-2") > 0


@pytest.mark.parametrize("field", ["tenant", "namespace", "user", "account"])
def test_a_client_cannot_choose_its_tenant_in_a_body(shared, field):
    prompt = [ord(letter) for letter in field * 20]
    assert cached(ask(shared, "sk-acme-1", prompt)) == 0
    assert cached(ask(shared, "sk-beta", prompt, **{field: "acme"})) == 0


def test_nor_anywhere_else(shared):
    prompt = list(range(3000, 3100))
    ask(shared, "sk-acme-1", prompt)
    answer = shared.http.post(
        "/v1/completions?tenant=acme",
        json={"prompt": prompt, "max_tokens": 1},
        headers={"Authorization": "Bearer sk-beta", "X-Tenant": "acme", "OpenAI-Organization": "acme"},
    )
    assert cached(answer.json()) == 0


def test_a_class_gives_the_priority_and_a_request_its_own(shared):
    seen: dict[str, int] = {}
    add = shared.engine.scheduler.add

    def note(request) -> None:
        seen[request.token_ids[0]] = request.priority
        add(request)

    shared.engine.scheduler.add = note
    try:
        for first, (key, fields) in enumerate(
            [("sk-acme-1", {}), ("sk-acme-2", {}), ("sk-beta", {}), ("sk-beta", {"priority": 3}), ("sk-plain", {})]
        ):
            ask(shared, key, [first, 5, 5], **fields)
        ask(shared, "sk-beta", [5, 5, 5], priority=0)
    finally:
        shared.engine.scheduler.add = add
    assert seen == {0: -10, 1: 0, 2: 10, 3: 3, 4: 0, 5: 0}


@pytest.mark.parametrize("key", ["-", "sk-acme", "sk-acme-11", "SK-BETA"])
def test_unknown_keys_are_refused_and_not_shown(shared, key, caplog):
    caplog.set_level(logging.DEBUG)
    response = shared.http.post("/v1/completions", json={"prompt": "x"}, headers={"Authorization": f"Bearer {key}"})
    assert error_of(response, 401)["code"] == "invalid_api_key"
    assert "sk-" not in response.text.lower()
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert "sk-" not in "".join(ours).lower()


# As users start it.


@pytest.mark.long
def test_a_served_key_file(tiny_chat_model, tmp_path):
    path = written(tmp_path, FILE, 0o644)
    flags = (
        "--api-key-file",
        path,
        "--open-metrics",
        "--scheduling-policy",
        "priority",
        "--kv-cache-memory-bytes",
        "4M",
    )
    server = ProcessServer(str(tiny_chat_model), *flags)
    try:
        error_of(server.http.post("/v1/completions", json={"prompt": "x"}), 401)
        headers = {"Authorization": "Bearer sk-acme-1"}
        assert server.http.post("/v1/completions", json={"prompt": "x"}, headers=headers).status_code == 200
    finally:
        server.process.terminate()
        server.process.wait(60)
        output = server.output()
        server.close()
    assert f"chmod 600 {path}" in output
    assert "path=/v1/completions" in output
    assert "sk-" not in output


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        (FILE + "[[keys]]\n", [], "Line 19 of the key file"),
        (FILE, [], "Class gold has priority -10, but fcfs looks at none."),
        (FILE, ["--scheduling-policy", "priority", "--api-key", "sk-beta"], "given twice"),
        (
            FILE + KEEPING,
            ["--scheduling-policy", "priority"],
            "Tenant gamma has kv_keep 0.5, and the server offers 1.0.",
        ),
        (None, [], "cannot be read: No such file"),
    ],
)
def test_a_wrong_key_file_is_refused_before_weights_are_loaded(tmp_path, text, flags, said):
    path = str(tmp_path / "no.toml") if text is None else written(tmp_path, text)
    # The model is no model: who gets as far as looking for it says so.
    process = start_cli("serve", str(tmp_path / "no-model"), "--api-key-file", path, *flags)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2
    assert said in output
    assert "sk-" not in output
    assert "no-model" not in output


def test_a_field_that_is_nearly_one_is_named_and_no_other(tmp_path):
    for name, is_named in (("wieght", True), ("sk-alpha", False)):
        entry = f'[[keys]]\nkey = "sk-beta"\ntenant = "acme"\n{name} = 2\n'
        with pytest.raises(ConfigError) as caught:
            read_key_file(written(tmp_path, entry), print)
        assert (f'"{name}", which may be meant for weight' in str(caught.value)) is is_named
        assert (name in str(caught.value)) is is_named
