"""Fields of a ``quantization_config``: read with their kinds checked, and what is refused of them said by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["flag_of", "group_size_of", "number_of", "refused", "word_of"]

_IN_16_BIT = "Use a copy of it whose weights are in 16 bit, with no quantization_config, or one that is quantized by"


def refused(what: str, instead: str = "GPTQ, AWQ, compressed-tensors or fp8") -> UnsupportedModelError:
    """Return the error of what is not computed.

    Args:
        what: behind "weights quantized in the checkpoint".
        instead: what of the kind is computed.
    """
    message = f"The config has weights quantized in the checkpoint {what}, which Pagefold does not compute."
    return UnsupportedModelError(message, remedy=f"{_IN_16_BIT} {instead}.")


def number_of(fields: Mapping[str, Any], name: str, default: int, allowed: Sequence[int], method: str) -> int:
    """Return a whole number that must be one of these.

    Raises:
        UnsupportedModelError: it is another.
    """
    value = fields.get(name)
    if value is None:
        value = default
    if type(value) is not int or value not in allowed:
        numbers = " or ".join(map(str, allowed))
        msg = f"by {method} with {name} {repr(value)[:40]}"
        raise refused(msg, f"{method} with {name} {numbers}")
    return value


def group_size_of(fields: Mapping[str, Any], method: str, *names: str, default: int | None) -> int:
    """Return how many columns share a scale; -1 for all of them.

    Raises:
        UnsupportedModelError: it is no such number.
    """
    value = next((fields[name] for name in names if fields.get(name) is not None), default)
    if type(value) is not int or (value < 1 and value != -1):
        message = f"The config says {names[0]} = {repr(value)[:40]} of weights quantized by {method}."
        raise UnsupportedModelError(message, remedy="It must be the columns of a group, at least 1, or -1 for all.")
    return value


def word_of(fields: Mapping[str, Any], *names: str, default: str = "") -> str:
    """Return the first of these fields that is there, in small letters."""
    value = next((fields[name] for name in names if fields.get(name) is not None), default)
    return str(value)[:80].lower()


def flag_of(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return whether a field is true.

    Raises:
        UnsupportedModelError: it is neither true nor false.
    """
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not bool:
        message = f"The config says {name} = {repr(value)[:40]} in quantization_config."
        raise UnsupportedModelError(message, remedy="It must be true or false.")
    return value
