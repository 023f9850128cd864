"""The front of many servers, before real servers of this process: what they answer comes through, whoever goes."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec

import httpx
import pytest
from local_server import LocalServer, until
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.cli.serve_fleet import arguments_of_replicas
from pagefold.errors import ConfigError
from pagefold.index import DEFAULT_SEED, PrefixIndex, block_hashes
from pagefold.index.order import EventCounts
from pagefold.integrations.ray.accounts import tenants_of
from pagefold.integrations.ray.child_server import ChildServer, ServerNotStartedError
from pagefold.integrations.ray.forwarded import Forwarded, Head, ReplicaLostError, passed_on
from pagefold.integrations.ray.front import Front
from pagefold.integrations.ray.front_metrics import front_metrics
from pagefold.integrations.ray.passing import pass_on
from pagefold.integrations.ray.prompts import TokenizedPrompts
from pagefold.integrations.ray.settings import FleetSettings
from pagefold.routing import PrefixRouting, Router

GREEDY = {"temperature": 0, "ignore_eos": True}
BLOCK = 16
LONG = "tell me more of this and of that " * 8
_OF_THE_CACHE = (
    "prompt_tokens_details",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
    "input_tokens",
    "cache_creation",
)
_OF_ANSWERS = ("id", "created", "system_fingerprint")


class Fleet:
    """A front, and the servers behind it."""

    def __init__(self, servers: dict[str, LocalServer]) -> None:
        self.servers = servers
        self.index = PrefixIndex()
        self.router = Router(PrefixRouting(), self.index, block_size=BLOCK, cache_tokens=8192)
        for name in servers:
            self.router.add(name)
            self.index.begin(name)
        self.prompts = TokenizedPrompts(
            self.send, block_size=BLOCK, most_tokens=8192, tenant_of=tenants_of(None), seed=DEFAULT_SEED
        )
        self.front = Front(self.router, self.send, self.prompts, self.clock)
        self.clients: dict[str, httpx.AsyncClient] = {}
        self.sent: list[tuple[str, str]] = []
        self.gone: set[str] = set()
        self.breaks_after: int | None = None
        self.num_breaks = 1
        self.now = 0.0

    def clock(self) -> float:
        self.now += 1e-3
        return self.now

    async def send(self, replica, asked):
        """As the ingress sends: with a connection that breaks where the test says so."""
        self.sent.append((replica, asked.path))
        if replica in self.gone:
            raise ReplicaLostError(replica)
        if replica not in self.clients:
            self.clients[replica] = httpx.AsyncClient(base_url=self.servers[replica].url, timeout=60)
        num_pieces = 0
        stream = pass_on(self.clients[replica], replica, asked)
        try:
            async for piece in stream:
                breaks = self.num_breaks and self.breaks_after is not None and asked.path != "/tokenize"
                if breaks and num_pieces >= self.breaks_after:
                    self.num_breaks -= 1
                    raise ReplicaLostError(replica)
                num_pieces += 1
                yield piece
        finally:
            await stream.aclose()

    def run(self, work):
        """Run what is asynchronous, with connections of its own."""

        async def whole():
            try:
                return await work
            finally:
                for client in self.clients.values():
                    await client.aclose()
                self.clients.clear()

        return asyncio.run(whole())

    async def ask(self, path, body=None, headers=()):
        """An answer as a client gets it: status, headers, body."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        headers = (*headers, ("content-type", "application/json"))
        method = "GET" if body is None else "POST"
        answer = await self.front.answer(Forwarded(method, path, passed_on(headers), content))
        try:
            pieces = [piece async for piece in answer.body]
        finally:
            await answer.body.aclose()
        return answer.head.status, dict(answer.head.headers), b"".join(pieces)

    def went_to(self, path):
        return [replica for replica, sent in self.sent if sent == path]


class Locked(LocalServer):
    """A server whose metrics ask for a key, which the test has."""

    def open_http(self) -> None:
        super().open_http()
        self.http.headers["authorization"] = "Bearer seen"


@pytest.fixture(scope="module")
def servers(tiny_chat_model):
    made = {name: LocalServer(tiny_chat_model, kv_cache_memory_bytes=2**22) for name in ("a", "b")}
    yield made
    for server in made.values():
        server.check_pool()
        server.close()


@pytest.fixture
def fleet(servers):
    made = Fleet(servers)
    yield made
    assert not any(made.router.num_requests(name) for name in made.router.open_replicas), "all have ended"


def plain(body: bytes):
    """What an answer says, without what differs between two of the same."""
    told = json.loads(body)
    for name in _OF_THE_CACHE:
        told.get("usage", {}).pop(name, None)
    return {name: value for name, value in told.items() if name not in _OF_ANSWERS}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "once upon", "max_tokens": 4, **GREEDY}),
        ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, **GREEDY}),
        ("/v1/completions", {"prompt": ["one", "two"], "max_tokens": 4, **GREEDY}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **GREEDY}),
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
        ("/v1/completions", {"prompt": 7}),
        ("/v1/completions", {"prompt": "x", "model": "another"}),
        ("/v1/completions", b"no json"),
        ("/v1/completions", b"[]"),
        ("/v1/completions", b"[" * 100_000),
        ("/v1/chat/completions", {"messages": "hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}),
        ("/v1/models", None),
        ("/nowhere", {"a": 1}),
    ],
)
def test_what_a_server_answers_comes_through(fleet, servers, path, body):
    status, headers, answer = fleet.run(fleet.ask(path, body))
    method = "GET" if body is None else "POST"
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    direct = servers["a"].http.request(method, path, content=content, headers={"content-type": "application/json"})
    assert (status, headers["content-type"]) == (direct.status_code, direct.headers["content-type"])
    assert plain(answer) == plain(direct.content)


def test_events_come_as_they_are_made(fleet, servers):
    body = {"prompt": "once upon a time", "max_tokens": 6, "stream": True, **GREEDY}
    _, headers, told = fleet.run(fleet.ask("/v1/completions", body))
    assert headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in told.decode().splitlines() if line]
    assert events[-1] == "[DONE]"
    texts = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1] if json.loads(event)["choices"])
    assert texts == servers["b"].complete("once upon a time", max_tokens=6, **GREEDY)["choices"][0]["text"]


def test_who_returns_goes_where_he_was(fleet):
    async def talk():
        for number in range(4):
            await fleet.ask("/v1/completions", {"prompt": LONG + str(number), "max_tokens": 1, **GREEDY})

    fleet.run(talk())
    assert len(set(fleet.went_to("/v1/completions"))) == 1
    assert fleet.router.num_choices == {"nothing_held": 1, "prefix": 3}


def test_a_chat_and_its_next_turn_begin_alike(fleet):
    first = [{"role": "user", "content": LONG}]
    then = [*first, {"role": "assistant", "content": "well"}, {"role": "user", "content": "go on"}]

    async def talk():
        for messages in (first, then):
            await fleet.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **GREEDY})

    fleet.run(talk())
    assert fleet.router.num_choices == {"nothing_held": 1, "prefix": 1}


def test_those_who_must_not_share_are_not_looked_for_together(fleet):
    async def talk():
        for salt in ("one", "two"):
            await fleet.ask("/v1/completions", {"prompt": LONG, "max_tokens": 1, "cache_salt": salt, **GREEDY})

    fleet.run(talk())
    assert fleet.router.num_choices == {"nothing_held": 2}


def test_hashes_are_those_of_the_servers_tokens(fleet, servers):
    asked = Forwarded("POST", "/v1/completions", (), json.dumps({"prompt": LONG}).encode())
    prompt = fleet.run(fleet.prompts.read(asked, "a"))
    token_ids = servers["a"].http.post("/tokenize", json={"prompt": LONG}).json()["tokens"]
    assert prompt == (block_hashes(token_ids, BLOCK), len(token_ids), True)


def test_events_that_stop_are_told_and_load_decides(fleet):
    for name in "ab":
        fleet.index.forget(name)
    fleet.run(fleet.ask("/v1/completions", {"prompt": LONG, "max_tokens": 1, **GREEDY}))
    assert fleet.router.num_choices == {"unknown": 1}
    heard = [EventCounts(num_applied=5, num_replayed=2), EventCounts(num_applied=1)]
    told = front_metrics(fleet.router, fleet.front, fleet.index, heard).decode()
    assert 'pagefold:router_event_batches_total{how="sent"} 4.0' in told
    assert 'pagefold:router_event_batches_total{how="replayed"} 2.0' in told
    assert 'pagefold:router_requests_total{reason="unknown"} 1.0' in told
    assert "pagefold:router_unknown_replicas 2.0" in told


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_replica_that_is_gone_before_it_answers_is_replaced_and_left_alone_for_a_while(fleet, is_stream):
    fleet.gone = {"a"}
    body = {"prompt": LONG, "max_tokens": 2, "stream": is_stream, **GREEDY}
    assert [fleet.run(fleet.ask("/v1/completions", body))[0] for _ in range(5)] == [200] * 5
    assert [replica for replica, _ in fleet.sent].count("a") == 1, "it was lost when it was asked for tokens"
    assert fleet.front.num_broken == 0
    assert fleet.router.num_choices == {"nothing_held": 1, "prefix": 4}, (
        "each request is counted once, and all are read"
    )


def test_who_alone_is_left_is_asked_again_though_it_was_lost(fleet):
    fleet.router.drain("b")
    fleet.gone = {"a"}
    body = {"prompt": [9] * 40, "max_tokens": 2, **GREEDY}
    assert fleet.run(fleet.ask("/v1/completions", body))[0] == 503
    fleet.gone = set()
    assert fleet.run(fleet.ask("/v1/completions", body))[0] == 200
    assert fleet.front.num_retried == 0, "there was nobody to try it with"


def test_what_is_refused_leaves_no_trace_in_the_account(fleet):
    before = [fleet.router._placed(fleet.router._loads[name]) for name in "ab"]
    status, _, _ = fleet.run(fleet.ask("/v1/completions", {"prompt": [9] * 5000, "max_tokens": 2}))
    assert status == 400
    assert [fleet.router._placed(fleet.router._loads[name]) for name in "ab"] == pytest.approx(before)
    assert not len(fleet.router._expected)


def test_headers_are_bytes_and_come_through(fleet, servers):
    status, _, _ = fleet.run(fleet.ask("/v1/models", headers=[("user-agent", "caf\xe9"), ("x-mine", "\xc3\xa9")]))
    assert status == 200


@pytest.mark.parametrize("path", ["/v1/responses/resp_1", "/v1/explain/cmpl-1", "/v1/sessions/mine"])
def test_what_one_server_remembers_is_not_asked_of_another(fleet, path):
    status, _, told = fleet.run(fleet.ask(path))
    assert status == 404
    assert "there are several" in json.loads(told)["error"]["message"]
    assert not fleet.sent


@pytest.mark.parametrize(("num_breaks", "status"), [(1, 200), (2, 503)])
def test_an_answer_that_is_lost_in_the_middle_is_asked_for_again_where_nothing_was_sent(fleet, num_breaks, status):
    """A whole answer is sent when it is complete: its replica may go until then."""
    fleet.breaks_after, fleet.num_breaks = 1, num_breaks
    got, _, told = fleet.run(fleet.ask("/v1/completions", {"prompt": [9] * 40, "max_tokens": 2, **GREEDY}))
    assert got == status
    assert fleet.went_to("/v1/completions") in (["a", "b"], ["b", "a"])
    if status == 200:
        assert json.loads(told)["usage"]["completion_tokens"] == 2
    else:
        assert json.loads(told)["error"]["code"] == "engine_unavailable"


def test_a_stream_whose_replica_goes_ends_with_an_error(fleet):
    fleet.breaks_after = 2
    body = {"prompt": [9] * 40, "max_tokens": 50, "stream": True, **GREEDY}
    status, _, told = fleet.run(fleet.ask("/v1/completions", body))
    last = json.loads(told.decode().strip().splitlines()[-1].removeprefix("data: "))
    assert status == 200
    assert (last["error"]["code"], last["error"]["type"]) == ("replica_lost", "service_unavailable_error")
    assert fleet.front.num_broken == 1


def test_who_drains_is_left_out(tiny_chat_model, servers):
    ending = LocalServer(tiny_chat_model, kv_cache_memory_bytes=2**22)
    ending.client.drain(0.0)
    fleet = Fleet({"a": ending, "b": servers["b"]})
    try:
        for _ in range(3):
            status, _, _ = fleet.run(fleet.ask("/v1/completions", {"prompt": [3, 4], "max_tokens": 1, **GREEDY}))
            assert status == 200
        fleet.router.drain("b")
        status, _, told = fleet.run(fleet.ask("/v1/completions", {"prompt": [3, 4], "max_tokens": 1}))
        assert status == 503, "what the server itself says"
        assert json.loads(told)["error"]["code"] == "engine_unavailable"
    finally:
        ending.close()


def test_nobody_is_there(fleet):
    for name in "ab":
        fleet.router.drain(name)
    status, headers, told = fleet.run(fleet.ask("/v1/completions", {"prompt": "x"}))
    assert (status, headers["retry-after"]) == (503, "1")
    assert json.loads(told)["error"]["code"] == "engine_unavailable"
    assert fleet.run(fleet.ask("/v1/models"))[0] == 503


def test_a_client_that_goes_ends_its_request(fleet, servers):
    async def go(reads: int):
        body = {"prompt": [9] * 40, "max_tokens": 1500, "stream": True, **GREEDY}
        asked = Forwarded("POST", "/v1/completions", (("content-type", "application/json"),), json.dumps(body).encode())
        answer = await fleet.front.answer(asked)
        for _ in range(reads):
            await anext(answer.body)
        assert sum(fleet.router.num_requests(name) for name in "ab") == 1
        await answer.body.aclose()
        await answer.body.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(answer.body)

    for reads in (0, 3):
        fleet.run(go(reads))
        for server in servers.values():
            until(server.is_idle, "the request to end")


def test_all_are_asked_to_forget(fleet, tiny_chat_model):
    assert fleet.run(fleet.ask("/reset_prefix_cache", {}))[0] == 403, "without an admin key nobody may"
    made = {
        name: LocalServer(tiny_chat_model, kv_cache_memory_bytes=2**22, door={"admin_api_key": "me"}) for name in "ab"
    }
    both = Fleet(made)
    try:
        for server in made.values():
            server.complete(LONG, max_tokens=1)
            assert server.metric("pagefold:num_cached_blocks") > 0
        key = (("authorization", "Bearer me"),)
        assert both.run(both.ask("/reset_prefix_cache", {}, key))[0] == 200
        assert [server.metric("pagefold:num_cached_blocks") for server in made.values()] == [0, 0]
    finally:
        for server in made.values():
            server.close()


def test_many_at_once_are_spread(fleet):
    async def crowd():
        bodies = [{"prompt": [number + 5] * 60, "max_tokens": 2, **GREEDY} for number in range(12)]
        return await asyncio.gather(*(fleet.ask("/v1/completions", body) for body in bodies))

    assert {status for status, _, _ in fleet.run(crowd())} == {200}
    assert 3 <= fleet.went_to("/v1/completions").count("a") <= 9


def test_whose_a_key_is(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text('[[keys]]\nkey = "secret-of-ann-0001"\ntenant = "ann"\n')
    file.chmod(0o600)
    tenant_of = tenants_of(str(file))
    assert tenant_of([("authorization", "Bearer secret-of-ann-0001")]) == "ann"
    assert tenant_of([("x-api-key", "secret-of-ann-0001")]) == "ann"
    assert tenant_of([("authorization", "Bearer another")]) == tenant_of([]) == ""


def test_heads_say_whether_events_follow():
    assert Head("a", 200, (("content-type", "text/event-stream; charset=utf-8"),)).is_stream
    assert not Head("a", 200, (("content-type", "application/json"),)).is_stream
    assert passed_on([("Connection", "close"), ("X-Mine", "1")]) == (("x-mine", "1"),)


def test_who_may_see_what_all_do_is_the_servers_to_say(fleet, tiny_chat_model):
    assert fleet.run(fleet.front.may_see_traffic(())) is None
    locked = Locked(tiny_chat_model, kv_cache_memory_bytes=2**22, door={"metrics_key": "seen"})
    closed = Fleet({"a": locked})
    try:
        refused = closed.run(closed.front.may_see_traffic(()))
        assert refused.head.status == 401
        assert closed.run(closed.front.may_see_traffic((("authorization", "Bearer seen"),))) is None
    finally:
        locked.close()


def test_arguments_of_replicas_are_those_of_the_command_but_for_the_fronts():
    given = ("m", "--replicas", "2", "--threads", "1", "--port=80", "--routing", "load", "--warm", "w", "--host", "h")
    assert arguments_of_replicas(given) == ("m", "--threads", "1", "--warm", "w")
    assert arguments_of_replicas(("--port", "80", "m", "--host=0.0.0.0")) == ("m",)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"arguments": ("m", "--port=1")}, "--port cannot be given"),
        ({"arguments": ("m", "--kv-events-config", "{}")}, "--kv-events-config cannot be given"),
        ({"min_replicas": 0}, "min_replicas is 0"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas 2"),
        ({"upscale_delay_s": -1.0}, "upscale_delay_s is -1"),
        ({"downscale_delay_s": float("nan")}, "downscale_delay_s is nan"),
        ({"downscale_delay_s": float("inf")}, "downscale_delay_s is inf"),
        ({"routing": "magic"}, "round_robin"),
    ],
)
def test_what_a_fleet_cannot_be_is_refused(change, told):
    with pytest.raises(ConfigError, match=told):
        FleetSettings(**({"arguments": ("m",)} | change))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--routing", "load"), "Give --replicas too"),
        (("--max-replicas", "3"), "Give --replicas too"),
        (("--replicas", "2", "--kv-cache-memory-bytes", "64M", "--routing", "magic"), "round_robin"),
        (("--replicas", "3", "--max-replicas", "2", "--kv-cache-memory-bytes", "64M"), "max_replicas 2"),
        (("--replicas", "2"), "--kv-cache-memory-bytes"),
        (("--replicas", "2", "--kv-cache-memory-bytes", "64M", "--port", "0"), "Give --port"),
        (("--replicas", "1", "--kv-disk-path", "/nowhere", "--kv-offloading-size", "1"), "--kv-remote-url"),
        (("--replicas", "2", "--record-trace", "/nowhere"), "--record-trace is of one server"),
        (("--replicas", "2", "--kv-events-config", '{"enable_kv_cache_events": true}'), "--kv-events-config is of one"),
        (("--replicas", "0"), "greater than or equal to 1"),
    ],
)
def test_what_does_not_go_with_many_servers_is_refused(flags, told):
    result = CliRunner().invoke(app, ["serve", "smollm2-135m", *flags])
    assert result.exit_code == 2, result.output
    assert told in " ".join(result.output.split())


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_extra_is_named():
    result = CliRunner().invoke(app, ["serve", "smollm2-135m", "--replicas", "1"])
    assert result.exit_code == 2
    assert 'pip install "pagefold[ray]"' in " ".join(result.output.split())


def test_a_child_server_that_cannot_start_says_why():
    lines = []
    child = ChildServer(("/no/such/folder",), lines.append)
    with pytest.raises(ServerNotStartedError, match="/no/such/folder"):
        child.wait_until_ready()
    assert not child.is_alive
    assert lines
