"""PlainTokenizer: a ``tokenizer.json`` that is used as it stands, without transformers, whose import takes seconds.

transformers adds tokens to what a ``tokenizer.json`` says, rebuilds it for some classes and mends it for some models.
Where it does none of that, both come to the same tokens; every other folder is for transformers to load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.files.json_object import read_json_object
from pagefold.tokenizer.chat_template import is_plain_template, render_template

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["PlainTokenizer", "load_plain_tokenizer"]

_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_MODEL_TYPES = ("llama",)
"""Model types for which transformers has no tokenizer class of its own."""

_FILES = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_VOCABULARY = 100_000
"""Larger ones transformers checks for a mistake in Mistral's."""


class PlainTokenizer:
    """What :class:`~pagefold.tokenizer.tokenizer.Tokenizer` needs of transformers' tokenizers, by their names.

    Args:
        backend: a ``tokenizers.Tokenizer``.
        chat_template: one, several by name, or None.
        special_tokens: as ``bos_token``, for the templates.
    """

    def __init__(
        self,
        backend: Any,  # noqa: ANN401 - tokenizers has no stubs
        chat_template: str | dict[str, str] | None,
        special_tokens: Mapping[str, str],
    ) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self._special_tokens = special_tokens

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text."""
        # Its characters are not looked for: that takes as long as all the rest.
        (encoding,) = self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> dict[str, Any]:
        """Return the tokens of a text, and which of its characters each one is."""
        assert return_offsets_mapping, "offsets are what this is for"
        (encoding,) = self.backend_tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        tokenize: bool,
        add_generation_prompt: bool,
        **variables: object,
    ) -> str:
        """Return the text of a chat.

        Raises:
            ValueError: there are several templates, and none of them for this. And whatever the template raises.
        """
        assert not tokenize, "the text is wanted"
        template = self.chat_template
        if isinstance(template, dict):
            name = "tool_use" if tools is not None and "tool_use" in template else "default"
            if name not in template:
                msg = f"the model has templates for {', '.join(sorted(template))}, and no default"
                raise ValueError(msg)
            template = template[name]
        assert template is not None, "asked before"
        known = {**self._special_tokens, **variables}
        return render_template(template, conversation, tools, known, add_generation_prompt=add_generation_prompt)


def load_plain_tokenizer(folder: Path) -> PlainTokenizer | None:
    """Load a folder's tokenizer; None if it is not plain, or not right."""
    settings = read_json_object(folder / "tokenizer_config.json")
    special_tokens = {name: settings[name] for name in _SPECIAL_TOKENS if name in settings}
    beside = {file.name for pattern in ("*token*", "*chat_template*") for file in folder.glob(pattern)}
    if not (
        settings.get("tokenizer_class") in _CLASSES
        and read_json_object(folder / "config.json").get("model_type") in _MODEL_TYPES
        and beside <= _FILES
        and settings.keys() <= _KNOWN.keys()
        and all(_KNOWN[name](value) for name, value in settings.items())
        and read_json_object(folder / "special_tokens_map.json").items() <= special_tokens.items()
    ):
        return None
    from tokenizers import Tokenizer  # noqa: PLC0415 - not needed to import this module

    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # noqa: BLE001 - the library raises no other; transformers says what is wrong
        return None
    added = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    if (
        backend.get_vocab_size() > _MAX_VOCABULARY
        or backend.truncation is not None
        or backend.padding is not None
        or not added.issuperset(special_tokens.values())  # what lacks would be added
    ):
        return None
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {one["name"]: one["template"] for one in template}
    return PlainTokenizer(backend, template, special_tokens)


def _is_text(value: Any) -> bool:  # noqa: ANN401 - of JSON
    return isinstance(value, str)


def _is_plain_chat_template(value: Any) -> bool:  # noqa: ANN401
    if isinstance(value, list):
        is_named = all(isinstance(one, dict) and one.keys() == {"name", "template"} for one in value)
        return bool(value) and is_named and all(isinstance(one["name"], str) for one in value) and all(
            _is_plain_chat_template(one["template"]) for one in value
        )  # fmt: skip
    return isinstance(value, str) and bool(value) and is_plain_template(value)


def _changes_nothing(_: Any) -> bool:  # noqa: ANN401
    return True


_KNOWN: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_SPECIAL_TOKENS, _is_text),
    "tokenizer_class": _is_text,
    "chat_template": _is_plain_chat_template,
    # Of what transformers does itself and Pagefold does not ask it for: decoding, cutting, warning.
    "add_prefix_space": _changes_nothing,
    "clean_up_tokenization_spaces": _changes_nothing,
    "model_max_length": _changes_nothing,
}
