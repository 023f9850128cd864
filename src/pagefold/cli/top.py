"""``pagefold top``: what a running server's cache does, in the terminal: the dashboard's figures."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagefold.cli.fail import fail
from pagefold.cli.running_server import RunningServer
from pagefold.config import environment_admin_key
from pagefold.errors import PagefoldError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["top"]


def top(
    *,
    url: Annotated[str, typer.Option(help="Of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="The admin's. Or $PAGEFOLD_ADMIN_API_KEY.")] = None,
    every: Annotated[float, typer.Option(min=0.5, metavar="SECONDS", help="How often to ask.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the server answers, once.")] = False,
) -> None:
    """Show what a running server's cache does: blocks, hits, evictions, requests. Ctrl-C leaves."""
    from rich.console import Console  # noqa: PLC0415 - only here

    try:
        server = RunningServer(url, api_key or environment_admin_key())
        told = _ask(server)
        if as_json:
            typer.echo(json.dumps(told, indent=2))
            return
        console = Console()
        if once or not console.is_terminal:
            from pagefold.cli.top_screen import screen  # noqa: PLC0415 - imports rich

            console.print(screen(told, console.width, num_requests=len(told["requests"])))
            return
        _watch(server, told, console, every)
    except PagefoldError as error:
        fail(error)


def _ask(server: RunningServer) -> dict[str, Any]:
    """Return what the server tells now, with what it tells beside where it does.

    Raises:
        ConfigError: nobody answers, or it is not for us.
        InvalidRequestError: it refuses.
    """
    told = server.ask("/v1/dashboard", "dashboard")
    advice = told["more"]["advice"]
    if advice is not None:
        told["advice"] = server.ask(advice, "list")["data"]
    return told


def _watch(server: RunningServer, told: dict[str, Any], console: Console, every_s: float) -> None:
    from rich.live import Live  # noqa: PLC0415 - only here

    from pagefold.cli.top_screen import screen  # noqa: PLC0415 - imports rich

    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(screen(told, console.width, _room(console)), refresh=True)
                time.sleep(every_s)
                told = _ask(server)
    except KeyboardInterrupt:
        return


def _room(console: Console) -> int:
    """Return for how many requests there is room."""
    return max(2, console.height - 24)
