"""Chat with the server in a terminal: answers stream, and each says how much of the conversation was in the cache.

    python examples/chat.py                     # interactive; Ctrl-D ends it
    python examples/chat.py --once "Why is the sky blue?"

From the second turn on nearly the whole conversation comes out of the cache: only what is new is computed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from openai import OpenAI, OpenAIError

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="its model; the one it serves if not given")
    parser.add_argument("--system", default="You are a helpful assistant.", help="the system prompt")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 for always the same (default: %(default)s)")
    parser.add_argument("--once", metavar="TEXT", help="ask this, print the answer, and leave")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": args.system}]
    try:
        args.model = args.model or client.models.list().data[0].id
        if args.once is not None:
            answer(client, args, messages, args.once)
            return 0
        print(f"{args.model} at {args.url}. Ctrl-D ends it.")
        while (text := ask()) is not None:
            answer(client, args, messages, text)
    except OpenAIError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
    return 0


def ask() -> str | None:
    """Return what the user types; None at the end."""
    try:
        return input("\n> ")
    except EOFError:
        print()
        return None


def answer(client: OpenAI, args: argparse.Namespace, messages: list[ChatCompletionMessageParam], text: str) -> None:
    """Print the answer to ``text`` as it comes, and add both to ``messages``."""
    messages.append({"role": "user", "content": text})
    began = time.monotonic()
    first_token_s = None
    usage = None
    said = ""
    stream = client.chat.completions.create(
        model=args.model,
        messages=messages,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        stream=True,
        stream_options={"include_usage": True},  # the counts come in a last chunk that has no choices
    )
    for chunk in stream:
        usage = chunk.usage or usage
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            first_token_s = first_token_s or time.monotonic() - began
            said += piece
            print(piece, end="", flush=True)
    print()
    messages.append({"role": "assistant", "content": said})
    if usage is not None and usage.prompt_tokens_details is not None:
        waited = "no text came" if first_token_s is None else f"first text after {first_token_s * 1e3:.0f} ms"
        cached = usage.prompt_tokens_details.cached_tokens
        print(f"[{usage.prompt_tokens} prompt tokens, {cached} from the cache; {waited}]", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
