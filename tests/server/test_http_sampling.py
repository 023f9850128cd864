"""Penalties, bias, min_tokens and logprobs over HTTP, with openai's client: streamed and not, in both forms."""

from __future__ import annotations

import asyncio

import openai
import pytest
from local_server import PATIENCE_S

from pagefold.sampling import SamplingParams

GREEDY = {"temperature": 0, "ignore_eos": True}
EXTRA = {"ignore_eos": True}
HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def client(tiny):
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def test_a_completion_s_logprobs_are_the_model_s(tiny, client, tiny_chat_model):
    import torch
    from transformers import AutoModelForCausalLM

    prompt = tiny.tokenizer.encode("one two three four")
    fields = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "seed": 5, "temperature": 1.7, "logprobs": 2}
    (choice,) = client.completions.create(**fields, extra_body=EXTRA).choices
    told = choice.logprobs
    deltas = told_by_engine(tiny, prompt, max_tokens=8, seed=5, temperature=1.7)
    output = [token_id for delta in deltas for token_id in delta.token_ids]  # several in one, where we were late
    model = AutoModelForCausalLM.from_pretrained(tiny_chat_model, dtype=torch.float64)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    for at, token_id in enumerate(output):
        assert told.token_logprobs[at] == pytest.approx(float(expected[at, token_id]), abs=1e-6)
        best = expected[at].topk(2).values.tolist()
        others = sorted(told.top_logprobs[at].values(), reverse=True)
        assert others[:2] == pytest.approx(best, abs=1e-6)
        assert told.tokens[at] in told.top_logprobs[at]
        assert len(told.top_logprobs[at]) in {2, 3}


def told_by_engine(tiny, prompt, **fields):
    """Return what the engine says itself: deltas."""

    async def ask():
        how = SamplingParams(ignore_eos=True, **fields)
        return [delta async for delta in tiny.client.submit("direct", prompt, how)]

    return asyncio.run(ask())


@pytest.mark.parametrize("num", [0, 3])
def test_streamed_logprobs_of_a_completion_are_the_whole_ones(tiny, client, num):
    fields = {"model": "tiny", "prompt": "any", "max_tokens": 24, "seed": 3, "logprobs": num, "extra_body": EXTRA}
    (whole,) = client.completions.create(**fields).choices
    chunks = [chunk.choices[0] for chunk in client.completions.create(**fields, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert len(chunks) == 24, "every token is told at once"
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        told = [one for chunk in chunks for one in getattr(chunk.logprobs, name)]
        assert told == getattr(whole.logprobs, name)
        assert len(told) == 24
    assert all(len(best) in {max(num, 1), num + 1} for best in whole.logprobs.top_logprobs)


def test_offsets_are_where_a_token_s_text_begins(tiny, client):
    """Also of tokens within a character, and where text is held back for a stop string that does not come."""
    fields = {"model": "tiny", "prompt": "x", "max_tokens": 40, "seed": 1, "logprobs": 0, "stop": "zzzzzzzz"}
    (choice,) = client.completions.create(**fields, extra_body=EXTRA).choices
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    whole = [at for at, token in enumerate(tokens) if not token.startswith("bytes:") and "<|" not in token]
    assert len(whole) > 10
    before_whole = [at for at in whole if at == 0 or at - 1 in whole]
    assert all(choice.text[offsets[at] :].startswith(tokens[at]) for at in before_whole)


def test_a_chat_s_logprobs_streamed_and_whole(tiny, client):
    # Only these tokens may come, whatever the weights: two whole ones and two that lie within a character.
    some = tiny.tokenizer.encode("\U0001f468")[:2] + tiny.tokenizer.encode("ok")[:1] + tiny.tokenizer.encode(" yes")[:1]
    fields = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "seed": 2, "logprobs": True, "top_logprobs": 4}
    fields["logit_bias"] = {str(token_id): 60 for token_id in some}
    (whole,) = client.chat.completions.create(**fields, extra_body=EXTRA).choices
    stream = client.chat.completions.create(**fields, extra_body=EXTRA, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    told = [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content]
    assert told == whole.logprobs.content
    assert len(told) == 24
    assert all(len(one.top_logprobs) == 4 for one in told)
    for one in told:
        best = [other.logprob for other in one.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert one.logprob <= best[0]
        if "\ufffd" not in one.token:
            assert bytes(one.bytes).decode() == one.token
    assert any("\ufffd" in one.token for one in told)
    assert any("\ufffd" not in one.token for one in told)
    assert all(one.bytes for one in told)
    bare = client.chat.completions.create(**{**fields, "top_logprobs": 0}, extra_body=EXTRA).choices[0].logprobs
    assert [one.logprob for one in bare.content] == [one.logprob for one in told]
    assert all(one.top_logprobs == [] for one in bare.content)


def test_bytes_of_tokens_are_the_bytes_of_the_text(tiny):
    text = "naïve 日本語 👨‍👩‍👧 ok\n"
    ids = tiny.tokenizer.encode(text)
    assert any("\ufffd" in token for token in tiny.tokenizer.token_texts(ids))
    assert b"".join(tiny.tokenizer.token_bytes(token_id) for token_id in ids).decode() == text


def test_logprobs_are_there_only_if_asked_for(tiny):
    assert tiny.complete("a", **GREEDY)["choices"][0]["logprobs"] is None
    assert tiny.chat("a", max_tokens=2, **GREEDY)["choices"][0]["logprobs"] is None
    for event in tiny.events("/v1/completions", {"prompt": "a", **GREEDY}):
        assert event["choices"][0]["logprobs"] is None


def test_a_model_without_tokenizer_tells_ids(tiny, monkeypatch):
    monkeypatch.setattr(tiny.engine, "tokenizer", None)
    monkeypatch.setattr(tiny.engine._outputs, "_tokenizer", None)
    told = tiny.complete([1, 2, 3], logprobs=1, **GREEDY)["choices"][0]["logprobs"]
    assert all(token.startswith("token_id:") for token in told["tokens"])


def test_a_bias_a_penalty_and_min_tokens_do_what_they_say(tiny):
    token = tiny.tokenizer.encode(" yes")[0]
    text = tiny.tokenizer.decode([token])
    biased = {"logit_bias": {str(token): 100}, "max_tokens": 6, **GREEDY}
    assert tiny.complete("say", **biased)["choices"][0]["text"] == text * 6
    once = tiny.complete("say", **biased, repetition_penalty=1e6)["choices"][0]["text"]
    assert once.count(text) == 1
    ended = {"logit_bias": {"2": 100}, "max_tokens": 6, "temperature": 0}
    for min_tokens in (0, 1, 4):
        answer = tiny.complete("say", **ended, min_tokens=min_tokens)
        assert answer["usage"]["completion_tokens"] == min_tokens + 1
        assert answer["choices"][0]["finish_reason"] == "stop"
    cut = {"prompt": "dice", "seed": 4, "max_tokens": 12, "ignore_eos": True}
    greedy = tiny.complete("dice", max_tokens=12, **GREEDY)["choices"]
    assert tiny.complete(**cut, min_p=1)["choices"] == greedy != tiny.complete(**cut)["choices"]


@pytest.mark.quick(every=5)
@pytest.mark.parametrize(
    "field",
    [
        {"min_p": 0.9},
        {"presence_penalty": 2},
        {"frequency_penalty": -1.5},
        {"repetition_penalty": 1.5},
        {"logit_bias": {"300": 30, "301": 30}},
    ],
    ids=str,
)
def test_a_field_reaches_the_engine(tiny, field):
    """Over HTTP as asked directly, and not as without it."""
    prompt, common = [5, 6, 7], {"seed": 4, "max_tokens": 24, "temperature": 0.05}
    if "logit_bias" not in field:  # few tokens, which come again and again: something to penalise
        common |= {"temperature": 1.0, "logit_bias": {str(token): 20 for token in range(300, 308)}}
    over_http = tiny.complete(prompt, ignore_eos=True, **common, **field)["choices"][0]["text"]
    asked = common | field
    if "logit_bias" in asked:
        asked["logit_bias"] = {int(token): bias for token, bias in asked["logit_bias"].items()}
    assert over_http == "".join(delta.text for delta in told_by_engine(tiny, prompt, **asked))
    assert over_http != tiny.complete(prompt, ignore_eos=True, **common)["choices"][0]["text"]
