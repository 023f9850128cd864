"""Send a file of requests, some at a time, and write a file of answers. It can be stopped and goes on where it stopped.

    python examples/batch.py requests.jsonl answers.jsonl

A line of the first file is a request of /v1/chat/completions with an id of its own:

    {"id": "7", "messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 20}

A line of the second is its answer, or the error that it was refused with; lines come in the order they are finished:

    {"id": "7", "text": "The Danube.", "finish_reason": "stop", "prompt_tokens": 34, "cached_tokens": 20}
    {"id": "8", "error": "max_tokens is -1: ..."}

When the server's queue is full it answers 429 and says in Retry-After when to come again. This waits that long and asks
again, so the concurrency need not be guessed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openai import APIStatusError, AsyncOpenAI, OpenAIError, RateLimitError
from rich.console import Console
from rich.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", type=Path, help="JSON lines to send")
    parser.add_argument("answers", type=Path, help="JSON lines that came back; what it has already is not asked again")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="its model; the one it serves if not given")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at a time (default: %(default)s)")
    args = parser.parse_args()
    try:
        return asyncio.run(run(args))
    except OpenAIError as error:
        print(f"error: {error} Run this again to go on.", file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("Stopped. Run this again to go on.", file=sys.stderr)
    return 1


async def run(args: argparse.Namespace) -> int:
    """Ask for what is not answered yet. Return the exit code."""
    requests = list(read_requests(args.requests))
    done = read_done(args.answers)
    waiting = iter([request for request in requests if request["id"] not in done])
    num_refused = num_waits = 0
    client = AsyncOpenAI(base_url=args.url, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0)
    model = args.model or (await client.models.list()).data[0].id

    async def work(answers: TextIO, progress: Progress) -> None:
        """Take requests one after another until none is left; several of these run side by side."""
        nonlocal num_refused, num_waits
        for request in waiting:
            answer, waits = await ask(client, {"model": model, **request})
            num_refused += "error" in answer
            num_waits += waits
            answers.write(json.dumps(answer) + "\n")
            answers.flush()  # what is asked is paid for: a line is on its way to disk before the next is asked for
            progress.advance(task)

    with args.answers.open("a", encoding="utf-8") as answers, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("asking", total=len(requests), completed=len(done))
        await asyncio.gather(*(work(answers, progress) for _ in range(args.concurrency)))
    asked = len(requests) - len(done)
    print(f"{asked} asked, {len(done)} answered before, {num_refused} refused, {num_waits} times the queue was full")
    return 1 if num_refused else 0


def read_requests(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the requests of ``file``, each with an id that no other has."""
    seen = set()
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except ValueError as error:
            msg = f"{file}, line {number} is no JSON: {error}."
            raise ValueError(msg) from None
        if not isinstance(request, dict) or not isinstance(request.get("id"), str) or request["id"] in seen:
            msg = f"{file}, line {number}: a request is an object whose id is a text that no other line has."
            raise ValueError(msg)
        seen.add(request["id"])
        yield request


def read_done(file: Path) -> set[str]:
    """Return the ids that ``file`` answers, and cut off a last line that was not written to its end."""
    if not file.exists():
        return set()
    text = file.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        os.truncate(file, len(whole))
    return {json.loads(line)["id"] for line in whole.splitlines()}


async def ask(client: AsyncOpenAI, request: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the answer to one request, and how often the server was too full to take it.

    Raises:
        OpenAIError: the server is gone or has a failure of its own.
    """
    request_id = request["id"]
    fields = {name: value for name, value in request.items() if name not in ("id", "model", "messages")}
    num_waits = 0
    while True:
        try:
            response = await client.chat.completions.create(
                model=request["model"],
                messages=request.get("messages", []),
                extra_body=fields,  # also those that openai-python does not know, such as top_k
            )
        except RateLimitError as full:
            num_waits += 1
            await asyncio.sleep(float(full.response.headers.get("Retry-After", 1)))
            continue
        except APIStatusError as error:
            if error.status_code >= 500:  # noqa: PLR2004 - as HTTP divides them
                raise
            return {"id": request_id, "error": error.message}, num_waits
        usage, choice = response.usage, response.choices[0]
        details = usage and usage.prompt_tokens_details
        answer = {
            "id": request_id,
            "text": choice.message.content,
            "finish_reason": choice.finish_reason,
            "prompt_tokens": usage and usage.prompt_tokens,
            "cached_tokens": details and details.cached_tokens,
        }
        return answer, num_waits


if __name__ == "__main__":
    sys.exit(main())
