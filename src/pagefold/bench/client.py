"""Client: one request to an OpenAI-compatible server, streamed, with every piece of output timed."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import httpx

from pagefold.bench.record import Record
from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagefold.bench.prompts import Prompt

__all__ = ["Client"]

_MAX_ERROR = 200
_IDLE_S = 1.0
_QUESTION_S = 30.0
"""A server that does not name its models in that time is none."""
_METRICS_S = 5.0
"""Metrics are extra: nobody waits long for them."""

_Broken = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What reading an answer that is of another form than OpenAI's comes to."""


class Client:
    """A server, and how it is asked.

    Args:
        url: of the server, with or without ``/v1``.
        model: to ask for; empty for the first that the server names.
        is_chat: whether prompts go to ``/v1/chat/completions`` as a user's message.
        ignore_eos: ask the server to go on after the end-of-sequence token (vLLM's and Pagefold's field).
        api_key: sent as a bearer token; empty for none.
        timeout_s: of one request from its beginning to its end, in seconds.
    """

    def __init__(  # noqa: PLR0913 - what a request depends on
        self,
        url: str,
        *,
        model: str = "",
        is_chat: bool = False,
        ignore_eos: bool = False,
        api_key: str = "",
        timeout_s: float = 600.0,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._is_chat = is_chat
        self._ignore_eos = ignore_eos
        self._timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # As many connections as requests, since a pool that waits would be measured as the server; and none so old that
        # the server may be closing it just now.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S)
        try:
            self.http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout_s, limits=limits)
        except (httpx.InvalidURL, ValueError) as error:
            message = f"{url!r} is no URL: {error}."
            raise ConfigError(message, remedy="Give one like http://127.0.0.1:8000.") from None

    async def find_model(self) -> None:
        """Ask for the model's name, if none was given.

        Raises:
            ConfigError: the server cannot be reached, or does not say.
        """
        try:
            answer = await self.http.get("/v1/models", timeout=_QUESTION_S)
            answer.raise_for_status()
            names = [str(model["id"]) for model in answer.json()["data"]]
        except (httpx.HTTPError, httpx.InvalidURL, *_Broken) as error:
            message = f"{self.url} is no server that names its models: {_short(error)}"
            raise ConfigError(message, remedy="Start it, or give its address as --url http://HOST:PORT.") from None
        if not names:
            message = f"The server at {self.url} has no model."
            raise ConfigError(message, remedy="Wait until it has loaded one.")
        if self.model and self.model not in names:
            message = f"The server at {self.url} does not have {self.model!r}."
            raise ConfigError(message, remedy=f"It has {', '.join(names)}.")
        self.model = self.model or names[0]

    async def tokens_per_word(self, prompt: Prompt, num_words: int) -> float:
        """Return how many tokens the server counts for a word of a made-up prompt; 0 where it counts none.

        Raises:
            ConfigError: the server does not answer.
        """
        record = await self.send(prompt, 0, time.perf_counter())
        if record.error:
            message = f"{self.url} does not answer a prompt: {record.error}"
            raise ConfigError(message, remedy="Check --model and --backend.")
        return record.prompt_tokens / num_words

    async def send(self, prompt: Prompt, index: int, began: float) -> Record:
        """Send one prompt and time its stream. What goes wrong is in the record."""
        sent = time.perf_counter()
        record = Record(index, start_s=sent - began)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self.http.stream("POST", self._path, json=self._body(prompt)) as response,
            ):
                if response.is_error:
                    record.error = f"HTTP {response.status_code}: {(await response.aread()).decode()[:_MAX_ERROR]}"
                    return record
                await _read(response, record, sent)
        except (httpx.HTTPError, httpx.StreamError, *_Broken) as error:
            record.error = record.error or _short(error)
        except TimeoutError:
            record.error = f"it had not ended after {self._timeout_s:g} s"
        if not record.error and not record.output_tokens:
            record.output_tokens = len(record.itls_s) + bool(record.ttft_s)
        if not record.error and not record.ttft_s:
            record.error = "no output came"
        return record

    async def metrics(self) -> str | None:
        """Return the server's metrics in Prometheus' text form; None where it has none."""
        try:
            answer = await self.http.get("/metrics", timeout=_METRICS_S)
        except httpx.HTTPError:
            return None
        return answer.text if answer.is_success else None

    async def close(self) -> None:
        """Close all connections."""
        await self.http.aclose()

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self._is_chat else "/v1/completions"

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": prompt.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self._is_chat:
            return body | {"messages": [{"role": "user", "content": prompt.text}]}
        return body | {"prompt": prompt.text}


async def _read(response: httpx.Response, record: Record, sent: float) -> None:
    """Time every piece of a stream, until it says that it ends.

    Raises:
        ValueError, TypeError, AttributeError: it is of another form than OpenAI's.
    """
    last, has_ended = sent, False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        if line.endswith("[DONE]"):
            has_ended = True
            continue
        event = json.loads(line[5:])
        now = time.perf_counter()
        _count(event, record)
        has_ended = has_ended or any(choice.get("finish_reason") for choice in event.get("choices") or ())
        if _brings_output(event):
            if record.ttft_s:
                record.itls_s.append(now - last)
            else:
                record.ttft_s = now - sent
            last = now
    record.latency_s = last - sent
    if record.ttft_s and not has_ended and not record.error:
        record.error = "the stream broke off"


def _brings_output(event: Mapping[str, Any]) -> bool:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
            return True
    return False


def _count(event: Mapping[str, Any], record: Record) -> None:
    usage = event.get("usage")
    if not usage:
        if event.get("error"):
            record.error = str(event["error"])[:_MAX_ERROR]
        return
    record.prompt_tokens = int(usage.get("prompt_tokens") or 0)
    record.output_tokens = int(usage.get("completion_tokens") or 0)
    details = usage.get("prompt_tokens_details") or {}
    if details.get("cached_tokens") is not None:
        record.cached_tokens = int(details["cached_tokens"])


def _short(error: BaseException) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code}: {' '.join(error.response.text.split())}"[:_MAX_ERROR]
    return (" ".join(str(error).split()) or type(error).__name__)[:_MAX_ERROR]
