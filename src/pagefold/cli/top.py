"""``pagefold top``: what a running server's cache does, in the terminal: the dashboard's figures."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagefold.cli.fail import fail
from pagefold.cli.running_server import NoAnswerError, RunningServer
from pagefold.cli.top_beside import Beside
from pagefold.config import environment_admin_key
from pagefold.errors import PagefoldError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from rich.console import Console, RenderableType

__all__ = ["top"]

_DASHBOARD = ("/v1/dashboard", "dashboard")
_LEAST_REQUESTS = 2
_PATIENCE_S = 20.0
"""A server that is silent for longer is away. A curve may take longer, and is asked for aside."""


def top(
    *,
    url: Annotated[str, typer.Option(help="Of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(help="The admin's. Or $PAGEFOLD_ADMIN_API_KEY.")] = None,
    every: Annotated[float, typer.Option(min=0.5, metavar="SECONDS", help="How often to ask.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show it once and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the server answers, once.")] = False,
) -> None:
    """Show what a running server's cache does: blocks, hits, evictions, requests, other sizes. Ctrl-C leaves."""
    from rich.console import Console  # noqa: PLC0415 - only here

    try:
        key = api_key or environment_admin_key()
        server, beside = RunningServer(url, key, _PATIENCE_S), Beside(RunningServer(url, key))
        told = server.ask(*_DASHBOARD)
        console = Console()
        if as_json or once or not console.is_terminal:
            told |= beside.ask(told["more"])
            if as_json:
                typer.echo(json.dumps(told, indent=2))
                return
            from pagefold.cli.top_screen import screen  # noqa: PLC0415 - imports rich

            console.print(screen(told, console.width, num_requests=len(told["requests"])))
            return
        with contextlib.suppress(KeyboardInterrupt):
            _watch(server, beside, told, console, every)
    except PagefoldError as error:
        fail(error)


def _watch(server: RunningServer, beside: Beside, told: dict[str, Any], console: Console, every_s: float) -> None:
    """Show it again and again. While nobody answers, what was told last stays, and it is said that it is old.

    Raises:
        PagefoldError: who answers refuses, or is no Pagefold server.
    """
    from rich.live import Live  # noqa: PLC0415 - only here

    away, shown = "", told
    with _noted_interrupts() as interrupts, Live(console=console, screen=True, auto_refresh=False) as live:
        while not interrupts:
            if not away:
                shown = told | beside.look(told["more"])
            live.update(_fitting(shown, away, console), refresh=True)
            time.sleep(every_s)
            try:
                told, away = server.ask(*_DASHBOARD), ""
            except NoAnswerError as error:
                beside.forget()
                away = f"The server is away, and is asked again every {every_s:g} s. {error.message}"


@contextlib.contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Inside, Ctrl-C is noted in what is yielded, and raised as ever.

    Python drops an exception that is raised while an object is finalized, whatever it is.
    """
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _fitting(told: dict[str, Any], away: str, console: Console) -> RenderableType:
    """Return the picture with as many requests as there is room for."""
    from pagefold.cli.top_screen import screen  # noqa: PLC0415 - imports rich

    without = screen(told, console.width, 0, away)
    room = console.height - len(console.render_lines(without, pad=False))
    return screen(told, console.width, max(_LEAST_REQUESTS, room), away)
