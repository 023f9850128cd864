"""response_format and vLLM's structured outputs over HTTP, with openai's client: streamed and not, in both routes.

The model is random: what is valid is so by its grammar.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pytest
from jsonschema import Draft202012Validator
from local_server import PATIENCE_S, error_of, finish_reasons, joined
from pydantic import BaseModel, ConfigDict, Field

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Zürich", "東京", "Oslo"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 31}, "maxItems": 3},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["city", "days", "note"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "strict": True, "schema": SCHEMA}}
HELLO = [{"role": "user", "content": "Plan a trip."}]
SO = "structured_outputs"


class Stop(BaseModel):
    model_config = ConfigDict(extra="forbid")
    place: Literal["Köln", "Bonn"]
    minutes: int = Field(ge=0, le=90)


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")
    is_long: bool
    stops: list[Stop] = Field(min_length=1, max_length=2)


@pytest.fixture
def client(tiny):
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def assert_of_schema(text):
    Draft202012Validator(SCHEMA).validate(json.loads(text))


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("seed", range(5))
def test_a_chat_answers_in_json_of_the_schema(tiny, seed):
    (choice,) = tiny.chat("Plan a trip.", response_format=FORMAT, seed=seed)["choices"]
    assert choice["finish_reason"] == "stop"
    assert_of_schema(choice["message"]["content"])


def test_pydantic_models_are_parsed_by_openai_s_client(client):
    completion = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Trip, seed=4)
    (choice,) = completion.choices
    assert isinstance(choice.message.parsed, Trip)
    assert choice.finish_reason == "stop"
    fields = {"model": "tiny", "messages": HELLO, "seed": 4}
    with client.chat.completions.stream(**fields, response_format=Trip) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True, "regex": None}},
        {"guided_json": SCHEMA},
    ],
)
def test_completions_take_every_name_and_stream_the_same(tiny, fields):
    body = {"prompt": "Plan", "seed": 2, "max_tokens": 300, **fields}
    (choice,) = tiny.complete(**body)["choices"]
    assert choice["finish_reason"] == "stop"
    assert_of_schema(choice["text"])
    events = tiny.events("/v1/completions", body)
    assert joined(events) == choice["text"]
    assert finish_reasons(events) == ["stop"]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({SO: {"regex": r"\d{4}-[éü]{2}"}}, r"\d{4}-[éü]{2}"),
        ({"guided_regex": "[a-c]{1,5}"}, "[a-c]{1,5}"),
        ({SO: {"choice": ["left", "right"]}}, "left|right"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({SO: {"grammar": 'start: "<" /[0-9]{1,3}/ ">"'}}, r"<\d{1,3}>"),
        ({"guided_grammar": 'root ::= "<" [0-9] ">"'}, r"<\d>"),
    ],
)
def test_vllm_s_other_forms(tiny, fields, pattern):
    for path, prompt in (("/v1/completions", {"prompt": "Go"}), ("/v1/chat/completions", {"messages": HELLO})):
        body = {**prompt, "seed": 1, "max_tokens": 60, **fields}
        response = tiny.http.post(path, json=body).json()
        (choice,) = response["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert re.fullmatch(pattern, text)
        assert joined(tiny.events(path, body)) == text


def test_any_json_object(tiny):
    """Unbounded, so that a random model seldom ends: what there is begins an object."""
    (choice,) = tiny.complete("Go", response_format={"type": "json_object"}, max_tokens=20)["choices"]
    assert choice["text"].startswith("{")
    free = [tiny.complete("Go", seed=1, response_format=form)["choices"] for form in ({"type": "text"}, None)]
    assert free[0] == free[1] == tiny.complete("Go", seed=1)["choices"]


def test_what_cannot_be_enforced_is_ignored_unless_strict(tiny):
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    (choice,) = tiny.complete("Go", response_format=form, max_tokens=60)["choices"]
    assert len(json.loads(choice["text"])) == 2


def test_length_is_told_when_max_tokens_cuts_the_json(tiny):
    (choice,) = tiny.complete("Go", response_format=FORMAT, max_tokens=3)["choices"]
    assert choice["finish_reason"] == "length"


def test_each_prompt_has_a_matcher_of_its_own(tiny):
    choices = tiny.complete(["One", "Two", "Three"], response_format=FORMAT, max_tokens=300)["choices"]
    assert len(choices) == 3
    for choice in choices:
        assert_of_schema(choice["text"])


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("stream", [False, True])
def test_each_sample_has_a_matcher_of_its_own(tiny, stream):
    body = {"prompt": "Go", "response_format": FORMAT, "n": 4, "seed": 3, "max_tokens": 300}
    if stream:
        events = tiny.events("/v1/completions", body)
        texts = [joined(events, index) for index in range(4)]
    else:
        texts = [choice["text"] for choice in tiny.complete(**body)["choices"]]
    assert len(texts) == 4
    for text in texts:
        assert_of_schema(text)
    alone = [tiny.complete(**{**body, "n": 1, "seed": 3 + index})["choices"][0]["text"] for index in range(4)]
    assert texts == alone


def test_the_best_of_several_is_of_the_schema(tiny):
    (choice,) = tiny.complete("Go", response_format=FORMAT, n=1, best_of=3, max_tokens=300)["choices"]
    assert_of_schema(choice["text"])


def test_many_clients_with_and_without_grammars(tiny):
    free = tiny.complete("Free", max_tokens=40, seed=9)["choices"]

    def ask(at):
        if at % 3 == 0:
            return tiny.complete("Free", max_tokens=40, seed=9)["choices"] == free
        word = f"w{at}é"
        return tiny.complete("Go", structured_outputs={"choice": [word]}, max_tokens=30)["choices"][0]["text"] == word

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(48)))


def test_streams_go_on_while_a_grammar_compiles(tiny, monkeypatch):
    """A grammar that takes long to compile is refused in the end; others do not wait for it."""
    from pagefold.structured import vetting

    monkeypatch.setattr(vetting, "TIME_LIMIT_S", 2.0)
    slow = {"allOf": [{"type": "string", "pattern": f".*{at}b{at}c.*"} for at in range(60)]}
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(tiny.http.post, "/v1/completions", json={"prompt": "Go", "guided_json": slow})
        num_answers = 0
        while not refused.done():
            tiny.complete("Go", max_tokens=2)
            num_answers += 1
        error = error_of(refused.result(), 400)
    assert "too complex" in error["message"]
    assert error["param"] == "guided_json"
    assert num_answers >= 3


def test_a_grammar_that_fails_on_the_way_is_the_client_s(tiny, monkeypatch):
    from pagefold.structured.grammar import GrammarMatcher

    accept = GrammarMatcher.accept

    def failing(self, token_id):
        accept(self, token_id)
        self.error = "the test lets it fail"

    monkeypatch.setattr(GrammarMatcher, "accept", failing)
    body = {"prompt": "Go", "guided_regex": "(ab){9}", "max_tokens": 9}
    error = error_of(tiny.http.post("/v1/completions", json=body), 400)
    assert "after 1 tokens: the test lets it fail" in error["message"]
    assert error["param"] == "structured_outputs"


@pytest.mark.long
@pytest.mark.parametrize("temperature", [pytest.param(0, marks=pytest.mark.long), 1])
def test_the_built_in_model_answers_in_json(smol, temperature):
    answer = smol.chat("Plan a trip.", response_format=FORMAT, temperature=temperature, seed=1, max_tokens=300)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert_of_schema(choice["message"]["content"])
