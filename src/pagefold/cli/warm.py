"""``pagefold warm``: have a running server cache known prompts before anybody sends them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagefold.cli.fail import fail
from pagefold.cli.permissions import tell_of_bundle
from pagefold.cli.running_server import RunningServer
from pagefold.cli.warm_file import read_warm_file
from pagefold.cli.warm_prefix import WarmTerms, is_export, warm_prefix
from pagefold.config import environment_admin_key
from pagefold.errors import InvalidRequestError, PagefoldError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.cli.warm_file import WarmLine

__all__ = ["warm"]


def warm(  # noqa: PLR0913 - one parameter a flag
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="JSON lines: an object with prompt or messages in each. Or a prefix that pagefold cache export wrote.",
        ),
    ],
    *,
    url: Annotated[str, typer.Option(help="Of the server.")] = "http://127.0.0.1:8000",
    admin_api_key: Annotated[str | None, typer.Option(help="The server's. Or $PAGEFOLD_ADMIN_API_KEY.")] = None,
    tenant: Annotated[str | None, typer.Option(help="For whom, where a line does not say.")] = None,
    cache_salt: Annotated[
        str | None, typer.Option(metavar="SALT", help="The same: of requests that bring this salt.")
    ] = None,
    pin: Annotated[bool | None, typer.Option(help="Whether to pin, where a line does not say.")] = None,
    ttl: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long pins last, where a line does not say.")
    ] = None,
    retention_priority: Annotated[
        float | None, typer.Option(help="Of pins, 0 to 100, where a line does not say.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of each prompt as JSON.")] = False,
) -> None:
    """Cache the prompts of FILE on a running server; of a prefix, by its blocks."""
    pinning = {"pin": pin, "ttl_s": ttl, "retention_priority": retention_priority}
    defaults = {"tenant": tenant, "cache_salt": cache_salt, **pinning}
    given = {name: value for name, value in defaults.items() if value is not None}
    try:
        if is_export(Path(file)):
            terms = WarmTerms(tenant, cache_salt, {name: given[name] for name in pinning if name in given})
            _warm_prefix(
                Path(file), RunningServer(url, admin_api_key or environment_admin_key()), terms, as_json=as_json
            )
            return
        lines = [line._replace(fields=given | line.fields) for line in read_warm_file(file)]
        server = RunningServer(url, admin_api_key or environment_admin_key())
        results = [*_progress(server, lines)]
    except PagefoldError as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    failed = [result for result in results if "error" in result]
    if not as_json:
        typer.echo(_summary([result for result in results if "error" not in result]))
    for result in failed:
        typer.echo(f"line {result['line']}: {result['error']}", err=True)
    if failed:
        fail(PagefoldError(f"{len(failed)} of {len(results)} prompts could not be warmed as asked."))


def _warm_prefix(file: Path, server: RunningServer, terms: WarmTerms, *, as_json: bool) -> None:
    """Send the blocks of a prefix file, and say what came of it."""
    from pagefold.cli.models import progress_bar  # noqa: PLC0415 - only for long work

    tell_of_bundle(file)
    with progress_bar() as progress:
        result = warm_prefix(file, server, terms, progress)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    kept = ", ".join(f"{num:,} in {tier}" for tier, num in result["num_kept"].items())
    typer.echo(f"sent {result['num_blocks']:,} blocks of {result['num_tokens']:,} tokens: {kept}")
    if max(result["num_kept"].values(), default=0) < result["num_blocks"]:
        typer.echo("warning: no tier has all of them; see whether they are out, or too small", err=True)
    warmed = result["warmed"]
    if warmed is None:
        typer.echo("not warmed: whose it is was not said; they find it with their next request")
    else:
        pinned = "; pinned" if warmed["pin"] is not None else ""
        typer.echo(
            f"warmed: {warmed['num_cached_tokens']:,} of {warmed['num_kept_tokens']:,} tokens were found{pinned}"
        )


def _progress(server: RunningServer, lines: list[WarmLine]) -> Iterator[dict[str, Any]]:
    """Warm one after another, so that later prompts find what earlier ones have in common with them."""
    from rich.console import Console  # noqa: PLC0415 - only here
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    console = Console(stderr=True)
    columns = (TextColumn("warming"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(lines))
        for line in lines:
            try:
                yield {"line": line.number, **server.ask("/v1/cache/warm", "cache.warm", line.fields)}
            except InvalidRequestError as error:
                yield {"line": line.number, "error": str(error)}
            bar.advance(task)


def _summary(warmed: list[dict[str, Any]]) -> str:
    num_tokens = sum(result["num_kept_tokens"] for result in warmed)
    num_found = sum(result["num_cached_tokens"] for result in warmed)
    num_pins = sum(result["pin"] is not None for result in warmed)
    return (
        f"warmed {len(warmed)} prompts: {num_tokens:,} tokens, of which {num_found:,} were cached already; "
        f"{num_pins} pinned"
    )
