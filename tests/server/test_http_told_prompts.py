"""What answers repeat of prompts: echo, logprobs, token ids; and prompts that are cut, or computed and nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest
from local_server import error_of, joined

GREEDY = {"temperature": 0, "ignore_eos": True}
TEXTS = ["one two three four five six", "naïve 日本語 🙂 <|im_start|>user", "a"]


@pytest.fixture(scope="module")
def logprobs_of(tiny_chat_model):
    """Return transformers' log-softmax behind each token, ``[tokens, vocab]``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_chat_model, dtype=torch.float64).eval()

    def logprobs(token_ids):
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)

    return logprobs


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("form", ["texts", "ids"])
def test_an_echo_tells_the_prompt_s_tokens_with_the_model_s_logprobs(tiny, logprobs_of, form, max_tokens):
    ids = [tiny.tokenizer.encode(text) for text in TEXTS]
    prompt = TEXTS if form == "texts" else ids
    tiny.complete(prompt, max_tokens=1, **GREEDY)  # what the cache holds must not be taken for what is told
    answer = tiny.complete(prompt, max_tokens=max_tokens, echo=True, logprobs=2, return_token_ids=True, **GREEDY)
    for text, token_ids, choice in zip(TEXTS, ids, answer["choices"], strict=True):
        told = choice["logprobs"]
        assert choice["prompt_token_ids"] == token_ids
        assert choice["text"].startswith(text)
        assert choice["finish_reason"] == "length"
        assert len(choice["token_ids"]) == max_tokens
        everything = token_ids + choice["token_ids"]
        assert {len(column) for column in told.values()} == {len(everything)}
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        expected = logprobs_of(everything)
        for at, token_id in enumerate(everything[1:], 1):
            assert told["token_logprobs"][at] == pytest.approx(float(expected[at - 1, token_id]), abs=1e-6)
            best = sorted(told["top_logprobs"][at].values(), reverse=True)
            assert best[:2] == pytest.approx(expected[at - 1].topk(2).values.tolist(), abs=1e-6)
            assert told["token_logprobs"][at] in best
        assert told["text_offset"] == sorted(told["text_offset"])
        assert told["text_offset"][0] == 0
        pieces = [choice["text"][begin:end] for begin, end in pairwise([*told["text_offset"], len(choice["text"])])]
        whole = [
            (token, piece)
            for token, piece in zip(told["tokens"][: len(token_ids)], pieces, strict=False)
            if not token.startswith("bytes:")
        ]
        assert whole
        assert all(token == piece for token, piece in whole if piece != "🙂" and piece not in "日本語")
    assert answer["usage"]["completion_tokens"] == max_tokens * len(TEXTS)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_stream_begins_each_choice_with_its_prompt(tiny, logprobs):
    body = {"prompt": TEXTS, "max_tokens": 4, "n": 2, "seed": 3, "ignore_eos": True, "echo": True}
    body |= {} if logprobs is None else {"logprobs": logprobs}
    whole = tiny.http.post("/v1/completions", json=body).json()["choices"]
    events = tiny.events("/v1/completions", body)
    assert len(whole) == 6
    for index, choice in enumerate(whole):
        assert joined(events, index) == choice["text"]
        assert choice["text"].startswith(TEXTS[index // 2])
        chunks = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["index"] == index]
        if logprobs is not None:
            for column, expected in choice["logprobs"].items():
                assert [one for chunk in chunks if chunk for one in chunk[column]] == expected


def test_an_echo_without_output_streams_the_prompt(tiny):
    events = tiny.events("/v1/completions", {"prompt": "one two", "max_tokens": 0, "echo": True})
    (choice,) = [event["choices"][0] for event in events]
    assert (choice["text"], choice["finish_reason"]) == ("one two", "length")


def test_without_output_a_prompt_is_only_computed(tiny):
    before = tiny.metric("vllm:generation_tokens_total")
    prompt = list(range(700, 740))
    answer = tiny.complete(prompt, max_tokens=0, temperature=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("", "length", None)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (40, 0)
    assert tiny.metric("vllm:generation_tokens_total") == before
    again = tiny.complete(prompt, max_tokens=1, temperature=0)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
    several = tiny.complete([prompt, prompt[:5]], max_tokens=0, n=3, temperature=1)
    assert [one["text"] for one in several["choices"]] == [""] * 6
    masked = tiny.complete("a", max_tokens=0, temperature=0, structured_outputs={"choice": ["yes"]})
    assert masked["choices"][0]["finish_reason"] == "length"
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0}
    assert error_of(tiny.http.post("/v1/chat/completions", json=body), 400)["param"] == "max_tokens"


def test_prompt_logprobs_have_vllm_s_form(tiny, logprobs_of):
    ids = tiny.tokenizer.encode(TEXTS[0])
    tiny.complete(ids, **GREEDY)
    (choice,) = tiny.complete(ids, prompt_logprobs=3, max_tokens=1, **GREEDY)["choices"]
    chat = tiny.chat("Hello", prompt_logprobs=0, return_token_ids=True, max_tokens=2, **GREEDY)
    cases = [(ids, choice["prompt_logprobs"], 3), (chat["prompt_token_ids"], chat["prompt_logprobs"], 0)]
    assert "prompt_logprobs" not in chat["choices"][0]
    assert len(chat["choices"][0]["token_ids"]) == 2
    for token_ids, told, num_top in cases:
        assert told[0] is None
        assert len(told) == len(token_ids)
        expected = logprobs_of(token_ids)
        for at, token_id in enumerate(token_ids[1:], 1):
            row = expected[at - 1]
            best = row.topk(max(num_top, 1)).indices.tolist()[:num_top]
            assert set(told[at]) == {str(token) for token in [token_id, *best]}
            for token, found in told[at].items():
                assert found["logprob"] == pytest.approx(float(row[int(token)]), abs=1e-6)
                assert found["rank"] == int((row > row[int(token)]).sum()) + 1
                assert found["decoded_token"] == tiny.tokenizer.token_texts([int(token)])[0]


def test_an_echo_and_prompt_logprobs_each_tell_what_they_were_asked(tiny):
    fields = {"echo": True, "logprobs": 1, "prompt_logprobs": 4, "max_tokens": 1}
    (choice,) = tiny.complete("one two three", **fields, **GREEDY)["choices"]
    assert all(len(one) in (1, 2) for one in choice["logprobs"]["top_logprobs"][1:])
    assert all(len(one) in (4, 5) for one in choice["prompt_logprobs"][1:])


def test_a_long_answer_is_written_as_a_short_one(tiny):
    """On another thread, by another encoder: the same JSON."""
    prompt = [7 + number % 900 for number in range(1500)]
    response = tiny.http.post("/v1/completions", json={"prompt": prompt, "echo": True, "logprobs": 5, "max_tokens": 0})
    assert response.headers["content-type"] == "application/json"
    assert len(response.json()["choices"][0]["logprobs"]["tokens"]) == 1500
    assert '": ' not in response.text[:200]


def test_token_ids_are_told_whole_and_streamed(tiny):
    body = {"prompt": [[8, 9], [5, 6, 7]], "max_tokens": 6, "n": 2, "seed": 1, "ignore_eos": True}
    whole = tiny.http.post("/v1/completions", json={**body, "return_token_ids": True}).json()["choices"]
    events = tiny.events("/v1/completions", {**body, "return_token_ids": True})
    for index, choice in enumerate(whole):
        assert choice["prompt_token_ids"] == ([8, 9], [5, 6, 7])[index // 2]
        assert tiny.tokenizer.decode(choice["token_ids"]).startswith(choice["text"])
        chunks = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [token for chunk in chunks for token in chunk["token_ids"]] == choice["token_ids"]
        assert [chunk.get("prompt_token_ids") for chunk in chunks[:1]] == [choice["prompt_token_ids"]]
        assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert "token_ids" not in tiny.http.post("/v1/completions", json=body).json()["choices"][0]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "return_token_ids": True, **GREEDY}
    answer = tiny.http.post("/v1/chat/completions", json=chat).json()
    chunks = tiny.events("/v1/chat/completions", chat)
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    told = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert told == answer["choices"][0]["token_ids"]
    assert len(told) == 5


def test_every_chunk_tells_the_usage_so_far_if_asked_for(tiny):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": [[5] * 9, [6] * 4], "max_tokens": 5, "stream_options": options, **GREEDY}
    *events, last = tiny.events("/v1/completions", body)
    for event in events:
        usage, index = event["usage"], event["choices"][0]["index"]
        assert usage["prompt_tokens"] == (9, 4)[index]
        assert 0 < usage["completion_tokens"] <= 5
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 10)
    alone = {**body, "stream_options": {"continuous_usage_stats": True}}
    assert not any("usage" in event for event in tiny.events("/v1/completions", alone)), "as in vLLM"


def test_a_prompt_is_cut_from_its_beginning(tiny):
    ids = list(range(300, 400))
    fields = {"max_tokens": 3, "return_token_ids": True, **GREEDY}
    cut = tiny.complete(ids, truncate_prompt_tokens=7, **fields)
    assert cut["usage"]["prompt_tokens"] == 7
    assert cut["choices"][0]["prompt_token_ids"] == ids[-7:]
    assert cut["choices"][0]["token_ids"] == tiny.complete(ids[-7:], **fields)["choices"][0]["token_ids"]
    assert tiny.complete(ids, truncate_prompt_tokens=10**6, **fields)["usage"]["prompt_tokens"] == 100
    long, max_len = ids * 30, tiny.engine.capacity.max_model_len
    assert tiny.complete(long, truncate_prompt_tokens=-1, **fields)["usage"]["prompt_tokens"] == max_len - 3
    refused = tiny.http.post("/v1/completions", json={"prompt": long, "truncate_prompt_tokens": 2999})
    assert "maximum context length" in error_of(refused, 400)["message"]
    words = "many words " * 3000
    echoed = tiny.complete(words, truncate_prompt_tokens=4, echo=True, **fields)["choices"][0]
    assert echoed["text"].startswith(tiny.tokenizer.decode(tiny.tokenizer.encode(words)[-4:]))
    assert tiny.chat(words, truncate_prompt_tokens=50, max_tokens=1, **GREEDY)["usage"]["prompt_tokens"] == 50


def test_a_text_that_is_far_too_long_is_not_tokenized_to_be_cut(tiny, monkeypatch):
    body = {"prompt": "a" * 900_000, "truncate_prompt_tokens": 5, "max_tokens": 1}
    assert tiny.http.post("/v1/completions", json=body).status_code == 200
    monkeypatch.setattr("pagefold.server.schemas._TIMES_TOO_LONG", 2)
    assert "at least" in error_of(tiny.http.post("/v1/completions", json=body), 400)["message"]


def test_a_model_without_tokenizer_echoes_ids(tiny, monkeypatch):
    monkeypatch.setattr(tiny.engine, "tokenizer", None)
    monkeypatch.setattr(tiny.engine._outputs, "_tokenizer", None)
    (choice,) = tiny.complete([1, 2, 3], echo=True, logprobs=1, max_tokens=1, **GREEDY)["choices"]
    assert choice["logprobs"]["tokens"][:3] == ["token_id:1", "token_id:2", "token_id:3"]
    assert choice["logprobs"]["text_offset"] == [0] * 4
