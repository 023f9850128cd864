"""openai-python against the server at sys.argv[1]: what it got, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

import openai

MODEL = "smollm2-135m"
MESSAGES = [{"role": "user", "content": "Name three colours."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "maxLength": 12}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}


async def many(url: str) -> list[str]:
    """Ask the same of the server 32 times at once."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        chats = [
            client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, temperature=0)
            for _ in range(32)
        ]
        return [chat.choices[0].message.content for chat in await asyncio.gather(*chats)]


def main(url: str) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    chat = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    called = client.chat.completions.create(**(asked | {"max_tokens": 64}), tools=[TOOL], tool_choice="required")
    call = called.choices[0].message.tool_calls[0].function
    try:
        client.chat.completions.create(**(asked | {"temperature": 9}))
        refused = ""
    except openai.BadRequestError as error:
        refused = error.param
    print(
        json.dumps(
            {
                "models": [model.id for model in client.models.list()],
                "text": chat.choices[0].message.content,
                "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
                "usage": [chat.usage.prompt_tokens, chat.usage.completion_tokens],
                "streamed_usage": [chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens],
                "at_once": asyncio.run(many(url)),
                "call": {"name": call.name, "arguments": json.loads(call.arguments)},
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
