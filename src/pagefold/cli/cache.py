"""``pagefold cache``: what a cache folder on a disk holds, whether it is right, and moving it to another machine."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagefold.cli.fail import fail
from pagefold.cli.options import with_flags
from pagefold.cli.permissions import tell_of_bundle, tell_of_cache_folder
from pagefold.cli.prefix import (
    LayoutFlags,
    ModelWanted,
    PrefixTarget,
    PromptWanted,
    export_prompt,
    import_file,
    lines_of,
    refuse_given,
    told_of,
)
from pagefold.cli.size import parse_size
from pagefold.errors import ConfigError, PagefoldError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pagefold.hub.progress import Progress
    from pagefold.store.cache_folder import CacheView

__all__ = ["app"]

app = typer.Typer(help="Cache folders on a disk: look into them, verify, clear, export, import.", no_args_is_help=True)

_Folder = Annotated[Path, typer.Argument(help="A cache folder: what a server got as --kv-disk-path.", metavar="FOLDER")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Tenant = Annotated[
    str | None, typer.Option(metavar="TENANT", help="Of a prefix: whose it is, as the key file names them.")
]
_Salt = Annotated[str | None, typer.Option(metavar="SALT", help="Of a prefix: the cache_salt of its requests.")]
_Fix = Annotated[
    bool,
    typer.Option("--fix-permissions", help="Take from others on this machine all rights to what is there already."),
]


@app.command("ls")
def list_blocks(folder: _Folder, *, as_json: _Json = False) -> None:
    """Show what a folder holds, by model and namespace, used last first; also while a server uses it."""
    view = _look(folder)
    if as_json:
        typer.echo(json.dumps([row for layout in _described(view)["layouts"] for row in _rows(layout)], indent=2))
        return
    table = Table("model")
    for column in ("layout", "namespace"):
        table.add_column(column, no_wrap=True)
    for column in ("blocks", "tokens", "MiB", "last used"):
        table.add_column(column, justify="right", no_wrap=True)
    for layout in _described(view)["layouts"]:
        for row in _rows(layout):
            table.add_row(
                Text(row["label"]),  # which may have come with a file, and is no markup
                row["layout"][:12],
                row["namespace"][:12],
                f"{row['num_blocks']:,}",
                f"{row['num_tokens']:,}",
                f"{row['num_bytes'] / 2**20:,.1f}",
                row["last_used"],
            )
    Console().print(table)


@app.command("stats")
def show_stats(folder: _Folder, *, as_json: _Json = False) -> None:
    """Show how large a folder is and may become, and who uses it; also while a server does."""
    view = _look(folder)
    described = _described(view)
    if as_json:
        typer.echo(json.dumps(described, indent=2))
        return
    table = Table.grid(padding=(0, 2))
    share = f" ({view.num_bytes / view.limit_bytes:.0%} of the limit)" if view.limit_bytes else ""
    table.add_row("folder", str(view.path))
    table.add_row("used by", view.holder or "nobody")
    table.add_row("limit", f"{view.limit_bytes:,} bytes")
    table.add_row("on the disk", f"{view.num_bytes:,} bytes{share}")
    table.add_row("blocks", f"{described['num_blocks']:,}")
    table.add_row("tokens", f"{described['num_tokens']:,}")
    for layout in described["layouts"]:
        size = f"{layout['num_blocks']:,} blocks of {layout['block_tokens']} tokens and {layout['block_bytes']:,} bytes"
        table.add_row("layout", Text(f"{layout['layout'][:12]} {layout['label']}: {size}"))
    Console().print(table)


@app.command("verify")
def verify_blocks(folder: _Folder, *, fix_permissions: _Fix = False, as_json: _Json = False) -> None:
    """Read every block and drop those that are damaged. No server may be using the folder."""
    with _failing(), _bar("verifying") as progress:
        tell_of_cache_folder(folder, fix=fix_permissions)
        from pagefold.store.cache_folder import verify  # noqa: PLC0415 - heavy

        verified = verify(folder, progress)
    num_dropped = sum(verified.dropped.values())
    if as_json:
        typer.echo(json.dumps({"num_blocks": verified.num_blocks, "num_dropped": num_dropped, **_causes(verified)}))
    else:
        typer.echo(f"{verified.num_blocks:,} blocks read, {verified.num_blocks - num_dropped:,} are right")
    if num_dropped:
        fail(PagefoldError(f"{num_dropped:,} blocks were wrong and are dropped: {_said(verified.dropped)}."))


@app.command("clear")
def clear_blocks(folder: _Folder, *, fix_permissions: _Fix = False, as_json: _Json = False) -> None:
    """Drop all blocks of a folder. No server may be using it; a server's own: POST /reset_prefix_cache."""
    with _failing():
        from pagefold.store.cache_folder import clear  # noqa: PLC0415 - heavy

        tell_of_cache_folder(folder, fix=fix_permissions)
        num_blocks = clear(folder)
    typer.echo(json.dumps({"num_dropped": num_blocks}) if as_json else f"{num_blocks:,} blocks dropped")


@app.command("export")
@with_flags(Prefix=LayoutFlags)
def export_blocks(  # noqa: PLR0913 - one parameter a flag
    folder: _Folder,
    file: Annotated[Path, typer.Argument(help="What to write; replaced if it is there.", metavar="FILE")],
    *,
    prompt: Annotated[
        Path | None,
        typer.Option(
            metavar="PROMPT",
            help="Write this prompt's blocks alone: a text, or JSON with prompt or messages, as pagefold warm takes.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Whose blocks, with --prompt: the server's model, with its flags below."),
    ] = None,
    tenant: _Tenant = None,
    cache_salt: _Salt = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Write the prompt's first blocks where the others are not there.")
    ] = False,
    as_json: _Json = False,
    **flags: Any,  # noqa: ANN401 - of the layout
) -> None:
    """Write all blocks of a folder, or one prompt's, into a file; also while a server uses it.

    Who reads the file can read prompts.
    """
    if prompt is not None:
        wanted = PromptWanted(prompt, ModelWanted(model, flags), tenant, cache_salt, partial)
        with _failing(), _bars() as progress:
            tell_of_cache_folder(folder)
            about = export_prompt(folder, file, wanted, progress)
        num_bytes = file.stat().st_size
        said = f"{about.num_tokens:,} of {about.num_prompt_tokens:,} tokens, {num_bytes:,} bytes in {file}"
        typer.echo(json.dumps({"num_bytes": num_bytes, **told_of(about)}) if as_json else said)
        return
    with _failing(), _bar("exporting") as progress_of_all:
        refuse_given(
            "go with --prompt", {"--model": model, "--tenant": tenant, "--cache-salt": cache_salt}, is_there=partial
        )
        from pagefold.store.export import export_frames  # noqa: PLC0415 - heavy

        tell_of_cache_folder(folder)
        num_blocks, num_wrong = export_frames(folder, file, progress_of_all)
    num_bytes = file.stat().st_size
    if as_json:
        typer.echo(json.dumps({"num_blocks": num_blocks, "num_wrong": num_wrong, "num_bytes": num_bytes}))
    else:
        left_out = f"; {num_wrong:,} were wrong and are left out" if num_wrong else ""
        typer.echo(f"{num_blocks:,} blocks, {num_bytes:,} bytes in {file}{left_out}")


@app.command("import")
@with_flags(Prefix=LayoutFlags)
def import_blocks(  # noqa: PLR0913 - one parameter a flag
    file: Annotated[Path, typer.Argument(help="What pagefold cache export wrote.", metavar="FILE")],
    folder: Annotated[Path, typer.Argument(help="A cache folder, or one to be made.", metavar="FOLDER")],
    *,
    limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="How large the folder may become, as 10G; what it has if not given."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Of a prefix: refuse it if a server of this model, with these flags, has no use for it.",
        ),
    ] = None,
    tenant: _Tenant = None,
    cache_salt: _Salt = None,
    fix_permissions: _Fix = False,
    as_json: _Json = False,
    **flags: Any,  # noqa: ANN401 - of the layout
) -> None:
    """Put an exported file's blocks into a folder that no server is using, each checked. Import only what you trust.

    A prefix, which --prompt has exported, is read whole before any of it is written. With --model blocks of another
    size are converted.
    """
    limit_bytes = None if limit is None else parse_size(limit)
    with _failing():
        tell_of_bundle(file, fix=fix_permissions)
        tell_of_cache_folder(folder, fix=fix_permissions)
        from pagefold.store.prefix_file import is_prefix_file  # noqa: PLC0415 - heavy

        if is_prefix_file(file):
            target = PrefixTarget(None if model is None else ModelWanted(model, flags), tenant, cache_salt)
            with _bars() as progress:
                num_kept, told = import_file(file, folder, limit_bytes, target, progress)
            whole = {"num_kept": num_kept, **told}
            said = f"{told['num_blocks']:,} blocks of {told['num_tokens']:,} tokens read, {num_kept:,} are in {folder}"
            typer.echo(json.dumps(whole) if as_json else said)
            return
        refuse_given("go with the file of a prefix", {"--model": model, "--tenant": tenant, "--cache-salt": cache_salt})
    with _failing(), _bar("importing") as progress_of_all:
        from pagefold.store.export import import_frames  # noqa: PLC0415 - heavy

        imported = import_frames(file, folder, limit_bytes, progress_of_all)
    num_wrong = sum(imported.wrong.values())
    if as_json:
        typer.echo(
            json.dumps({"num_blocks": imported.num_frames, "num_kept": imported.num_kept, "num_wrong": num_wrong})
        )
    else:
        typer.echo(f"{imported.num_frames:,} blocks read, {imported.num_kept:,} are in {folder}")
    if num_wrong:
        fail(PagefoldError(f"{num_wrong:,} blocks of {file} were wrong and are left out: {_said(imported.wrong)}."))


@app.command("show")
def show_file(
    file: Annotated[Path, typer.Argument(help="What pagefold cache export --prompt wrote.", metavar="FILE")],
    *,
    as_json: _Json = False,
) -> None:
    """Show what prefix a file holds, of which model and layout, after all of it was read and found right."""
    with _failing(), _bar("reading") as progress:
        from pagefold.store.prefix_file import open_prefix  # noqa: PLC0415 - heavy

        tell_of_bundle(file)
        with open_prefix(file) as prefix:
            prefix.check(progress)
            told = told_of(prefix.about)
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    table = Table.grid(padding=(0, 2))
    for name, value in lines_of(prefix.about).items():
        table.add_row(name, Text(value))
    Console().print(table)


def _look(folder: Path) -> CacheView:
    with _failing():
        from pagefold.store.cache_folder import look  # noqa: PLC0415 - heavy

        tell_of_cache_folder(folder)
        return look(folder)


def _described(view: CacheView) -> dict[str, Any]:
    layouts = [
        {
            "label": layout.row.label,
            "layout": layout.row.digest.hex(),
            "block_bytes": layout.row.block_bytes,
            "block_tokens": layout.block_tokens,
            "num_blocks": layout.num_blocks,
            "namespaces": [
                {
                    "namespace": namespace.namespace.hex(),
                    "num_blocks": namespace.num_blocks,
                    "num_tokens": namespace.num_blocks * layout.block_tokens,
                    "num_bytes": namespace.num_blocks * layout.place_bytes,
                    "last_used": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(namespace.used / 1e9)),
                }
                for namespace in layout.namespaces
            ],
        }
        for layout in view.layouts
    ]
    return {
        "folder": str(view.path),
        "holder": view.holder,
        "limit_bytes": view.limit_bytes,
        "num_bytes": view.num_bytes,
        "num_blocks": sum(layout.num_blocks for layout in view.layouts),
        "num_tokens": sum(layout.num_blocks * layout.block_tokens for layout in view.layouts),
        "layouts": layouts,
    }


def _rows(layout: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"label": layout["label"], "layout": layout["layout"], **row} for row in layout["namespaces"]]


def _said(causes: dict[Any, int]) -> str:
    return ", ".join(f"{num:,} {str(cause).replace('_', ' ')}" for cause, num in causes.items())


def _causes(verified: Any) -> dict[str, Any]:  # noqa: ANN401 - imported where it is needed
    return {"causes": {str(cause): num for cause, num in verified.dropped.items()}}


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except PagefoldError as error:
        fail(error)
    except ImportError as error:
        fail(ConfigError(f"{error}.", remedy="Install pagefold[serve]."))


@contextlib.contextmanager
def _bars() -> Iterator[Progress]:
    from pagefold.cli.models import progress_bar  # noqa: PLC0415 - only for long work

    with progress_bar() as show:
        yield show


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    with _bars() as show:
        yield lambda done, total: show(what, done, total)
