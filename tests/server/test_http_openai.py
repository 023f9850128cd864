"""openai-python, its plain client and its async one, on every route that it has, streamed and not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import openai
import pytest
from local_server import until

if TYPE_CHECKING:
    from local_server import LocalServer

SAMPLING = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
CHAT = {**SAMPLING, "messages": [{"role": "user", "content": "Hi"}]}
NUM_TOKENS = 12


class Sync:
    """The plain client, with the face of the async one."""

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    async def call(self, path: str, *arguments: object, **fields: object) -> object:
        method = self._client
        for name in path.split("."):
            method = getattr(method, name)
        return method(*arguments, **fields)

    async def items(self, stream) -> list:
        return list(stream)

    async def close(self) -> None:
        self._client.close()


class Async:
    def __init__(self, url: str) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    async def call(self, path: str, *arguments: object, **fields: object) -> object:
        method = self._client
        for name in path.split("."):
            method = getattr(method, name)
        return await method(*arguments, **fields)

    async def items(self, stream) -> list:
        return [item async for item in stream]

    async def close(self) -> None:
        await self._client.close()


@pytest.fixture(params=[Sync, Async])
def run(request, tiny: LocalServer):
    """Run a coroutine function with a client."""

    def run(steps) -> None:
        async def with_client() -> None:
            client = request.param(tiny.url)
            try:
                await steps(client)
            finally:
                await client.close()

        asyncio.run(with_client())

    return run


def test_models(run):
    async def steps(client) -> None:
        (model,) = await client.items(await client.call("models.list"))
        assert model.id == "tiny"
        assert await client.call("models.retrieve", "tiny") == model
        with pytest.raises(openai.NotFoundError):
            await client.call("models.retrieve", "no/such")

    run(steps)


def test_completions(run):
    async def steps(client) -> None:
        asked = {**SAMPLING, "prompt": "Once upon a time " * 10, "max_tokens": NUM_TOKENS}
        whole = await client.call("completions.create", **asked)
        options = {"include_usage": True}
        stream = await client.call("completions.create", **asked, stream=True, stream_options=options)
        *chunks, last = await client.items(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
        assert last.usage.completion_tokens == whole.usage.completion_tokens == NUM_TOKENS
        assert last.usage.prompt_tokens_details.cached_tokens > 0

    run(steps)


def test_chats(run):
    async def steps(client) -> None:
        asked = {**CHAT, "max_completion_tokens": NUM_TOKENS}
        whole = await client.call("chat.completions.create", **asked)
        options = {"include_usage": True}
        stream = await client.call("chat.completions.create", **asked, stream=True, stream_options=options)
        *chunks, last = await client.items(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        assert chunks[0].choices[0].delta.role == whole.choices[0].message.role == "assistant"
        assert chunks[-1].choices[0].finish_reason == "length"
        assert last.usage.completion_tokens == whole.usage.completion_tokens == NUM_TOKENS

    run(steps)


def test_responses(run):
    async def steps(client) -> None:
        asked = {**SAMPLING, "input": "Hi", "instructions": "Be short.", "max_output_tokens": NUM_TOKENS}
        whole = await client.call("responses.create", **asked)
        events = await client.items(await client.call("responses.create", **asked, stream=True))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == whole.output_text == events[-1].response.output_text
        assert events[-1].response.usage.output_tokens == whole.usage.output_tokens == NUM_TOKENS

    run(steps)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions.create", {"prompt": "a", "max_tokens": 5000}),
        ("chat.completions.create", {"messages": CHAT["messages"], "max_tokens": 5000}),
        ("responses.create", {"input": "a", "max_output_tokens": 5000}),
    ],
)
def test_errors(run, path, fields):
    async def steps(client) -> None:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.call(path, model="tiny", stream=stream, **fields)
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(openai.NotFoundError):
                await client.call(path, **{**fields, "model": "gpt-4", "stream": stream})

    run(steps)


def test_a_client_that_breaks_out_of_a_stream(run, tiny):
    before = tiny.metric("vllm:request_success_total", "abort")

    async def steps(client) -> None:
        for path, fields in (
            ("completions.create", {"prompt": "Once", "max_tokens": 1900}),
            ("chat.completions.create", {"messages": CHAT["messages"], "max_tokens": 1900}),
            ("responses.create", {"input": "Hi", "max_output_tokens": 1900}),
        ):
            stream = await client.call(path, **{**SAMPLING, **fields}, stream=True)
            closed = stream.close()
            if closed is not None:
                await closed

    run(steps)
    # What the client closed last may not have come to the server: till then its pool is as it was.
    until(lambda: tiny.metric("vllm:request_success_total", "abort") == before + 3, "all three to be missed")
    tiny.check_pool()
