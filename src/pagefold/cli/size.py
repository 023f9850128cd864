"""Sizes of flags: what ``config/size.py`` reads, with the errors of the command line."""

from __future__ import annotations

import typer

from pagefold.config.size import size_of
from pagefold.errors import ConfigError

__all__ = ["parse_size"]


def parse_size(text: str | int) -> int:
    """Return the bytes that ``text`` means; see :func:`~pagefold.config.size.size_of`.

    Raises:
        typer.BadParameter: it means none.
    """
    if isinstance(text, int):  # a flag's default
        return text
    try:
        return size_of(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
