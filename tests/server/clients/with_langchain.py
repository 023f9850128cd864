"""langchain-openai against the server at sys.argv[1]: what it got, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

import openai
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI, OpenAI
from with_openai import MODEL, TOOL

QUESTION = "Name three colours."


async def many(chat: ChatOpenAI) -> list[str]:
    """Ask the same of the server 32 times at once."""
    return [answer.content for answer in await chat.abatch([QUESTION] * 32)]


def main(url: str) -> None:
    about = {"model": MODEL, "base_url": url, "api_key": "none", "max_retries": 0, "temperature": 0}
    chat = ChatOpenAI(**about, max_tokens=16, stream_usage=True)
    answer = chat.invoke(QUESTION)
    whole = AIMessageChunk(content="")
    for chunk in chat.stream(QUESTION):
        whole += chunk
    longer = ChatOpenAI(**about, max_tokens=64)
    call = longer.bind_tools([TOOL], tool_choice="any").invoke("How is the weather in Oslo?").tool_calls[0]
    schema = {"title": "Weather", "description": "of a town", **TOOL["function"]["parameters"]}
    structured = longer.with_structured_output(schema, method="json_schema").invoke("Name a town.")
    try:
        ChatOpenAI(**(about | {"temperature": 9})).invoke(QUESTION)
        refused = ""
    except openai.BadRequestError as error:
        refused = error.param
    print(
        json.dumps(
            {
                "text": answer.content,
                "streamed": whole.content,
                "usage": [answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"]],
                "streamed_usage": [whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"]],
                "at_once": asyncio.run(many(chat)),
                "call": {"name": call["name"], "arguments": call["args"]},
                "structured": structured,
                "completion": OpenAI(**about, max_tokens=8).invoke("Once upon a time"),
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
