"""Sizes as people write them: ``200000000``, ``512M``, ``2G``, ``2GiB``, ``1.5GB``."""

from __future__ import annotations

import re

from pagefold.errors import ConfigError

__all__ = ["size_of"]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}iB": 1024**_power}
    _UNITS |= {_letter.lower(): 1000**_power, f"{_letter}B": 1000**_power}

_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)")


def size_of(text: str) -> int:
    """Return the bytes that ``text`` means: K, M, G, T and KiB ... are powers of 1024, k, m, g, t and KB ... of 1000.

    (As in vLLM, where the case of a lone letter tells.)

    Raises:
        ConfigError: it means none.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        msg = f"{text!r} is not a size."
        raise ConfigError(msg, remedy="Give bytes, or 512M, 2G, 2GiB.")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
