"""What cannot be served: a clear typed error in OpenAI's form, and the server goes on."""

from __future__ import annotations

import json

import pytest
from local_server import LocalServer, error_of, post_head

GREEDY = {"temperature": 0, "ignore_eos": True}
USER = {"role": "user", "content": "Hi"}
TEXT = {"type": "text", "text": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HALF = "\ud83d"  # JSON can carry half of a surrogate pair

_BAD_COMPLETIONS = {
    "no prompt": ({}, "prompt", "missing"),
    "null prompt": ({"prompt": None}, "prompt", "missing"),
    "empty prompt": ({"prompt": ""}, "prompt", "empty"),
    "empty list": ({"prompt": []}, "prompt", "empty"),
    "empty among others": ({"prompt": ["a", ""]}, "prompt", "empty"),
    "empty ids among others": ({"prompt": [[1], []]}, "prompt", "empty"),
    "prompt of a wrong type": ({"prompt": 5}, "prompt", "5"),
    "prompt object": ({"prompt": {"a": 1}}, "prompt", "text"),
    "prompt of bools": ({"prompt": [True, False]}, "prompt", "token ids"),
    "prompt of floats": ({"prompt": [1.0]}, "prompt", "token ids"),
    "ids and text": ({"prompt": [1, "a"]}, "prompt", "ints"),
    "texts and ids": ({"prompt": ["a", 1]}, "prompt", "texts"),
    "too many prompts": ({"prompt": ["a"] * 3000}, "prompt", "2048"),
    "half a character": ({"prompt": HALF}, "prompt", "surrogate"),
    "token id too large": ({"prompt": [49152]}, "prompt", "49152"),
    "token id far too large": ({"prompt": [2**40]}, "prompt", str(2**40)),
    "negative token id": ({"prompt": [3, -1]}, "prompt", "-1"),
    "negative temperature": ({"prompt": "a", "temperature": -0.1}, "temperature", "-0.1"),
    "temperature too high": ({"prompt": "a", "temperature": 2.1}, "temperature", "2.1"),
    "temperature text": ({"prompt": "a", "temperature": "1"}, "temperature", "'1'"),
    "temperature bool": ({"prompt": "a", "temperature": True}, "temperature", "True"),
    "top_p 0": ({"prompt": "a", "top_p": 0}, "top_p", "0"),
    "top_p too high": ({"prompt": "a", "top_p": 1.5}, "top_p", "1.5"),
    "top_k too low": ({"prompt": "a", "top_k": -2}, "top_k", "-2"),
    "top_k too high": ({"prompt": "a", "top_k": 2**70}, "top_k", "less than or equal"),
    "max_tokens negative": ({"prompt": "a", "max_tokens": -5}, "max_tokens", "-5"),
    "max_tokens float": ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "1.5"),
    "max_tokens text": ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "'5'"),
    "seed text": ({"prompt": "a", "seed": "x"}, "seed", "'x'"),
    "seed too large": ({"prompt": "a", "seed": 2**70}, "seed", "less than or equal"),
    "stop empty": ({"prompt": "a", "stop": ""}, "stop", "empty"),
    "stop number": ({"prompt": "a", "stop": 3}, "stop", "3"),
    "stop numbers": ({"prompt": "a", "stop": ["a", 3]}, "stop.1", "3"),
    "stop half a character": ({"prompt": "a", "stop": HALF}, "stop.0", "surrogate"),
    "too many stops": ({"prompt": "a", "stop": ["x"] * 17}, "stop", "17"),
    "stop id too large": ({"prompt": "a", "stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
    "too many stop ids": ({"prompt": "a", "stop_token_ids": [5] * 5000}, "stop_token_ids", "4096"),
    "guided_choice number": ({"prompt": "a", "guided_choice": 5}, "guided_choice", "guided_choice is a int"),
    "structured half a character": ({"prompt": "a", "structured_outputs": {HALF: 1}}, "structured_outputs", "ud83d"),
    "stop ids text": ({"prompt": "a", "stop_token_ids": ["x"]}, "stop_token_ids.0", "'x'"),
    "stream number": ({"prompt": "a", "stream": 1}, "stream", "1"),
    "stream_options alone": ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    "stream_options text": ({"prompt": "a", "stream": True, "stream_options": "x"}, "stream_options", "object"),
    "usage text": (
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": "yes"}},
        "stream_options.include_usage",
        "'yes'",
    ),
    "empty salt": ({"prompt": "a", "cache_salt": ""}, "cache_salt", "at least 1"),
    "salt of half a character": ({"prompt": "a", "cache_salt": HALF}, "cache_salt", "surrogate"),
    "model number": ({"prompt": "a", "model": 5}, "model", "5"),
    "user number": ({"prompt": "a", "user": 5}, "user", "5"),
    "n 0": ({"prompt": "a", "n": 0}, "n", "between 1 and 128"),
    "n too high": ({"prompt": "a", "n": 129}, "n", "between 1 and 128"),
    "n above the seats": ({"prompt": "a", "n": 65}, "n", "at most 64 sequences run at once"),
    "n bool": ({"prompt": "a", "n": True}, "n", "True"),
    "n text": ({"prompt": "a", "n": "2"}, "n", "'2'"),
    "n greedy": ({"prompt": "a", "n": 2, "temperature": 0}, "n", "all outputs are the same"),
    "best_of below n": ({"prompt": "a", "n": 3, "best_of": 2}, "best_of", "at least n (3)"),
    "best_of 0": ({"prompt": "a", "best_of": 0}, "best_of", "at least n (1)"),
    "best_of too high": ({"prompt": "a", "best_of": 129}, "best_of", "at most 128"),
    "best_of above the seats": ({"prompt": "a", "best_of": 65}, "best_of", "max_num_seqs"),
    "best_of greedy": ({"prompt": "a", "best_of": 2, "temperature": 0}, "best_of", "all outputs are the same"),
    "best_of in a stream": ({"prompt": "a", "stream": True, "n": 2, "best_of": 3}, "best_of", "do not stream"),
    "echo number": ({"prompt": "a", "echo": 1}, "echo", "1"),
    "echo of too much": ({"prompt": [[5] * 1000] * 300, "echo": True}, "echo", "at most 262144"),
    "echo of too many": ({"prompt": [5] * 1025, "n": 16, "stream": True, "echo": True}, "echo", "at most 16384"),
    "logprobs of too much": ({"prompt": [[5] * 1000] * 30, "echo": True, "logprobs": 8}, "logprobs", "300000 tokens"),
    "prompt_logprobs negative": ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs", "-1"),
    "prompt_logprobs too many": ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs", "21"),
    "prompt_logprobs bool": ({"prompt": "a", "prompt_logprobs": True}, "prompt_logprobs", "True"),
    "prompt_logprobs streamed": ({"prompt": "a", "prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "stream"),
    "prompt_logprobs of too much": ({"prompt": [[5] * 1999] * 7, "prompt_logprobs": 20}, "prompt_logprobs", "at most"),
    "prompt ids of too much": ({"prompt": [[5] * 1000] * 300, "return_token_ids": True}, "return_token_ids", "at most"),
    "return_token_ids number": ({"prompt": "a", "return_token_ids": 1}, "return_token_ids", "1"),
    "allowed ids empty": ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    "allowed id too large": ({"prompt": "a", "allowed_token_ids": [5, 49152]}, "allowed_token_ids", "49152"),
    "allowed id negative": ({"prompt": "a", "allowed_token_ids": [-1]}, "allowed_token_ids", "-1"),
    "allowed ids of texts": ({"prompt": "a", "allowed_token_ids": ["a"]}, "allowed_token_ids.0", "'a'"),
    "allowed ids number": ({"prompt": "a", "allowed_token_ids": 5}, "allowed_token_ids", "list"),
    "too many allowed ids": ({"prompt": "a", "allowed_token_ids": [5] * 262_145}, "allowed_token_ids", "262144"),
    "bad words number": ({"prompt": "a", "bad_words": [5]}, "bad_words.0", "5"),
    "bad words text": ({"prompt": "a", "bad_words": "five"}, "bad_words", "list"),
    "bad words blank": ({"prompt": "a", "bad_words": ["a", "  "]}, "bad_words", "not only spaces"),
    "bad words long": ({"prompt": "a", "bad_words": ["a" * 257]}, "bad_words", "256 characters"),
    "bad words half": ({"prompt": "a", "bad_words": [HALF]}, "bad_words.0", "surrogate"),
    "too many bad words": ({"prompt": "a", "bad_words": ["a"] * 1025}, "bad_words", "1024"),
    "truncate to nothing": ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    "truncate below": ({"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "-2"),
    "truncate float": ({"prompt": "a", "truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens", "1.5"),
    "tier unknown": ({"prompt": "a", "service_tier": "gold"}, "service_tier", "flex"),
    "tier number": ({"prompt": "a", "service_tier": 1}, "service_tier", "1"),
    "stop kept number": ({"prompt": "a", "include_stop_str_in_output": 1}, "include_stop_str_in_output", "1"),
    "special tokens number": ({"prompt": "a", "skip_special_tokens": 0}, "skip_special_tokens", "0"),
    "continuous usage text": (
        {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": "x"}},
        "stream_options.continuous_usage_stats",
        "'x'",
    ),
    "logprobs negative": ({"prompt": "a", "logprobs": -1}, "logprobs", "-1"),
    "logprobs too many": ({"prompt": "a", "logprobs": 21}, "logprobs", "21"),
    "logprobs bool": ({"prompt": "a", "logprobs": True}, "logprobs", "True"),
    "min_p negative": ({"prompt": "a", "min_p": -0.1}, "min_p", "-0.1"),
    "min_p too high": ({"prompt": "a", "min_p": 1.1}, "min_p", "1.1"),
    "min_p text": ({"prompt": "a", "min_p": "0"}, "min_p", "'0'"),
    "presence_penalty too high": ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty", "2.5"),
    "frequency_penalty too low": ({"prompt": "a", "frequency_penalty": -2.5}, "frequency_penalty", "-2.5"),
    "repetition_penalty 0": ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "above 0"),
    "logit_bias list": ({"prompt": "a", "logit_bias": [5]}, "logit_bias", "object"),
    "logit_bias of a text": ({"prompt": "a", "logit_bias": {"the": 1}}, "logit_bias", "token ids"),
    "logit_bias of a long number": ({"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
    "logit_bias negative id": ({"prompt": "a", "logit_bias": {"-5": 1}}, "logit_bias", "token ids"),
    "logit_bias id too large": ({"prompt": "a", "logit_bias": {"49152": 1}}, "logit_bias", "49152"),
    "logit_bias text value": ({"prompt": "a", "logit_bias": {"5": "1"}}, "logit_bias", "numbers"),
    "logit_bias bool value": ({"prompt": "a", "logit_bias": {"5": True}}, "logit_bias", "numbers"),
    "logit_bias too high": ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias", "101 for token 5"),
    "logit_bias far too low": ({"prompt": "a", "logit_bias": {"5": -(10**400)}}, "logit_bias", "-100"),
    "min_tokens negative": ({"prompt": "a", "min_tokens": -1}, "min_tokens", "-1"),
    "min_tokens above max_tokens": ({"prompt": "a", "max_tokens": 4, "min_tokens": 5}, "min_tokens", "at most 4"),
    "min_tokens above the default": ({"prompt": "a", "min_tokens": 17}, "min_tokens", "at most 16"),
    "presence_penalty too low": ({"prompt": "a", "presence_penalty": -2.5}, "presence_penalty", "-2.5"),
    "frequency_penalty too high": ({"prompt": "a", "frequency_penalty": 2.5}, "frequency_penalty", "2.5"),
    "repetition_penalty negative": ({"prompt": "a", "repetition_penalty": -1}, "repetition_penalty", "above 0"),
    "penalty text": ({"prompt": "a", "presence_penalty": "1"}, "presence_penalty", "'1'"),
    "top_p negative": ({"prompt": "a", "top_p": -0.5}, "top_p", "-0.5"),
    "top_k float": ({"prompt": "a", "top_k": 1.5}, "top_k", "1.5"),
    "min_tokens float": ({"prompt": "a", "min_tokens": 1.5}, "min_tokens", "1.5"),
    "seed too small": ({"prompt": "a", "seed": -(2**70)}, "seed", "greater than or equal"),
    "seed float": ({"prompt": "a", "seed": 1.5}, "seed", "1.5"),
    "stop id negative": ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    "stop ids number": ({"prompt": "a", "stop_token_ids": 5}, "stop_token_ids", "list"),
    "ignore_eos number": ({"prompt": "a", "ignore_eos": 1}, "ignore_eos", "1"),
    "salt number": ({"prompt": "a", "cache_salt": 5}, "cache_salt", "5"),
    "priority where none counts": ({"prompt": "a", "priority": 1}, "priority", "fcfs looks at none"),
    "returns in less than no time": ({"prompt": "a", "returns_in_s": -1.0}, "returns_in_s", "between 0"),
    "returns never": ({"prompt": "a", "returns_in_s": 1e9}, "returns_in_s", "a day"),
    "returns soon": ({"prompt": "a", "returns_in_s": "soon"}, "returns_in_s", "valid number"),
    "priority too high": ({"prompt": "a", "priority": 2**40}, "priority", "less than or equal"),
    "priority float": ({"prompt": "a", "priority": 0.5}, "priority", "0.5"),
    "suffix": ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    "guided whitespace": ({"prompt": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supp"),
    "guided regex number": ({"prompt": "a", "guided_regex": 5}, "guided_regex", "a text"),
    "guided json bad": ({"prompt": "a", "guided_json": "{"}, "guided_json", "cannot be read"),
    "guided choice empty": ({"prompt": "a", "guided_choice": []}, "guided_choice", "at least one"),
    "guided grammar bad": ({"prompt": "a", "guided_grammar": "start: none"}, "guided_grammar", "does not compile"),
    "guided choice half": ({"prompt": "a", "guided_choice": [HALF]}, "guided_choice", "cannot be read"),
    "guided regex half": ({"prompt": "a", "guided_regex": HALF}, "guided_regex", "cannot be read"),
    "guided json half": ({"prompt": "a", "guided_json": {"const": HALF}}, "guided_json", "cannot be read"),
    "guided grammar half": ({"prompt": "a", "guided_grammar": f'start: "{HALF}"'}, "guided_grammar", "cannot be read"),
    "structured text": ({"prompt": "a", "structured_outputs": "x"}, "structured_outputs", "object"),
    "structured empty": ({"prompt": "a", "structured_outputs": {}}, "structured_outputs", "exactly one"),
    "structured two": (
        {"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs",
        "exactly one",
    ),
    "structured unknown": (
        {"prompt": "a", "structured_outputs": {"structural_tag": "x"}},
        "structured_outputs",
        "structural_tag is not supported",
    ),
    "structured bad regex": ({"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs", "compile"),
    "two fields": (
        {"prompt": "a", "guided_regex": "a", "response_format": {"type": "json_object"}},
        "guided_regex",
        "are both there",
    ),
    "response_format text": ({"prompt": "a", "response_format": "json"}, "response_format", "json_schema"),
    "response_format unknown": ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format", "json_schema"),
    "no schema": (
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
        "must have a schema",
    ),
    "strict text": (
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "x"}}},
        "response_format",
        "strict must be true or false",
    ),
    "a schema that cannot be enforced": (
        {
            "prompt": "a",
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": {"type": "array", "uniqueItems": True}},
            },
        },
        "response_format",
        "uniqueItems",
    ),
    "an enormous schema": (
        {"prompt": "a", "guided_json": {"enum": [f"{number:050}" for number in range(6000)]}},
        "guided_json",
        "at most 262144",
    ),
    "a regex that explodes": (
        {"prompt": "a", "guided_regex": "((((a{100}){100}){100}){100})"},
        "guided_regex",
        "too complex",
    ),
}

_BAD_CHATS = {
    "no messages": ({}, "messages", "missing"),
    "empty messages": ({"messages": []}, "messages", "at least 1"),
    "messages text": ({"messages": "Hi"}, "messages", "list"),
    "message text": ({"messages": ["Hi"]}, "messages.0", "object"),
    "no content": ({"messages": [{"role": "user"}]}, "messages.0", "content is missing"),
    "null content": ({"messages": [{"role": "user", "content": None}]}, "messages.0", "content is missing"),
    "unknown role": ({"messages": [USER, {"role": "king", "content": "x"}]}, "messages.1.role", "'king'"),
    "tool message": ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0", "tool_call_id is missing"),
    "user calls": ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages.0", "only the assistant"),
    "call without id": (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
        "messages.1.tool_calls.0.id",
        "missing",
    ),
    "call's arguments": (
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "["}}]},
            ]
        },
        "messages.1.tool_calls.0.function.arguments",
        "JSON object",
    ),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
        "text only",
    ),
    "sound": (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages.0.content.0.type",
        "text only",
    ),
    "function role": (
        {"messages": [USER, {"role": "function", "name": "f", "content": "1"}]},
        "messages.1.role",
        "role tool",
    ),
    "call of old": (
        {"messages": [USER, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
        "function_call",
        "tool_calls",
    ),
    "documents": ({"messages": [USER], "documents": [{"text": "x"}]}, "documents", "into a message"),
    "user's refusal": ({"messages": [{**USER, "refusal": "no"}]}, "messages.0", "only the assistant"),
    "half a character": ({"messages": [{"role": "user", "content": HALF}]}, "messages.0.content.0.text", "surrogate"),
    "max_completion_tokens 0": (
        {"messages": [USER], "max_completion_tokens": 0},
        "max_completion_tokens",
        "0",
    ),
    "max_completion_tokens float": ({"messages": [USER], "max_completion_tokens": 1.5}, "max_completion_tokens", "1.5"),
    "no role": ({"messages": [{"content": "x"}]}, "messages.0.role", "missing"),
    "content number": ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "text"),
    "part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages.0.content.0.text",
        "missing",
    ),
    "too many stops": ({"messages": [USER], "stop": ["x"] * 17}, "stop", "17"),
    "tools text": ({"messages": [USER], "tools": "f"}, "tools", "list"),
    "tool without function": ({"messages": [USER], "tools": [{"type": "function"}]}, "tools.0.function", "missing"),
    "tool of another kind": (
        {"messages": [USER], "tools": [{**TOOL, "type": "custom"}]},
        "tools.0.type",
        "'function'",
    ),
    "tool name": (
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f g"}}]},
        "tools.0.function.name",
        "pattern",
    ),
    "tool of half a character": (
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "f", "description": HALF}}]},
        "messages",
        "surrogate",
    ),
    "tools alike": ({"messages": [USER], "tools": [TOOL, TOOL]}, "tools", "same name"),
    "too many tools": ({"messages": [USER], "tools": [TOOL] * 129}, "tools", "at most 128"),
    "tool's schema": (
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "$ref": "#/x"}}}],
            "tool_choice": "required",
        },
        "tools",
        "does not compile",
    ),
    "tool_choice unknown": ({"messages": [USER], "tools": [TOOL], "tool_choice": "any"}, "tool_choice", "required"),
    "tool_choice required of none": ({"messages": [USER], "tool_choice": "required"}, "tool_choice", "no such tool"),
    "tool_choice half a character": (
        {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": HALF}}},
        "tool_choice",
        "ud83d",
    ),
    "tool_choice of another": (
        {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "g, and there is no such tool",
    ),
    "tools and a form that is no JSON": (
        {"messages": [USER], "tools": [TOOL], "guided_regex": "[ab]+"},
        "guided_regex",
        "tool_choice: none",
    ),
    "logprobs number": ({"messages": [USER], "logprobs": 1}, "logprobs", "1"),
    "top_logprobs alone": ({"messages": [USER], "top_logprobs": 2}, "top_logprobs", "logprobs is not true"),
    "top_logprobs too many": ({"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
    "top_logprobs negative": ({"messages": [USER], "logprobs": True, "top_logprobs": -1}, "top_logprobs", "-1"),
    "min_tokens beyond the context": ({"messages": [USER], "min_tokens": 2048}, "min_tokens", "2048"),
    "penalty": ({"messages": [USER], "frequency_penalty": 3}, "frequency_penalty", "3"),
    "functions": ({"messages": [USER], "functions": [{"name": "f"}]}, "functions", "not supported"),
    "n 0": ({"messages": [USER], "n": 0}, "n", "between 1 and 128"),
    "n too high": ({"messages": [USER], "n": 129}, "n", "between 1 and 128"),
    "n above the seats": ({"messages": [USER], "n": 100}, "n", "at most 64 sequences run at once"),
    "best_of in a stream": ({"messages": [USER], "stream": True, "best_of": 3}, "best_of", "do not stream"),
    "template": ({"messages": [USER], "chat_template": "x"}, "chat_template", "not supported"),
}


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("case", _BAD_COMPLETIONS)
def test_a_bad_completion_names_field_and_value(tiny, case):
    body, param, says = _BAD_COMPLETIONS[case]
    error = error_of(_post(tiny, "/v1/completions", body), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("case", _BAD_CHATS)
def test_a_bad_chat_names_field_and_value(tiny, case):
    body, param, says = _BAD_CHATS[case]
    error = error_of(_post(tiny, "/v1/chat/completions", body), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert says in error["message"]


def test_bad_streams_are_refused_before_they_begin(tiny):
    for case, (body, param, _) in _BAD_COMPLETIONS.items():
        if case != "stream_options alone":
            error = error_of(_post(tiny, "/v1/completions", {"stream": True, **body}), 400)
            assert error["param"] == param


def test_the_server_goes_on(tiny):
    before = tiny.complete("still here", **GREEDY)["choices"]
    for body, _, _ in _BAD_COMPLETIONS.values():
        _post(tiny, "/v1/completions", body)
    assert tiny.complete("still here", **GREEDY)["choices"] == before
    assert tiny.http.get("/health").status_code == 200


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"), [(2048, 1), (5000, None), (2040, 9), (1, 2048), (100_000, 1), (1, 10**30)]
)
def test_longer_than_the_context(tiny, num_prompt, max_tokens, stream):
    body = {"prompt": [7] * num_prompt, "max_tokens": max_tokens, "stream": stream}
    error = error_of(tiny.http.post("/v1/completions", json=body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "maximum context length is 2048 tokens" in error["message"]
    assert f"{num_prompt} in the prompt" in error["message"]


def test_a_chat_longer_than_the_context(tiny):
    for body in ({"content": "word " * 3000}, {"content": "Hi", "max_tokens": 2048}):
        response = tiny.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": body.pop("content")}], **body},
        )
        error = error_of(response, 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_what_is_certainly_too_long_is_not_tokenized(tiny, monkeypatch):
    """A million characters cannot be 2,047 tokens."""

    def tokenizes(*_: object, **__: object) -> None:
        pytest.fail("it was tokenized")

    text = "word " * 200_000
    with monkeypatch.context() as patched:
        patched.setattr(tiny.tokenizer, "encode", tokenizes)
        for path, param, body in (
            ("/v1/completions", "prompt", {"prompt": text}),
            ("/v1/completions", "prompt", {"prompt": ["a", text], "stream": True}),
            ("/v1/chat/completions", "messages", {"messages": [USER, {"role": "user", "content": text}]}),
            ("/tokenize", "prompt", {"prompt": text}),
            ("/tokenize", "messages", {"messages": [USER, {"role": "user", "content": text}]}),
        ):
            error = error_of(tiny.http.post(path, json=body), 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
            assert "maximum context length is 2048 tokens" in error["message"]
            assert "at least 12" in error["message"]
    counted = tiny.http.post("/tokenize", json={"prompt": "word " * 20_000}).json()
    assert counted["count"] == 20_001, "more than the context, but not certainly"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("model", ["gpt-4", "", "Tiny", "日本\u2028"])
def test_an_unknown_model_is_a_404(tiny, path, model):
    error = error_of(tiny.http.post(path, json={"model": model, "prompt": "a", "messages": [USER]}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "tiny" in error["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"prompt": "a"',
        b'{"prompt": "a",}',
        b"prompt=a",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_json_is_a_400(tiny, content):
    response = tiny.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    error = error_of(response, 400)
    assert error["type"] == "invalid_request_error"
    assert "JSON" in error["message"]


@pytest.mark.parametrize("content", [b"[]", b"5", b'"text"', b"null", b"true", b""])
def test_json_that_is_no_object_is_a_400(tiny, content):
    response = tiny.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert "JSON object" in error_of(response, 400)["message"]


def test_nan_is_no_temperature(tiny):
    for value in ("NaN", "Infinity", "-Infinity", "1e999"):
        content = f'{{"prompt": "a", "temperature": {value}}}'
        response = tiny.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert error_of(response, 400)["param"] == "temperature"


def test_other_content_is_a_415(tiny):
    body = json.dumps({"prompt": "a"})
    for headers in ({"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}, {}):
        response = tiny.http.post("/v1/completions", content=body, headers=headers)
        assert "application/json" in error_of(response, 415)["message"]
    assert error_of(tiny.http.post("/v1/completions", data={"prompt": "a"}), 415)
    assert error_of(tiny.http.post("/v1/completions", files={"prompt": b"a"}), 415)


def test_unknown_routes_and_methods(tiny):
    assert error_of(tiny.http.get("/nowhere"), 404)["code"] == "not_found"
    assert error_of(tiny.http.post("/v1/completions/", json={"prompt": "a"}), 404)
    assert error_of(tiny.http.post("/v1/embeddings", json={}), 404)
    error = tiny.http.get("/v1/completions")
    assert error.headers["allow"] == "POST"
    assert error_of(error, 405)["code"] == "method_not_allowed"
    assert error_of(tiny.http.delete("/v1/models"), 405)


def test_what_means_nothing_is_no_error(tiny):
    """Defaults that clients send anyway, nulls, and fields that nobody knows."""
    nothing = {
        "n": 1,
        "best_of": 1,
        "echo": False,
        "logprobs": None,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "suffix": None,
        "stop": None,
        "stop_token_ids": None,
        "stream": None,
        "stream_options": None,
        "seed": None,
        "top_k": None,
        "temperature": 0,
        "cache_salt": None,
        "favourite_colour": "blue",
    }
    assert tiny.complete("a", **nothing)["choices"] == tiny.complete("a", temperature=0)["choices"]
    chat = {"tools": [], "tool_choice": "none", "logprobs": False, "response_format": {"type": "text"}, "store": True}
    assert tiny.chat("a", max_tokens=3, **chat)


def test_many_errors_are_one(tiny):
    """A body of 100,000 wrong values is refused at the first."""
    for path, body in (
        ("/v1/chat/completions", {"messages": [1] * 100_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * 100_000}]}),
        ("/v1/completions", {"prompt": "a", "stop": [1] * 100_000}),
        ("/v1/chat/completions", {"messages": [USER] * 20_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [TEXT] * 600}] * 20}),
        ("/v1/completions", {"prompt": "a", **{f"field_{number}": 0 for number in range(50_000)}}),
        ("/v1/chat/completions", {"messages": [USER | {f"field_{number}": 0 for number in range(300)}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": [TEXT] * 12_000}]}),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": ["x"] * 100_000}),
    ):
        assert len(error_of(tiny.http.post(path, json=body), 400)["message"]) < 300


# Bodies that are too large.


def test_a_body_of_100_mb_is_refused_unread(smol):
    """Announced or not; the server's memory does not grow by it."""

    def pieces():
        for _ in range(100):
            yield b"x" * 2**20

    smol.complete("warm", max_tokens=1)
    before = _peak_memory_bytes(smol.process.pid)
    for headers in ({"Content-Length": str(100 * 2**20)}, {}):
        response = smol.http.post(
            "/v1/completions", content=pieces(), headers={"Content-Type": "application/json", **headers}
        )
        assert error_of(response, 413)["code"] == "request_too_large"
    assert _peak_memory_bytes(smol.process.pid) - before < 50 * 2**20
    assert smol.complete("on we go", max_tokens=1)


def test_an_announced_body_is_refused_before_it_is_sent(tiny):
    for more in ((), ("Expect: 100-continue",)):
        with tiny.raw(post_head("/v1/completions", 100 * 2**20, *more)) as connection:
            assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_the_limit_is_exact(tiny):
    """A body of max_body_bytes goes in, one byte more does not, with and without a length."""
    limit = 2**20
    for size, status in ((limit, 200), (limit + 1, 413)):
        content = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        content += b" " * (size - len(content))
        headers = {"Content-Type": "application/json"}
        assert tiny.http.post("/v1/completions", content=content, headers=headers).status_code == status
        in_pieces = (content[at : at + 60_000] for at in range(0, size, 60_000))
        assert tiny.http.post("/v1/completions", content=in_pieces, headers=headers).status_code == status


def _post(server: LocalServer, path: str, body: dict) -> object:
    # json.dumps writes half of a surrogate pair as an escape; httpx's own encoder would not take it
    return server.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})


def _peak_memory_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:  # noqa: PTH123
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def test_a_body_that_stalls_is_given_up(tiny, monkeypatch):
    monkeypatch.setattr("pagefold.server.body_limit._STALL_S", 0.2)
    with tiny.raw(post_head("/v1/completions", 100) + b"{") as connection:
        answer = b""
        while b"}}" not in answer:
            answer += connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 408")
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "body_timeout"
