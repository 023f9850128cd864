"""/v1/chat/completions, on the tiny model and on the built-in one, with openai's client and without."""

from __future__ import annotations

import openai
import pytest
from local_server import PATIENCE_S, error_of, finish_reasons, joined

GREEDY = {"temperature": 0, "ignore_eos": True}
HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def smol_client(smol):
    with openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def test_a_chat_has_openai_s_form(tiny):
    answer = tiny.chat("Say hello.", max_tokens=5, **GREEDY)
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"]["role"] == "assistant"
    assert answer["usage"]["prompt_tokens"] == len(tiny.tokenizer.encode_chat(HELLO))


def test_the_template_is_the_model_s(tiny):
    """A chat is the completion of its templated text."""
    system, assistant = {"role": "system", "content": "You are terse."}, {"role": "assistant", "content": "Hi."}
    messages = [system, *HELLO, assistant, *HELLO]
    token_ids = tiny.tokenizer.encode_chat(messages)
    response = tiny.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, **GREEDY})
    by_hand = tiny.complete(token_ids, max_tokens=8, **GREEDY)
    assert response.json()["choices"][0]["message"]["content"] == by_hand["choices"][0]["text"]
    messages[0]["role"] = "developer"
    renamed = tiny.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, **GREEDY})
    assert renamed.json()["choices"] == response.json()["choices"]


def test_content_may_come_in_text_parts(tiny):
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}]
    in_parts = tiny.chat(parts, max_tokens=6, **GREEDY)
    assert in_parts["choices"] == tiny.chat("Say\nhello.", max_tokens=6, **GREEDY)["choices"]
    one_part = tiny.chat(parts[:1], max_tokens=6, **GREEDY)
    assert one_part["choices"] == tiny.chat("Say", max_tokens=6, **GREEDY)["choices"]


def test_an_answer_may_be_as_long_as_fits(tiny):
    tiny.runner.script = [500]  # computes no KV that others may find
    usage = tiny.chat("on and " * 950, **{**GREEDY, "cache_salt": "scripted"})["usage"]
    assert usage["total_tokens"] == 2048
    assert usage["completion_tokens"] > 16  # what a completion has unless asked otherwise


def test_a_stream_begins_with_the_role(tiny):
    body = {"messages": HELLO, "max_tokens": 6, "stream_options": {"include_usage": True}, **GREEDY}
    events = tiny.events("/v1/chat/completions", body)
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert finish_reasons(events) == ["length"]
    assert events[-1]["choices"] == []
    whole = tiny.chat("Say hello.", max_tokens=6, **GREEDY)
    assert joined(events) == whole["choices"][0]["message"]["content"]
    assert events[-1]["usage"]["completion_tokens"] == 6


def test_a_long_chat_is_tokenized_like_a_short_one(tiny):
    content = "word " * 1500
    usage = tiny.chat(content, max_tokens=1, **GREEDY)["usage"]
    assert usage["prompt_tokens"] == len(tiny.tokenizer.encode_chat([{"role": "user", "content": content}]))


def test_a_template_that_refuses_is_a_400(tiny, monkeypatch):
    monkeypatch.setattr(
        tiny.tokenizer._tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}", raising=True
    )
    response = tiny.http.post("/v1/chat/completions", json={"messages": HELLO})
    error = error_of(response, 400)
    assert error["param"] == "messages"
    assert "roles must alternate" in error["message"]


def test_a_model_without_template_says_so(tiny, monkeypatch):
    monkeypatch.setattr(tiny.tokenizer._tokenizer, "chat_template", None)
    response = tiny.http.post("/v1/chat/completions", json={"messages": HELLO})
    assert "chat template" in error_of(response, 400)["message"]


def test_a_model_without_tokenizer_takes_token_ids_only(tiny, monkeypatch):
    monkeypatch.setattr(tiny.engine, "tokenizer", None)
    assert error_of(tiny.http.post("/v1/completions", json={"prompt": "text"}), 400)["param"] == "prompt"
    assert error_of(tiny.http.post("/v1/chat/completions", json={"messages": HELLO}), 400)["param"] == "messages"
    assert tiny.complete([1, 2, 3], **GREEDY)["usage"]["completion_tokens"] == 16


# The built-in model, in a process of its own, as users run it.


def test_openai_s_client_chats(smol, smol_client):
    ask = {"model": smol.model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    whole = smol_client.chat.completions.create(**ask, temperature=0, max_completion_tokens=8)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    stream = smol_client.chat.completions.create(
        **ask, temperature=0, max_completion_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens // 16 * 16 - 1


def test_openai_s_client_completes(smol, smol_client):
    fields = {"model": smol.model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 6}
    whole = smol_client.completions.create(**fields)
    assert whole.choices[0].text.startswith(" Paris")
    assert "".join(chunk.choices[0].text for chunk in smol_client.completions.create(**fields, stream=True)) == (
        whole.choices[0].text
    )
    stopped = smol_client.completions.create(**fields, stop=["ris"])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (" Pa", "stop")


def test_the_real_model_speaks_emoji(smol, smol_client):
    fields = {"model": smol.model, "prompt": "😀😃😄😁😆😅😂🤣😊😇" * 2, "temperature": 0, "max_tokens": 12}
    whole = smol_client.completions.create(**fields).choices[0].text
    pieces = [chunk.choices[0].text for chunk in smol_client.completions.create(**fields, stream=True)]
    assert any(ord(character) > 0x1F000 for character in whole)
    assert "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_openai_s_client_lists_models(smol, smol_client):
    assert [model.id for model in smol_client.models.list()] == [smol.model]
    assert smol_client.models.retrieve(smol.model).id == smol.model
    with pytest.raises(openai.NotFoundError) as caught:
        smol_client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_openai_s_client_understands_errors(smol, smol_client):
    with pytest.raises(openai.NotFoundError) as unknown:
        smol_client.chat.completions.create(model="gpt-4", messages=HELLO)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as too_long:
        smol_client.completions.create(model=smol.model, prompt="x " * 3000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as several:
        smol_client.chat.completions.create(model=smol.model, messages=HELLO, n=129)
    assert several.value.param == "n"


def test_a_refusal_is_what_the_assistant_said(tiny):
    said = {"role": "assistant", "content": "I cannot."}
    usual = {"messages": [*HELLO, said, *HELLO], "max_tokens": 6, **GREEDY}
    expected = tiny.http.post("/v1/chat/completions", json=usual).json()["choices"]
    assert expected[0]["message"]["refusal"] is None
    for refused in (
        {"content": None, "refusal": "I cannot."},
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
    ):
        body = {**usual, "messages": [*HELLO, {"role": "assistant", **refused}, *HELLO]}
        assert tiny.http.post("/v1/chat/completions", json=body).json()["choices"] == expected


def test_one_call_at_most_where_calls_are_not_parallel(tiny):
    call = '<tool_call>[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]</tool_call>'
    tool = {"type": "function", "function": {"name": "f"}}
    for choice in ("auto", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool]}}):
        for is_parallel in (True, False):
            tiny.runner.script = [*tiny.tokenizer.encode(call), 2]
            fields = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": is_parallel}
            message = tiny.chat("Go.", cache_salt="scripted", **fields)["choices"][0]["message"]
            assert len(message["tool_calls"]) == (2 if is_parallel else 1)
