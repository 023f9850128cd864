"""A tokenizer's files out of GGUF metadata: ``tokenizer.json`` and the small files that transformers reads beside it.

Byte-level BPE with the pre-tokenizer of the ``smollm`` family is the one kind known: first every digit stands alone,
then GPT-2's rule for words. (The digits rule is easily lost: GGUF says it only by the family's name.)
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pagefold.errors import UnsupportedModelError
from pagefold.hub.gguf import GgufFormatError
from pagefold.hub.tool_template import SMOLLM2_TOOL_USE

if TYPE_CHECKING:
    from pathlib import Path

    from pagefold.hub.gguf import GgufFile

__all__ = ["write_tokenizer_files"]

# Token types that are matched in the text before BPE sees it; the others are ordinary entries of the vocabulary.
_CONTROL = 3
_USER_DEFINED = 4

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PRE_TOKENIZERS = {
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]},
}
# GGUF's names for the ids of special tokens, and transformers'.
_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def write_tokenizer_files(gguf: GgufFile, folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json`` into ``folder``.

    Raises:
        UnsupportedModelError: a tokenizer of another kind, which would cut texts differently.
        GgufFormatError: metadata that is missing or contradicts itself.
    """
    _refuse_other_kinds(gguf)
    tokens = gguf.values("tokenizer.ggml.tokens", str)
    types = gguf.values("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        message = f"{gguf.path}: its {len(tokens)} tokens are not distinct, or do not fit its {len(types)} token types."
        raise GgufFormatError(message)
    added = [
        {"id": token_id, "content": token, "special": type_ == _CONTROL, **_MATCHED_LITERALLY}
        for token_id, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ in (_CONTROL, _USER_DEFINED)
    ]
    special = {}
    for name, key in _SPECIAL_TOKENS.items():
        if key in gguf.metadata:
            special[name] = _token(gguf, tokens, key)

    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[gguf.value("tokenizer.ggml.pre", str)],
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
    config = {
        # The generic class takes tokenizer.json as it stands; GPT2Tokenizer would put its own pre-tokenizer in.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.value("llama.context_length", int),
        **special,
    }
    if "tokenizer.chat_template" in gguf.metadata:
        template = gguf.value("tokenizer.chat_template", str)
        # transformers takes the second one where tools are given.
        config["chat_template"] = [
            {"name": "default", "template": template},
            {"name": "tool_use", "template": SMOLLM2_TOOL_USE},
        ]
    # No indent: the vocabulary and merges are 100,000 entries, which indenting would make twice as long.
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    for name, content in {"tokenizer_config.json": config, "special_tokens_map.json": special}.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


_MATCHED_LITERALLY = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def _refuse_other_kinds(gguf: GgufFile) -> None:
    model = gguf.value("tokenizer.ggml.model", str)
    family = gguf.value("tokenizer.ggml.pre", str, "none")
    if model != "gpt2" or family not in _PRE_TOKENIZERS:
        message = f"{gguf.path} has a tokenizer of kind {model!r}, family {family!r}, whose rules are not known here."
        raise UnsupportedModelError(message, remedy="Use the model's original folder, which has a tokenizer.json.")
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if gguf.value(f"tokenizer.ggml.{key}", bool, default=False):
            message = f"{gguf.path} has a tokenizer with {key}, which is not converted."
            raise UnsupportedModelError(message, remedy="Use the model's original folder, which has a tokenizer.json.")


def _token(gguf: GgufFile, tokens: list[str], key: str) -> str:
    token_id = gguf.value(key, int)
    if not 0 <= token_id < len(tokens):
        message = f"{gguf.path}: {key} is {token_id}, and there are {len(tokens)} tokens."
        raise GgufFormatError(message)
    return tokens[token_id]
