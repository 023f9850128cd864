"""Byte-level BPE out of GGUF metadata, with the pre-tokenizer of the ``smollm`` family.

First every digit stands alone, then GPT-2's rule for words. (The digits rule is easily lost: GGUF says it only by the
family's name.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.hub.vocabulary import CONTROL, MATCHED_LITERALLY, USER_DEFINED, refuse_setting

if TYPE_CHECKING:
    from pagefold.gguf.header import GgufHeader
    from pagefold.hub.vocabulary import Vocabulary

__all__ = ["smollm_tokenizer"]

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}


def smollm_tokenizer(gguf: GgufHeader, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the content of ``tokenizer.json``.

    Raises:
        UnsupportedModelError: it puts something around a text.
        GgufFormatError: there are no merges.
    """
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        refuse_setting(gguf, key, default=False)
    tokens = vocabulary.tokens
    added = [
        {"id": token_id, "content": token, "special": type_ == CONTROL, **MATCHED_LITERALLY}
        for token_id, (token, type_) in enumerate(zip(tokens, vocabulary.types, strict=True))
        if type_ in (CONTROL, USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]},
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": gguf.values("tokenizer.ggml.merges", str),
        },
    }
