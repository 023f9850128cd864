"""The real tokenizer that Pagefold brings, and a small one of the other kind: spaces as marks, bytes as a fallback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pagefold.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    """Return the built-in model's: byte-level, no rules about spaces."""
    return Tokenizer(smollm2)


@pytest.fixture(scope="session")
def marks() -> Any:
    """Return a tokenizer like Llama 2's: ``<0xE2>`` is a byte, ``▁`` a space, and a text's first space is dropped.

    Its words are ``▁the``, ``▁cat``, ``s``, ``!``, ``▁``, and ``<s>`` is special. Byte ``b`` has the id ``b``.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    words = ["▁the", "▁cat", "s", "!", "▁", "<unk>"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + at for at, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend
