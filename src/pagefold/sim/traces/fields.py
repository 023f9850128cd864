"""Fields: what a line of JSON says, by name and within bounds. Errors go on behind the line's number."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["Fields"]

_SHOWN = 40


class Fields:
    """The fields of one line.

    Every method raises ValueError where a field is missing or is not what it must be.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def first(self) -> str:
        """The name of the first field."""
        return next(iter(self._values), "")

    def get(self, name: str) -> object:
        """Return a field, whatever it is."""
        if name not in self._values:
            msg = f"it has no {name}"
            raise ValueError(msg)
        return self._values[name]

    def whole(self, name: str, least: int, most: int) -> int:
        """Return a whole number from ``least`` to ``most``."""
        return self.as_whole(name, self.get(name), least, most)

    def number(self, name: str, least: float, most: float) -> float:
        """Return a number from ``least`` to ``most``."""
        return self.as_number(name, self.get(name), least, most)

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self.get(name)
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str:
        """Return a text."""
        value = self.get(name)
        if not isinstance(value, str):
            raise _wrong(name, value, "a text")
        return value

    def one_of(self, name: str, allowed: Iterable[str]) -> str:
        """Return one of some texts."""
        value = self.get(name)
        known = tuple(allowed)
        if value not in known or not isinstance(value, str):
            raise _wrong(name, value, f"one of {', '.join(known)}")
        return value

    def items(self, name: str) -> list[object]:
        """Return what a list holds; nothing if there is none."""
        value = self._values.get(name, [])
        if not isinstance(value, list):
            raise _wrong(name, value, "a list")
        return value

    def wholes(self, name: str, least: int, most: int) -> tuple[int, ...]:
        """Return a list of whole numbers; nothing if there is none."""
        return tuple(self.as_whole(name, each, least, most) for each in self.items(name))

    @staticmethod
    def as_whole(name: str, value: object, least: int, most: int) -> int:
        """Return ``value``, if it is a whole number within bounds."""
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            bounds = f"{least:,}" if least == most else f"a whole number from {least:,} to {most:,}"
            raise _wrong(name, value, bounds)
        return value

    @staticmethod
    def as_number(name: str, value: object, least: float, most: float) -> float:
        """Return ``value``, if it is a number within bounds."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise _wrong(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    @staticmethod
    def pair(name: str, value: object) -> tuple[object, object]:
        """Return ``value``, if it is a list of two."""
        if not isinstance(value, list) or len(value) != 2:  # noqa: PLR2004 - a pair
            raise _wrong(name, value, "two values")
        return value[0], value[1]


def _wrong(name: str, value: object, allowed: str) -> ValueError:
    try:
        shown = repr(value)
    except ValueError:  # a number of very many digits
        shown = "a very large number"
    return ValueError(f"its {name} is {shown[:_SHOWN]}, not {allowed}")
