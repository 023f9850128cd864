"""Prompts: what a request begins with, in names of blocks, as replicas' KV events have them.

Its tokens are what a replica says that they are: the server's own tokenizer and chat template, asked over HTTP. So the
front loads no tokenizer, and cannot be of another opinion than the server.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from pagefold.index import ExtraKeys, block_hashes, tenant_salt
from pagefold.integrations.ray.forwarded import Forwarded, Head
from pagefold.routing import Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.integrations.ray.front import Send

__all__ = ["TokenizedPrompts"]

_OK = 200
_OF_A_CHAT = (
    "messages",
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
)
"""Fields of a chat that say what its prompt is."""

_IN_TOKENIZE = {"/v1/chat/completions": _OF_A_CHAT, "/v1/completions": ("add_special_tokens",)}
_AUTHORIZES = ("authorization", "x-api-key")


class TokenizedPrompts:
    """Reads prompts of completions and chats. Those of other routes are not read.

    Args:
        send: asks a replica.
        block_size: tokens a block.
        most_tokens: no more than these are named: no cache holds a longer prompt.
        tenant_of: whose key some headers bring.
        seed: what replicas' chains of hashes begin with.
    """

    def __init__(
        self,
        send: Send,
        *,
        block_size: int,
        most_tokens: int,
        tenant_of: Callable[[Sequence[tuple[str, str]]], str],
        seed: str,
    ) -> None:
        self._send = send
        self._block_size = block_size
        self._most_tokens = most_tokens
        self._tenant_of = tenant_of
        self._seed = seed

    async def read(self, asked: Forwarded, replica: str) -> Prompt | None:
        """Return the prompt of a request, the first of several; None where that cannot be said."""
        fields = _IN_TOKENIZE.get(asked.path)
        try:
            body = json.loads(asked.body)
        except (ValueError, RecursionError):
            return None
        if fields is None or not isinstance(body, dict):
            return None
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and not _are_tokens(prompt):
            prompt = prompt[0]
        token_ids = prompt if _are_tokens(prompt) else None
        if token_ids is None:
            told: dict[str, Any] = {name: body[name] for name in fields if name in body}
            if isinstance(prompt, str):
                told["prompt"] = prompt
            token_ids = await self._tokenize(told, asked, replica)
        if not token_ids:
            return None
        salt = body.get("cache_salt")
        keys = ExtraKeys(cache_salt=tenant_salt(self._tenant_of(asked.headers), salt if isinstance(salt, str) else ""))
        named = token_ids[: self._most_tokens]
        hashes = await asyncio.to_thread(block_hashes, named, self._block_size, keys, self._seed)
        return Prompt(hashes, len(token_ids))

    async def _tokenize(self, told: dict[str, Any], asked: Forwarded, replica: str) -> list[int] | None:
        headers = tuple(header for header in asked.headers if header[0] in _AUTHORIZES)
        body = json.dumps(told).encode()
        question = Forwarded("POST", "/tokenize", (*headers, ("content-type", "application/json")), body)
        pieces: list[bytes] = []
        status = 0
        async for piece in self._send(replica, question):
            if isinstance(piece, Head):
                status = piece.status
            else:
                pieces.append(piece)
        if status != _OK:
            return None
        token_ids = json.loads(b"".join(pieces)).get("tokens")
        return token_ids if _are_tokens(token_ids) else None


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)
