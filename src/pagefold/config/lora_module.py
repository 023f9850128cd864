"""LoRAModule: an adapter that a server starts with, as ``--lora-modules`` names it: in vLLM's two forms."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from pagefold.config.flag import bad_value
from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = ["MAX_ADAPTER_NAME", "LoRAModule", "check_adapter_name", "check_loras", "lora_modules_of"]

MAX_ADAPTER_NAME = 256
"""Characters of an adapter's name, at most."""
_MOST_LORAS, _MAX_LORA_RANK = 1024, 512
_FIELDS = {"name", "path", "base_model_name"}
_REMEDY = 'Write it as sql=/path/to/folder, or as \'{"name": "sql", "path": "/path/to/folder"}\'.'


class LoRAModule(NamedTuple):
    """An adapter by name.

    Attributes:
        name: what requests call it.
        path: its folder.
        base_model_name: what clients call its model; empty for the one that is served.
    """

    name: str
    path: str
    base_model_name: str = ""


def check_adapter_name(name: str) -> str:
    """Return what is wrong with an adapter's name; empty if it is good."""
    if not name or len(name) > MAX_ADAPTER_NAME:
        return f"has {len(name)} characters, and may have 1 to {MAX_ADAPTER_NAME}"
    if {".", ".."} & set(name.split("/")):
        return "has a part that is . or .., which no URL could tell"
    return "" if name.isprintable() and name == name.strip() else "has characters that no URL and no label could tell"


def lora_modules_of(texts: Iterable[str]) -> tuple[LoRAModule, ...]:
    """Return the adapters that texts name, each as ``name=path`` or as a JSON object.

    Raises:
        ConfigError: one is neither, or a name comes twice.
    """
    modules = tuple(map(_module_of, texts))
    names = [module.name for module in modules]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        msg = f"lora_modules names {twice!r} twice."
        raise ConfigError(msg, remedy="Give each adapter a name of its own.")
    return modules


def check_loras(texts: Collection[str], max_loras: int, max_lora_rank: int, *, is_on: bool) -> None:
    """See that what is said of adapters goes together.

    Args:
        texts: those that are there from the start.
        max_loras: how many there may be.
        max_lora_rank: the largest rank that one may have.
        is_on: whether there may be any.

    Raises:
        ConfigError: it does not.
    """
    if not 1 <= max_loras <= _MOST_LORAS:
        raise bad_value("max_loras", max_loras, f"between 1 and {_MOST_LORAS}")
    if not 1 <= max_lora_rank <= _MAX_LORA_RANK:
        raise bad_value("max_lora_rank", max_lora_rank, f"between 1 and {_MAX_LORA_RANK}")
    if texts and not is_on:
        msg = "lora_modules is set, and enable_lora is not."
        raise ConfigError(msg, remedy="Set enable_lora too, or leave it out.")
    if len(lora_modules_of(texts)) > max_loras:
        msg = f"lora_modules names {len(texts)} adapters, and max_loras is {max_loras}."
        raise ConfigError(msg, remedy="Give a larger max_loras, or name fewer.")


def _module_of(text: str) -> LoRAModule:
    if text.lstrip().startswith("{"):
        try:
            fields = json.loads(text)
        except ValueError:
            fields = {}
        whole = {"name", "path"} <= fields.keys() <= _FIELDS if isinstance(fields, dict) else False
        if not whole or not all(isinstance(value, str) for value in fields.values()):
            msg = f"lora_modules has {text!r}, which is no JSON object with name and path."
            raise ConfigError(msg, remedy=_REMEDY)
        module = LoRAModule(**fields)
    else:
        name, _, path = text.partition("=")
        module = LoRAModule(name, path)
    wrong = check_adapter_name(module.name)
    if wrong or not module.path:
        msg = f"lora_modules has {text!r}: {f'its name {wrong}' if wrong else 'it names no folder'}."
        raise ConfigError(msg, remedy=_REMEDY)
    return module
