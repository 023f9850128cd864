"""Good bodies of every route that takes one: what the mutator starts from, and the first request of each kind."""

from __future__ import annotations

from typing import Any

USER = {"role": "user", "content": "Tell me of a lighthouse."}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "of a town", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"name": "Oslo"}'}}
SAMPLING = {
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "seed": 7,
    "logit_bias": {"17": 2.5},
    "stop": ["\n\n", "END"],
    "min_tokens": 1,
}
NAMED_SCHEMA = {"name": "person", "strict": True, "schema": SCHEMA}
ANTHROPIC_TOOL = {"name": "weather", "description": "of a town", "input_schema": SCHEMA}

GOOD: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 4},
        {"model": "tiny", "prompt": ["one", "two"], "max_tokens": 3, "logprobs": 2, **SAMPLING},
        {
            "model": "tiny",
            "prompt": [5, 6, 7],
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {"model": "tiny", "prompt": "a", "n": 2, "best_of": 3, "max_tokens": 3, "user": "me", "cache_salt": "s"},
        {"model": "tiny", "prompt": "a", "max_tokens": 3, "stop_token_ids": [3, 4], "ignore_eos": True, "priority": 0},
        {"model": "tiny", "prompt": "a", "max_tokens": 6, "guided_regex": "[a-z]{1,4}"},
        {"model": "tiny", "prompt": "a", "max_tokens": 6, "structured_outputs": {"choice": ["yes", "no"]}},
        {"model": "tiny", "prompt": "a", "max_tokens": 6, "guided_grammar": 'start: "a" | "b"'},
    ],
    "/v1/chat/completions": [
        {"model": "tiny", "messages": [USER], "max_tokens": 4},
        {
            "model": "tiny",
            "messages": [USER],
            "max_completion_tokens": 3,
            "logprobs": True,
            "top_logprobs": 3,
            **SAMPLING,
        },
        {
            "model": "tiny",
            "messages": [{"role": "system", "content": "Be brief."}, USER],
            "max_tokens": 4,
            "stream": True,
        },
        {
            "model": "tiny",
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "max_tokens": 8,
        },
        {"model": "tiny", "messages": [USER], "tools": [TOOL], "tool_choice": "required", "max_tokens": 8},
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}],
            "response_format": {"type": "json_schema", "json_schema": NAMED_SCHEMA},
            "max_tokens": 8,
        },
    ],
    "/v1/responses": [
        {"model": "tiny", "input": "Tell me.", "max_output_tokens": 4},
        {"model": "tiny", "input": [USER], "instructions": "Be brief.", "max_output_tokens": 4, "stream": True},
        {
            "model": "tiny",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Who?"}]}],
            "text": {"format": {"type": "json_schema", **NAMED_SCHEMA}},
            "tools": [{"type": "function", **FUNCTION}],
            "max_output_tokens": 6,
        },
    ],
    "/v1/messages": [
        {"model": "tiny", "messages": [USER], "max_tokens": 4},
        {"model": "tiny", "messages": [USER], "system": "Be brief.", "max_tokens": 4, "stream": True},
        {
            "model": "tiny",
            "messages": [USER],
            "max_tokens": 6,
            "tools": [ANTHROPIC_TOOL],
            "tool_choice": {"type": "any"},
        },
    ],
    "/v1/messages/count_tokens": [{"model": "tiny", "messages": [USER]}],
    "/tokenize": [
        {"model": "tiny", "prompt": "Once upon a time", "add_special_tokens": True},
        {"model": "tiny", "messages": [USER]},
    ],
    "/detokenize": [{"model": "tiny", "tokens": [5, 6, 7]}],
    "/v1/cache/warm": [
        {"prompt": "A preamble that all share."},
        {"messages": [USER], "tenant": "t", "cache_salt": "s", "pin": True, "ttl_s": 5.0, "retention_priority": 60.0},
    ],
}
"""By path. A server may not have all of them; of one that is not here, every body of the others is tried."""


def good_bodies(path: str) -> list[dict[str, Any]]:
    """The good bodies of a route."""
    return GOOD.get(path) or [body for bodies in GOOD.values() for body in bodies]
