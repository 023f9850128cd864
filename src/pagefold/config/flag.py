"""Flag: how ``pagefold serve`` takes a setting; and what all settings are checked by."""

from __future__ import annotations

from dataclasses import dataclass

from pagefold.errors import ConfigError
from pagefold.typecheck import wrong_type

__all__ = ["Flag", "bad_value", "check_types", "one_of"]


@dataclass(frozen=True, slots=True)
class Flag:
    """How ``pagefold serve`` takes a setting.

    Attributes:
        help: what it says of it.
        metavar: what stands for the value there; None for the last word of its name.
        name: of the flag, if it is not the setting's, without the unit of seconds.
    """

    help: str
    metavar: str | None = None
    name: str | None = None


def check_types(record: object) -> None:
    """See that the fields of a dataclass have the types that they are declared with.

    Raises:
        ConfigError: one has not.
    """
    wrong = wrong_type(record)
    if wrong is not None:
        raise bad_value(wrong.field, repr(wrong.value), wrong.allowed)


def one_of(name: str, value: object, allowed: tuple[str | None, ...]) -> None:
    """See that a setting has one of the values that are allowed.

    Raises:
        ConfigError: it has not.
    """
    if value not in allowed:
        raise bad_value(name, repr(value), f"one of {', '.join(map(str, allowed))}")


def bad_value(name: str, value: object, allowed: str) -> ConfigError:
    """Return the error that says that a setting has a value, and which it may have."""
    return ConfigError(f"{name} is {value}.", remedy=f"It must be {allowed}.")
