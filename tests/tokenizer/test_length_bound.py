"""LengthBound: never more than the tokens that a text has; where it cannot know, nothing."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from pagefold.tokenizer.length_bound import _MAX_DECOMPOSITION, LengthBound
from pagefold.tokenizer.pieces import letter_of_byte

LETTERS = {letter_of_byte(byte): byte for byte in range(256)}
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def byte_level(vocab: dict[str, int] = LETTERS, normalizer: Any = None, **model: Any) -> Tokenizer:
    """Bytes, a run of six spaces, and é."""
    more = ["ĠĠ", "ĠĠĠ", "ĠĠĠĠĠĠ", "Ã©"]
    merges = [("Ġ", "Ġ"), ("ĠĠ", "Ġ"), ("ĠĠĠ", "ĠĠĠ"), ("Ã", "©")]
    backend = Tokenizer(models.BPE(vocab | {piece: 1000 + at for at, piece in enumerate(more)}, merges, **model))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


def with_marks() -> Tokenizer:
    """As Llama 2's."""
    backend = Tokenizer(
        models.BPE(
            BYTES | {"<unk>": 300, "▁": 301, "▁▁": 302},
            [("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


BOUNDED = {
    "byte-level": byte_level(),
    "byte-level that drops": byte_level({letter: byte for letter, byte in LETTERS.items() if byte not in (4, 0xF1)}),
    "byte-level with an unknown token": byte_level(
        {letter: byte for letter, byte in LETTERS.items() if byte != 4} | {"<unk>": 400},
        unk_token="<unk>",
        fuse_unk=True,
    ),
    "NFC": byte_level(normalizer=normalizers.NFC()),
    "marks": with_marks(),
}


@pytest.mark.parametrize("name", BOUNDED)
@given(text=st.text())
@example(text=" " * 600)
@example(text="e\u0301" * 100)
@example(text="\u1fa7" * 50)
@example(text=unicodedata.normalize("NFD", "\u1fa7") * 50)
@example(text="각" * 50)
@example(text=unicodedata.normalize("NFD", "각") * 50)
@example(text="\x04" * 100)
@example(text="\U00050000" * 100)
@example(text="x" * 500)
def test_a_bound_is_no_more_than_there_is(name, text):
    backend = BOUNDED[name]
    assert LengthBound(backend).min_tokens(text) <= len(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_bound_grows_with_the_text(name):
    """Or it would be no use."""
    bound = LengthBound(BOUNDED[name])
    assert bound.min_tokens("x" * 9000) >= 1000
    assert bound.min_tokens("x" * 90_000) >= 10_000


def test_no_canonical_decomposition_is_longer():
    characters = (chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    assert max(len(unicodedata.normalize("NFD", one)) for one in characters) == _MAX_DECOMPOSITION


def _that_strips() -> Tokenizer:
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return backend


def _that_removes() -> Tokenizer:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.ByteLevel()]
    )
    return backend


def _without_bytes() -> Tokenizer:
    return Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))


UNBOUNDED = {
    "strips": _that_strips,
    "removes": _that_removes,
    "no bytes": _without_bytes,
    "NFKC": lambda: byte_level(normalizer=normalizers.NFKC()),
    "strip": lambda: byte_level(normalizer=normalizers.Strip()),
    "unigram": lambda: Tokenizer(models.Unigram([("a", -1.0)])),
    "wordpiece": lambda: Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1})),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_nothing_is_known_nothing_is_said(name):
    assert LengthBound(UNBOUNDED[name]()).min_tokens("a" * 1_000_000) == 0


def test_the_built_in_model_has_one(tokenizer):
    for text in (" " * 5000, "word " * 5000, "日本" * 3000, "\n" + " " * 80, "\x04" * 5000, ""):
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.min_tokens("word " * 200_000) > 8192
