"""The built-in model's vocabulary, with marks of thinking in place of two of its special tokens, or without."""

from __future__ import annotations

import json

START_ID, END_ID = 3, 4


def with_marks(tokenizer_json: str, marks: tuple[str, str], *, special: bool) -> str:
    """Return a ``tokenizer.json`` in which ``marks`` are added tokens, special or not."""
    contents = json.loads(tokenizer_json)
    vocabulary = contents["model"]["vocab"]
    for token_id, mark in zip((START_ID, END_ID), marks, strict=True):
        added = contents["added_tokens"][token_id]
        assert added["id"] == token_id
        vocabulary[mark] = vocabulary.pop(added["content"])
        added |= {"content": mark, "special": special}
    return json.dumps(contents)
