"""With which special tokens messages end, read from what a chat template makes of a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SAMPLE_CHAT", "end_token_ids"]

SAMPLE_CHAT = (
    {"role": "user", "content": "Alpha"},
    {"role": "assistant", "content": "Beta"},
    {"role": "user", "content": "Gamma"},
)
"""A conversation of contents that no template has of itself."""


def end_token_ids(backend: Any, text: str, contents: Sequence[str]) -> frozenset[int]:  # noqa: ANN401 - has no types
    """Return the first special token behind each content.

    A template that ends messages with plain text alone has none.

    Args:
        backend: a tokenizer of the ``tokenizers`` library.
        text: what a template made of messages.
        contents: of these messages, in order.
    """
    special = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    encoded = backend.encode(text, add_special_tokens=False)
    begins: list[int] = []
    at = 0
    for content in contents:
        at = text.find(content, at)
        if at < 0:
            return frozenset()
        begins.append(at)
        at += len(content)
    found: set[int] = set()
    for content, begin, end in zip(contents, begins, [*begins[1:], len(text)], strict=True):
        behind = begin + len(content)
        for token_id, (first, _) in zip(encoded.ids, encoded.offsets, strict=True):
            if behind <= first < end and token_id in special:
                found.add(token_id)
                break
    return frozenset(found)
