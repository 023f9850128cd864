"""bytes_of_piece: GPT-2's letters, byte fallback, and None for what is neither."""

from __future__ import annotations

import pytest

from pagefold.tokenizer.pieces import _BYTE_OF_LETTER, bytes_of_piece


def test_every_byte_has_one_letter():
    assert sorted(_BYTE_OF_LETTER.values()) == list(range(256))


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        ("Ġthe", b" the"),
        ("âĢ", b"\xe2\x80"),
        ("Ċ", b"\n"),
        ("<0xE2>", b"\xe2"),
        ("<0x0a>", b"\n"),
        ("<0xE2", b"<0xE2"),
        ("▁the", None),
        ("日", None),
    ],
)
def test_bytes_of_pieces(piece, expected):
    assert bytes_of_piece(piece) == expected
