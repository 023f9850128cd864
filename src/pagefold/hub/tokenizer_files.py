"""A tokenizer's files out of GGUF metadata: ``tokenizer.json`` and the small files that transformers reads beside it.

Which rules cut texts, GGUF says by names. One file for each kind that is known makes ``tokenizer.json``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pagefold.errors import UnsupportedModelError
from pagefold.hub.byte_level import smollm_tokenizer
from pagefold.hub.sentence_pieces import sentence_piece_tokenizer
from pagefold.hub.tool_template import SMOLLM2_TOOL_USE
from pagefold.hub.vocabulary import read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pagefold.gguf.header import GgufHeader
    from pagefold.hub.vocabulary import Vocabulary

__all__ = ["write_tokenizer_files"]

# By GGUF's names of the kind and of the family.
_TOKENIZERS: dict[tuple[str, str], Callable[[GgufHeader, Vocabulary], dict[str, Any]]] = {
    ("gpt2", "smollm"): smollm_tokenizer,
    ("llama", "default"): sentence_piece_tokenizer,
}
_TOOL_TEMPLATES = {"smollm": SMOLLM2_TOOL_USE}


def write_tokenizer_files(gguf: GgufHeader, folder: Path) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``special_tokens_map.json`` into ``folder``.

    Raises:
        UnsupportedModelError: a tokenizer of another kind, which would cut texts differently.
        GgufFormatError: metadata that is missing or contradicts itself.
    """
    model, family = gguf.value("tokenizer.ggml.model", str), gguf.value("tokenizer.ggml.pre", str, "none")
    if (model, family) not in _TOKENIZERS:
        message = f"{gguf.path} has a tokenizer of kind {model!r}, family {family!r}, whose rules are not known here."
        raise UnsupportedModelError(message, remedy="Use the model's original folder, which has a tokenizer.json.")
    vocabulary = read_vocabulary(gguf)
    tokenizer = _TOKENIZERS[model, family](gguf, vocabulary)
    architecture = gguf.value("general.architecture", str)
    config = {
        # The generic class takes tokenizer.json as it stands; another one would put its own rules in.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.value(f"{architecture}.context_length", int),
        **vocabulary.special,
    }
    if "tokenizer.chat_template" in gguf.metadata:
        config["chat_template"] = _chat_template(gguf.value("tokenizer.chat_template", str), family)
    # No indent: the vocabulary and merges are 100,000 entries and more, which indenting would make twice as long.
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    for name, content in {"tokenizer_config.json": config, "special_tokens_map.json": vocabulary.special}.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def _chat_template(template: str, family: str) -> str | list[dict[str, str]]:
    if family not in _TOOL_TEMPLATES:
        return template
    # transformers takes the second one where tools are given.
    return [{"name": "default", "template": template}, {"name": "tool_use", "template": _TOOL_TEMPLATES[family]}]
