"""``pagefold models``: which models have short names, and getting one before it is needed."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Annotated

import rich.progress
import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from pagefold.cli.fail import fail
from pagefold.cli.options import MODEL_HELP
from pagefold.errors import PagefoldError
from pagefold.hub.catalog import CATALOG, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pagefold.hub.catalog import CatalogModel
    from pagefold.hub.progress import Progress

__all__ = ["app", "progress_bar"]

app = typer.Typer(help="Models by name: list them, get one, or print where it is.", no_args_is_help=True)

_Name = Annotated[str, typer.Argument(help=MODEL_HELP, metavar="NAME")]


@app.command("list")
def list_models(
    *, as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False
) -> None:
    """Show the built-in names."""
    cache_dir = _cache_dir()
    if as_json:
        typer.echo(json.dumps([_described(model, cache_dir) for model in CATALOG.values()], indent=2))
        return
    table = Table("name", "model", "license", "parameters", "here")
    for model in CATALOG.values():
        here = "yes" if model.is_here(cache_dir) else "no"
        table.add_row(model.name, model.title, model.license_id, f"{model.num_params / 1e6:.1f} M", here)
    Console().print(table)
    typer.echo("A local folder, a GGUF file or a hub id (org/name) works wherever a name does.")


@app.command("get")
def get_model(
    name: _Name,
    *,
    file: Annotated[
        str | None,
        typer.Option("--file", help="Of a hub id: a GGUF file of it, by its name or its quantization.", metavar="FILE"),
    ] = None,
    accept_license: Annotated[
        bool, typer.Option("--accept-license", help="Accept the model's terms of use, if it has any.")
    ] = False,
) -> None:
    """Fetch a model and convert it if need be, so that it starts at once later.

    A hub id with GGUF files needs one of them: org/name:Q4_K_M, or --file.

    A model with terms of use of its own is not downloaded before you accept them: without the flag, this says where
    they are.
    """
    whole = f"{name}:{file}" if file else name
    typer.echo(f"{whole} is in {_resolve(whole, accept_license=accept_license)}")


@app.command("path")
def print_path(name: _Name) -> None:
    """Print the model's folder, after having fetched it if need be; nothing else goes to stdout."""
    typer.echo(_resolve(name))


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield a progress hook for the hub that draws a bar on stderr; if stderr is a file, a line for each piece of work.

    Nothing is written before there is something to do.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = rich.progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    tasks: dict[str, rich.progress.TaskID] = {}

    def show(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what)
            bar.start()
            if not console.is_terminal:
                console.print(f"{what} ...")
        bar.update(tasks[what], completed=done, total=total or None)

    try:
        yield show
    finally:
        if tasks:
            bar.stop()


def _described(model: CatalogModel, cache_dir: Path) -> dict[str, str | int | None]:
    return {
        "name": model.name,
        "model": model.title,
        "license": model.license_id,
        "terms": model.terms.url if model.terms is not None else None,
        "num_params": model.num_params,
        "source": str(model.source),
        "path": str(model.folder(cache_dir)) if model.is_here(cache_dir) else None,
    }


def _resolve(name: str, *, accept_license: bool = False) -> Path:
    cache_dir = _cache_dir()
    try:
        with progress_bar() as progress:
            return resolve(name, cache_dir, accept_license=accept_license, progress=progress)
    except PagefoldError as error:
        fail(error)


def _cache_dir() -> Path:
    from pagefold.config import cache_dir  # noqa: PLC0415 - a broken setting must not break --help

    try:
        return cache_dir()
    except PagefoldError as error:
        fail(error)
