"""Flags that take several values behind one name, as vLLM's do: each gets a name of its own, as typer wants it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["spread"]


def spread(arguments: Iterable[str], flags: Sequence[str]) -> list[str]:
    """Return the same, where ``--flag a=b c=d`` is ``--flag a=b --flag c=d``.

    Args:
        arguments: of a command.
        flags: whose values are ``name=value``, or JSON objects: nothing else is taken for one more of them.
    """
    found: list[str] = []
    flag = ""  # whose values may follow
    is_first = False
    for argument in arguments:
        if argument in flags:
            flag, is_first = argument, True
            found.append(argument)
            continue
        if flag and not is_first and _is_value(argument):
            found.append(flag)
        elif not is_first:
            flag = ""
        found.append(argument)
        is_first = False
    return found


def _is_value(argument: str) -> bool:
    return not argument.startswith("-") and ("=" in argument or argument.startswith("{"))
