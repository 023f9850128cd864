"""Pieces: how vocabularies write tokens that are no whole characters, and the bytes that they stand for."""

from __future__ import annotations

import re

__all__ = ["bytes_of_piece", "is_byte_fallback", "letter_of_byte"]

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def bytes_of_piece(piece: str) -> bytes | None:
    """Return the bytes of a vocabulary entry, written as ``<0xE2>`` or in GPT-2's letters; None if it is in neither."""
    fallback = _BYTE_FALLBACK.fullmatch(piece)
    if fallback:
        return bytes([int(fallback[1], 16)])
    if all(letter in _BYTE_OF_LETTER for letter in piece):
        return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
    return None


def is_byte_fallback(piece: str) -> bool:
    """Return whether a vocabulary entry is one byte, written as ``<0xE2>``."""
    return _BYTE_FALLBACK.fullmatch(piece) is not None


def letter_of_byte(byte: int) -> str:
    """Return GPT-2's letter of a byte."""
    return _LETTER_OF_BYTE[byte]


def _letters() -> dict[str, int]:
    """Return GPT-2's letter of each byte: itself where it can be seen, else the next free one from U+0100 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


_BYTE_OF_LETTER = _letters()
_LETTER_OF_BYTE = {byte: letter for letter, byte in _BYTE_OF_LETTER.items()}
