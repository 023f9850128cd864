"""litellm against the server at sys.argv[1]: what it got, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

import litellm
from with_openai import MESSAGES, MODEL, TOOL


async def many(asked: dict) -> list[str]:
    """Ask the same of the server 32 times at once."""
    answers = await asyncio.gather(*(litellm.acompletion(**asked) for _ in range(32)))
    return [answer.choices[0].message.content for answer in answers]


def main(url: str) -> None:
    litellm.suppress_debug_info = True
    about = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none", "temperature": 0, "num_retries": 0}
    asked = {**about, "messages": MESSAGES, "max_tokens": 16}
    chat = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    usage = next(chunk.usage for chunk in reversed(chunks) if getattr(chunk, "usage", None))
    called = litellm.completion(**(asked | {"max_tokens": 64}), tools=[TOOL], tool_choice="required")
    call = called.choices[0].message.tool_calls[0].function
    text = litellm.text_completion(
        **(about | {"model": f"text-completion-openai/{MODEL}"}), prompt="Once upon a time", max_tokens=8
    )
    try:
        litellm.completion(**(asked | {"temperature": 9}))
        refused = ""
    except litellm.BadRequestError as error:
        refused = "temperature" if "temperature" in str(error) else str(error)
    print(
        json.dumps(
            {
                "text": chat.choices[0].message.content,
                "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
                "usage": [chat.usage.prompt_tokens, chat.usage.completion_tokens],
                "streamed_usage": [usage.prompt_tokens, usage.completion_tokens],
                "at_once": asyncio.run(many(asked)),
                "call": {"name": call.name, "arguments": json.loads(call.arguments)},
                "completion": text.choices[0].text,
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
