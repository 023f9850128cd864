"""How a command fails: one line on stderr, exit code 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from pagefold.errors import PagefoldError

__all__ = ["fail"]

_EXIT_CODE = 2


def fail(error: PagefoldError) -> NoReturn:
    """Print ``error: <message>`` as one line on stderr and leave with exit code 2.

    Raises:
        typer.Exit: always.
    """
    line = " ".join(str(error).split())
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {line}", err=True)
    raise typer.Exit(_EXIT_CODE) from error
