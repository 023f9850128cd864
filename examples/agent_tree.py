"""Let an agent try several ways from one conversation, and see how much of each branch came out of the cache.

    python examples/agent_tree.py --branches 3 --depth 2

A task is planned once; then every branch goes on from that plan with another first step, all at the same time, for a
few steps. The server computes what branches have in common once: a branch computes what it adds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from openai import AsyncOpenAI, OpenAIError
from rich.console import Console
from rich.tree import Tree

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

TASK = (
    "A small library lends 4,000 books to 900 members and keeps its records in a spreadsheet that several people edit "
    "at once; entries get lost, and nobody knows which books are late. Plan how to replace it within a month, with one "
    "part-time programmer, no budget for licences, and members who want to renew by phone as well as on a web page."
)
STEPS = (
    "Look at the risks first.",
    "Look at the cost first.",
    "Look at the members first.",
    "Look at the data first.",
    "Look at the staff first.",
    "Look at the time first.",
)
GO_ON = "Now think one step further."


@dataclass
class Node:
    """One request of the tree, with the conversation up to its answer."""

    title: str
    messages: list[ChatCompletionMessageParam]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    children: list[Node] = field(default_factory=list)

    def all(self) -> list[Node]:
        """Return this node and everything below it."""
        return [self, *(node for child in self.children for node in child.all())]


class Agent:
    """Grows a tree of conversations.

    Args:
        client: the server.
        model: its model.
        max_tokens: of one answer.
    """

    def __init__(self, client: AsyncOpenAI, model: str, max_tokens: int) -> None:
        self._client = client
        self._model = model
        self._max_tokens = max_tokens
        self._salt = uuid.uuid4().hex  # a cache of our own: what an earlier run left would make the figures too good

    async def plan(self) -> Node:
        """Ask for the plan that all branches go on from."""
        return await self._ask("the plan", [{"role": "user", "content": TASK}])

    async def grow(self, parent: Node, first_step: str, depth: int) -> None:
        """Add one branch of ``depth`` steps to ``parent``."""
        for number in range(depth):
            step = GO_ON if number else first_step
            node = await self._ask(step, [*parent.messages, {"role": "user", "content": step}])
            parent.children.append(node)
            parent = node

    async def _ask(self, title: str, messages: list[ChatCompletionMessageParam]) -> Node:
        response = await self._client.chat.completions.create(
            model=self._model,
            messages=messages,
            max_tokens=self._max_tokens,
            temperature=0,
            extra_body={"cache_salt": self._salt},
        )
        usage = response.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        said: ChatCompletionMessageParam = {"role": "assistant", "content": response.choices[0].message.content or ""}
        return Node(title, [*messages, said], usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="its model; the one it serves if not given")
    parser.add_argument("--branches", type=int, default=3, choices=range(1, len(STEPS) + 1), help="(default: 3)")
    parser.add_argument("--depth", type=int, default=2, help="steps of a branch (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=60, help="of an answer (default: %(default)s)")
    args = parser.parse_args()
    try:
        root = asyncio.run(run(args))
    except OpenAIError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(root)
    return 0


async def run(args: argparse.Namespace) -> Node:
    """Return the grown tree."""
    client = AsyncOpenAI(base_url=args.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    model = args.model or (await client.models.list()).data[0].id
    agent = Agent(client, model, args.max_tokens)
    root = await agent.plan()
    await asyncio.gather(*(agent.grow(root, step, args.depth) for step in STEPS[: args.branches]))
    return root


def show(root: Node) -> None:
    """Print the tree, and what it would have cost without a cache."""
    tree = Tree(line(root))
    add(tree, root)
    Console().print(tree)
    nodes = root.all()
    asked = sum(node.prompt_tokens for node in nodes)
    cached = sum(node.cached_tokens for node in nodes)
    print(f"\n{len(nodes)} requests, {asked} prompt tokens: {cached} out of the cache, {asked - cached} computed.")


def add(tree: Tree, node: Node) -> None:
    """Hang what is below ``node`` into the printed tree."""
    for child in node.children:
        add(tree.add(line(child)), child)


def line(node: Node) -> str:
    """Return what is told of one request."""
    return f"{node.title} {node.prompt_tokens} prompt tokens, {node.cached_tokens} from the cache"


if __name__ == "__main__":
    sys.exit(main())
