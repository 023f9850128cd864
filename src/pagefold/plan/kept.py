"""Kept: which modules of a quantized checkpoint stay in 16 bit, by what its config names."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["KEEPS_NOTHING", "Kept", "kept_of"]

_LISTS = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers", "llm_int8_skip_modules", "exclude")
"""Fields in which tools name what they leave as it is: compressed-tensors, those of transformers, ModelOpt,
bitsandbytes, Quark."""
_LONGEST = 500
"""Characters of a pattern."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a quantized checkpoint leaves in 16 bit, beside embeddings, norms and routers.

    Attributes:
        patterns: that names of modules are compared with.
        only: parts of names of the only modules that are quantized; empty where all are.
        has_quantized_head: whether the output layer is quantized too.
    """

    patterns: tuple[re.Pattern[str], ...] = ()
    only: tuple[str, ...] = ()
    has_quantized_head: bool = False

    def keeps(self, names: Sequence[str]) -> bool:
        """Whether a module that is called so stays in 16 bit; several names where families call it differently."""
        if self.only and not any(part in name for name in names for part in self.only):
            return True
        return any(pattern.search(name) for pattern in self.patterns for name in names)


KEEPS_NOTHING = Kept()


def kept_of(config: Mapping[str, Any], name: str) -> Kept:
    """Return what the checkpoint of a config leaves in 16 bit.

    A name stands for the module and all inside of it, wherever it is; ``*`` for anything; what begins with ``re:`` is
    an expression.

    Raises:
        ConfigError: an expression is none.
    """
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        return KEEPS_NOTHING
    lists = [found[field] for field in _LISTS if isinstance(found.get(field), list)]
    entries = [each for names in lists for each in names if isinstance(each, str)]
    only = found.get("modules_in_block_to_quantize")
    blocks = only if isinstance(only, list) else []
    parts = tuple(part for block in blocks for part in (block if isinstance(block, list) else [block]))
    patterns = tuple(_pattern(entry, name) for entry in entries)
    return Kept(patterns, tuple(map(str, parts)), found.get("lm_head") is True)


def _pattern(entry: str, name: str) -> re.Pattern[str]:
    if len(entry) > _LONGEST:
        message = f"The config of {name} names a module of {len(entry)} characters in quantization_config."
        raise ConfigError(message, remedy=f"Names have at most {_LONGEST}.")
    if not entry.startswith("re:"):
        inside = fnmatch.translate(entry).removeprefix("(?s:").rpartition(")")[0]
        return re.compile(rf"(?:^|\.){inside}(?:\.|$)", re.DOTALL)
    try:
        return re.compile(rf"^(?:{entry[3:]})")
    except (re.error, OverflowError, RecursionError) as error:
        message = f"The config of {name} has {entry!r} in quantization_config, which is no expression: {error}."
        raise ConfigError(message, remedy="Mend it, or take it out.") from None
