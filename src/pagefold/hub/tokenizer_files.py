"""A tokenizer's files out of GGUF metadata: ``tokenizer.json`` and the small files that transformers reads beside it.

Which rules cut texts, GGUF says by names. One file for each kind that is known makes ``tokenizer.json``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pagefold.errors import UnsupportedModelError
from pagefold.hub.byte_level import FAMILIES, byte_level_tokenizer
from pagefold.hub.sentence_pieces import sentence_piece_tokenizer
from pagefold.hub.tool_template import SMOLLM2_TOOL_USE
from pagefold.hub.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from pathlib import Path

    from pagefold.gguf.header import GgufHeader

__all__ = ["write_tokenizer_files"]

_BYTE_LEVEL, _SENTENCE_PIECES = "gpt2", "llama"
"""GGUF's names of the kinds of tokenizers."""
_TEMPLATE = "tokenizer.chat_template"
_TOOL_TEMPLATES = {"smollm": SMOLLM2_TOOL_USE}


def write_tokenizer_files(gguf: GgufHeader, folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json`` into ``folder``.

    Raises:
        UnsupportedModelError: a tokenizer of another kind, which would cut texts differently.
        GgufFormatError: metadata that is missing or contradicts itself.
    """
    kind, family = gguf.value("tokenizer.ggml.model", str), gguf.value("tokenizer.ggml.pre", str, "none")
    if kind == _BYTE_LEVEL and family in FAMILIES:
        vocabulary = read_vocabulary(gguf)
        tokenizer = byte_level_tokenizer(gguf, vocabulary, family)
    elif kind == _SENTENCE_PIECES and family in ("default", "none"):
        vocabulary = read_vocabulary(gguf)
        tokenizer = sentence_piece_tokenizer(gguf, vocabulary)
    else:
        message = f"{gguf.path} has a tokenizer of kind {kind!r}, family {family!r}, whose rules are not known here."
        known = f"Known are {_SENTENCE_PIECES!r}, and {_BYTE_LEVEL!r} with {', '.join(FAMILIES)}."
        raise UnsupportedModelError(message, remedy=f"Use the model's original folder. {known}")
    architecture = gguf.value("general.architecture", str)
    config = {
        # The generic class takes tokenizer.json as it stands; another one would put its own rules in.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.value(f"{architecture}.context_length", int),
        **vocabulary.special,
    }
    templates = _chat_templates(gguf, family)
    if templates:
        # transformers takes the one that is named tool_use where tools are given.
        named = [{"name": name, "template": template} for name, template in templates.items()]
        config["chat_template"] = named if len(named) > 1 else named[0]["template"]
    # No indent: the vocabulary and merges are 100,000 entries and more, which indenting would make twice as long.
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    for name, content in {"tokenizer_config.json": config, "special_tokens_map.json": vocabulary.special}.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def _chat_templates(gguf: GgufHeader, family: str) -> dict[str, str]:
    """Return a file's chat templates by their names, the default one first; empty where it has none."""
    if _TEMPLATE not in gguf.metadata:
        return {}
    named = gguf.values(f"{_TEMPLATE}s", str) if f"{_TEMPLATE}s" in gguf.metadata else []
    templates = {"default": gguf.value(_TEMPLATE, str)}
    templates |= {name: gguf.value(f"{_TEMPLATE}.{name}", str) for name in named if name != "default"}
    if family in _TOOL_TEMPLATES:
        templates.setdefault("tool_use", _TOOL_TEMPLATES[family])
    return templates
