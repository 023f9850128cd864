"""Byte-level BPE out of GGUF metadata: GGUF says only by a family's name how texts are cut before merges see them.

The rules are those of the families' own ``tokenizer.json``. (Rules are easily lost: llama.cpp has them in its code.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagefold.gguf.header import GgufFormatError
from pagefold.hub.around_texts import post_processor
from pagefold.hub.vocabulary import CONTROL, MATCHED_LITERALLY, UNKNOWN, USER_DEFINED, refuse_setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagefold.gguf.header import GgufHeader
    from pagefold.hub.vocabulary import Vocabulary

__all__ = ["FAMILIES", "byte_level_tokenizer"]

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_MAX_SHOWN = 40
_DIGITS = {"type": "Digits", "individual_digits": True}


@dataclass(frozen=True, slots=True)
class _Family:
    """How the tokenizers of a family cut texts.

    Attributes:
        pre_tokenizers: what cuts, in its order.
        normalizer: what changes texts before; None for nothing.
        ignores_merges: whether a piece that is a token is taken whole, however merges would make it.
        begins: whether texts begin with a token where the file does not say.
    """

    pre_tokenizers: tuple[Mapping[str, Any], ...]
    normalizer: Mapping[str, str] | None = None
    ignores_merges: bool = False
    begins: bool = False


def _by_regex(regex: str) -> tuple[Mapping[str, Any], ...]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return split, _BYTE_LEVEL | {"use_regex": False}


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"

_CASED = f"{_BEFORE}{_UPPER}*{_LOWER}+", f"{_BEFORE}{_UPPER}+{_LOWER}*"
"""Words that end where small letters do."""

_LLAMA3_CUTS = _by_regex(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}")
_LLAMA3 = _Family(_LLAMA3_CUTS, ignores_merges=True, begins=True)
_QWEN2 = _Family(_by_regex(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"), normalizer={"type": "NFC"})
_TEKKEN = _Family(
    _by_regex(rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SIGNS_AND_SLASHES}|{_SPACES}"), ignores_merges=True, begins=True
)
_GPT_4O = _Family(
    _by_regex(rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SIGNS_AND_SLASHES}|{_SPACES}")
)

FAMILIES: Mapping[str, _Family] = {
    "smollm": _Family((_DIGITS, _BYTE_LEVEL)),  # each digit alone, then GPT-2's rule for words
    "gpt-2": _Family((_BYTE_LEVEL,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _Family(_LLAMA3_CUTS),  # Phi 4's
    "smaug-bpe": _Family(_LLAMA3_CUTS),
    "tekken": _TEKKEN,  # Mistral's since Nemo
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "gpt-4o": _GPT_4O,  # Phi 4 mini's
}
"""By the names that ``tokenizer.ggml.pre`` has for them."""


def byte_level_tokenizer(gguf: GgufHeader, vocabulary: Vocabulary, family: str) -> dict[str, Any]:
    """Return the content of ``tokenizer.json``.

    Args:
        gguf: of the file.
        vocabulary: of the file.
        family: one of ``FAMILIES``.

    Raises:
        UnsupportedModelError: it puts a space before a text.
        GgufFormatError: there are no merges, or others than of tokens.
    """
    rules = FAMILIES[family]
    refuse_setting(gguf, "add_space_prefix", default=False)
    tokens = vocabulary.tokens
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    added = [
        {"id": token_id, "content": token, "special": type_ != USER_DEFINED, **MATCHED_LITERALLY}
        for token_id, (token, type_) in enumerate(zip(tokens, vocabulary.types, strict=True))
        if type_ in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    cuts: Mapping[str, Any] = {"type": "Sequence", "pretokenizers": list(rules.pre_tokenizers)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": rules.normalizer,
        "pre_tokenizer": cuts,
        "post_processor": post_processor(gguf, vocabulary, begins=rules.begins),
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rules.ignores_merges,
            "vocab": vocab,
            "merges": _merges(gguf, vocab),
        },
    }


def _merges(gguf: GgufHeader, vocab: Mapping[str, int]) -> list[str]:
    """Return the merges, each of two tokens that make a third."""
    merges = gguf.values("tokenizer.ggml.merges", str)
    for merge in merges:
        left, _, right = merge.partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            message = f"{gguf.path}: its merge {merge[:_MAX_SHOWN]!r} is not of two tokens that make a third."
            raise GgufFormatError(message)
    return merges
