"""The store of responses: bounded in bytes and number, fair between tenants; and over HTTP, whose each one is."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from random import Random

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_server import LocalServer, error_of

from pagefold.config import Account, ServerConfig
from pagefold.errors import ConfigError
from pagefold.server.responses.store import ResponseStore

GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def put(store: ResponseStore, tenant: str, name: str, num_bytes: int = 100) -> bool:
    return store.put(tenant, {"id": name, "text": "x" * num_bytes}, [])


def test_what_is_put_is_got_by_its_tenant_alone():
    store = ResponseStore(10_000)
    assert store.put("a", {"id": "r"}, [{"role": "user"}])
    assert json.loads(store.get("a", "r").response) == {"id": "r"}
    assert json.loads(store.get("a", "r").items) == [{"role": "user"}]
    assert store.get("b", "r") is store.get("", "r") is None
    assert not store.delete("b", "r")
    assert store.delete("a", "r")
    assert store.get("a", "r") is None
    assert not store.delete("a", "r")
    assert (store.num_responses, store.num_bytes) == (0, 0)


def test_who_was_not_used_for_longest_goes_first():
    store = ResponseStore(10**6, max_responses=2)
    put(store, "a", "1")
    put(store, "a", "2")
    store.get("a", "1")
    put(store, "a", "3")
    assert [store.get("a", name) is not None for name in "123"] == [True, False, True]


def test_nobody_can_push_out_what_others_keep():
    store = ResponseStore(20_000)
    put(store, "small", "kept")
    for number in range(100):
        assert put(store, "large", str(number), 1000)
    assert store.get("small", "kept")
    assert store.get("large", "99")
    assert not store.get("large", "0")


def test_nor_with_many_small_ones():
    store = ResponseStore(10**6, max_responses=20)
    for number in range(5):
        assert put(store, "large", str(number), 10_000)
    for number in range(100):
        assert put(store, "small", str(number))
    assert [store.get("large", str(number)) is not None for number in range(5)] == [True] * 5
    assert store.get("small", "99")
    assert not store.get("small", "0")


def test_what_is_larger_than_all_of_it_is_not_kept_and_takes_nothing_away():
    store = ResponseStore(10_000)
    put(store, "a", "1")
    assert not put(store, "a", "2", 10_000)
    assert store.get("a", "1")


def test_without_room_it_is_off():
    store = ResponseStore(0)
    assert not store.is_on
    assert not put(store, "a", "1")
    with pytest.raises(ConfigError):
        ServerConfig(responses_store_bytes=-1)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(0, 3000), st.booleans())))
def test_it_is_never_larger_than_it_may_be(steps):
    store = ResponseStore(12_000, max_responses=5)
    for at, (tenant, number, size, is_put) in enumerate(steps):
        if is_put:
            assert put(store, tenant, f"{at}", size)
            assert store.get(tenant, f"{at}")
        else:
            store.delete(tenant, f"{number}")
        kept = [stored for shelf in store._shelves.values() for stored in shelf.values()]
        assert store.num_responses == len(kept) <= 5
        assert store.num_bytes == sum(stored.num_bytes for stored in kept) <= 12_000
        assert all(store._shelves.values())


class SlowModel:
    """What a store keeps, decided by looking at all of it each time."""

    def __init__(self, max_bytes: int, max_responses: int):
        self.max_bytes, self.max_responses = max_bytes, max_responses
        self.sizes: dict[tuple[str, str], int] = {}  # used longest ago first

    def put(self, tenant: str, name: str, size: int, store: ResponseStore) -> bool:
        if size > self.max_bytes:
            return False
        self.sizes[tenant, name] = size
        while sum(self.sizes.values()) > self.max_bytes or len(self.sizes) > self.max_responses:
            are_too_large = sum(self.sizes.values()) > self.max_bytes
            takes = Counter()
            for (whose, _), each in self.sizes.items():
                takes[whose] += each if are_too_large else 1
            of_each = {whose: (whose, name) for whose, name in reversed(self.sizes)}
            candidates = [of_each[whose] for whose in takes if takes[whose] == max(takes.values())]
            gone = [one for one in candidates if one[1] not in store._shelves.get(one[0], {})]
            assert gone, "of those who take most, one loses what was not used for longest"
            del self.sizes[gone[0]]
        return (tenant, name) in self.sizes

    def use(self, tenant: str, name: str) -> bool:
        if (tenant, name) in self.sizes:
            self.sizes[tenant, name] = self.sizes.pop((tenant, name))
        return (tenant, name) in self.sizes


@pytest.mark.parametrize("seed", range(20))
def test_it_keeps_what_a_slow_model_keeps(seed):
    random = Random(seed)
    limits = random.choice([1500, 4000, 20_000, 60_000]), random.choice([1, 2, 5, 20])
    store, model = ResponseStore(*limits), SlowModel(*limits)
    for at in range(300):
        tenant, name = random.choice("abcd"), f"{random.randrange(max(0, at - 40), at + 1)}"
        draw = random.random()
        if draw < 0.5:
            text = "x" * random.choice([0, 50, random.randrange(2000), random.randrange(9000)])
            size = 1024 + len(f'{{"id":"{at}","text":"{text}"}}[]')
            assert put(store, tenant, f"{at}", len(text)) == model.put(tenant, f"{at}", size, store)
        elif draw < 0.9:
            assert (store.get(tenant, name) is not None) == model.use(tenant, name)
        else:
            assert store.delete(tenant, name) == (model.sizes.pop((tenant, name), None) is not None)
        assert (store.num_responses, store.num_bytes) == (len(model.sizes), sum(model.sizes.values()))


@pytest.fixture
def client(tiny):
    with client_of(tiny) as client:
        yield client


def client_of(server: LocalServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def create(client, text: str, **fields):
    return client.responses.create(model="tiny", input=text, max_output_tokens=24, **{**GREEDY, **fields})


def test_a_response_goes_on_from_the_one_before_and_finds_its_blocks(tiny, client):
    """What was computed for the first is read from the cache for the second; its answer's tokens too, as far as they
    are the same when they are read again."""
    long = {"extra_body": {"ignore_eos": True, "cache_salt": uuid.uuid4().hex}}
    first = create(client, "Tell me of the rain in Spain, and where it stays mainly.", **long)
    second = create(client, "And in Oslo?", previous_response_id=first.id, **long)
    third = create(client, "Why?", previous_response_id=second.id, **long)
    assert (second.previous_response_id, first.previous_response_id) == (first.id, None)
    history = [{"role": "user", "content": "Tell me of the rain in Spain, and where it stays mainly."}, *first.output]
    whole = create(client, [*history, {"role": "user", "content": "And in Oslo?"}])
    assert whole.output_text == second.output_text
    assert whole.usage.input_tokens == second.usage.input_tokens
    for before, after in ((first, second), (second, third)):
        num_cached = after.usage.input_tokens_details.cached_tokens
        assert num_cached >= before.usage.input_tokens - 1 > 0
        assert after.usage.input_tokens > before.usage.input_tokens
        full = after.usage.input_tokens // 16 * 16
        assert after.usage.input_tokens_details.cache_write_tokens == full - num_cached


def test_instructions_and_tools_are_not_inherited(tiny, client):
    first = create(client, "Hi", instructions="Answer in verse, with many words.")
    second = create(client, "Hi", previous_response_id=first.id)
    history = [{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "Hi"}]
    plain = create(client, history)
    assert (second.instructions, second.usage.input_tokens) == (None, plain.usage.input_tokens)
    other = create(client, "Hi", previous_response_id=first.id, instructions="Be short.")
    assert other.output_text == create(client, history, instructions="Be short.").output_text


def test_a_stream_is_stored_at_its_end(tiny, client):
    *_, end = create(client, "Hi", stream=True)
    assert end.response.store
    assert client.responses.retrieve(end.response.id) == end.response
    assert create(client, "Go on", previous_response_id=end.response.id).status == "incomplete"


def test_retrieve_and_delete(tiny, client):
    before = tiny.metric("pagefold:cache_bytes", "responses")
    response = create(client, "Hi")
    assert client.responses.retrieve(response.id) == response
    assert tiny.metric("pagefold:cache_bytes", "responses") > before + 1000
    later = create(client, "And?", previous_response_id=response.id)
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(response.id)
    assert create(client, "Why?", previous_response_id=later.id).status == "incomplete"  # it leans on nobody
    client.responses.delete(later.id)
    error = error_of(tiny.http.post("/v1/responses", json={"input": "x", "previous_response_id": later.id}), 400)
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
    assert error_of(tiny.http.get("/v1/responses/x?stream=true"), 400)["param"] == "stream"
    assert len(error_of(tiny.http.get(f"/v1/responses/{'x' * 5000}"), 404)["message"]) < 300


def test_store_false_keeps_nothing(tiny, client):
    before = tiny.metric("pagefold:cache_bytes", "responses")
    response = create(client, "Hi", store=False)
    assert response.store is False
    assert tiny.metric("pagefold:cache_bytes", "responses") == before
    assert error_of(tiny.http.get(f"/v1/responses/{response.id}"), 404)["code"] == "response_not_found"


def test_what_failed_is_not_kept(tiny, client, caplog):
    before = tiny.metric("pagefold:cache_bytes", "responses")
    tiny.runner.fail(3)
    *_, end = create(client, "Hi", stream=True)
    assert end.type == "response.failed"
    assert tiny.metric("pagefold:cache_bytes", "responses") == before


def test_another_tenant_finds_nothing(tiny_chat_model):
    accounts = (Account(key="sk-a1", tenant="a"), Account(key="sk-a2", tenant="a"), Account(key="sk-b", tenant="b"))
    door = {"accounts": accounts, "admin_api_key": "sk-admin", "open_metrics": True, "responses_store_bytes": 6_000}
    server = LocalServer(tiny_chat_model, door=door, kv_cache_memory_bytes=2**22)
    try:
        with client_of(server, "sk-a1") as one, client_of(server, "sk-a2") as two, client_of(server, "sk-b") as other:
            response = create(one, "Hi")
            assert two.responses.retrieve(response.id) == response
            assert create(two, "Go on", previous_response_id=response.id, store=False).status == "incomplete"
            with client_of(server, "sk-admin") as admin:
                for stranger in (other, admin):
                    with pytest.raises(openai.NotFoundError):
                        stranger.responses.retrieve(response.id)
                    with pytest.raises(openai.NotFoundError):
                        stranger.responses.delete(response.id)
                    with pytest.raises(openai.BadRequestError):
                        create(stranger, "Go on", previous_response_id=response.id)
            large = create(one, "word " * 1200)  # more than the whole store has room for
            assert large.store is False
            assert one.responses.retrieve(response.id)
    finally:
        server.close()


def test_without_a_store_nothing_is_kept_and_nobody_is_told_otherwise(tiny_chat_model):
    server = LocalServer(tiny_chat_model, door={"responses_store_bytes": 0}, kv_cache_memory_bytes=2**22)
    try:
        response = server.http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 2}).json()
        assert response["store"] is False
        error = error_of(server.http.post("/v1/responses", json={"input": "Hi", "store": True}), 400)
        assert error["param"] == "store"
        assert "--responses-store-bytes" in error["message"]
        assert error_of(server.http.get(f"/v1/responses/{response['id']}"), 404)
    finally:
        server.close()
