"""Ask several questions under one long system prompt, and see what sharing its blocks is worth.

    python examples/shared_prompt.py

Each question is asked twice: once in a namespace of its own (a cache_salt that nobody else has), so that nothing can be
shared, and once in one that all questions share, where all but the first find the system prompt in the cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import uuid
from typing import NamedTuple

from openai import OpenAI, OpenAIError
from rich.console import Console
from rich.table import Table

PLANTS = (
    "beans",
    "carrots",
    "garlic",
    "kale",
    "leeks",
    "onions",
    "peas",
    "potatoes",
    "pumpkins",
    "spinach",
    "tomatoes",
)
SYSTEM = "You answer questions about a garden in one short sentence. What grows in it:\n" + "\n".join(
    f"- bed {bed}: {plant}, sown in week {10 + bed * 7 % 20}, watered every {bed % 3 + 1} days"
    for bed, plant in enumerate(PLANTS, start=1)
)
QUESTIONS = (
    "What grows in bed 4?",
    "When was the garlic sown?",
    "Which beds are watered daily?",
    "What is sown in week 15?",
    "Where are the peas?",
    "How often are the leeks watered?",
)


class Asked(NamedTuple):
    """What one request cost.

    Attributes:
        first_token_s: until the first text came, in seconds; None if none came.
    """

    prompt_tokens: int
    cached_tokens: int
    first_token_s: float | None


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="its model; the one it serves if not given")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    try:
        model = args.model or client.models.list().data[0].id
        shared_salt = new_salt()
        alone = [ask(client, model, question, new_salt()) for question in QUESTIONS]
        shared = [ask(client, model, question, shared_salt) for question in QUESTIONS]
    except OpenAIError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(alone, shared)
    return 0


def new_salt() -> str:
    """Return a namespace that has nothing in the cache yet, not even from an earlier run of this script."""
    return uuid.uuid4().hex


def ask(client: OpenAI, model: str, question: str, salt: str) -> Asked:
    """Ask one question in the namespace of ``salt``."""
    began = time.monotonic()
    first_token_s = None
    usage = None
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_salt": salt},
    )
    for chunk in stream:
        usage = chunk.usage or usage  # the last chunk brings it, and no choices
        if first_token_s is None and chunk.choices and chunk.choices[0].delta.content:
            first_token_s = time.monotonic() - began
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return Asked(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0, first_token_s)


def show(alone: list[Asked], shared: list[Asked]) -> None:
    """Print both ways side by side."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in ("tokens", "cached alone", "shared", "text alone", "shared"):
        table.add_column(title, justify="right")
    for question, one, other in zip(QUESTIONS, alone, shared, strict=True):
        tokens = (one.prompt_tokens, one.cached_tokens, other.cached_tokens)
        table.add_row(question, *map(str, tokens), shown(one.first_token_s), shown(other.first_token_s))
    Console().print(table)
    num_prompt = sum(asked.prompt_tokens for asked in shared)
    num_shared = sum(asked.cached_tokens for asked in shared)
    num_alone = sum(asked.cached_tokens for asked in alone)
    print(f"\nOut of the cache: {num_shared} of {num_prompt} prompt tokens when shared, {num_alone} alone.")
    print(f"First text, median: {median(alone)} alone, {median(shared[1:])} once shared.")


def median(many: list[Asked]) -> str:
    """Return when text came first, in the middle of ``many``."""
    times = [asked.first_token_s for asked in many if asked.first_token_s is not None]
    return shown(statistics.median(times) if times else None)


def shown(seconds: float | None) -> str:
    """Return a time for people."""
    return "no text" if seconds is None else f"{seconds * 1e3:.0f} ms"


if __name__ == "__main__":
    sys.exit(main())
