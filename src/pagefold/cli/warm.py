"""``pagefold warm``: have a running server cache known prompts before anybody sends them."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagefold.cli.fail import fail
from pagefold.cli.warm_file import read_warm_file
from pagefold.config import environment_admin_key
from pagefold.errors import ConfigError, InvalidRequestError, PagefoldError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.cli.warm_file import WarmLine

__all__ = ["warm"]

_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _UNAVAILABLE = 401, 403, 404, 503
_PATIENCE_S = 600.0
_NO_SERVER = "Start one with pagefold serve, or give its --url."


def warm(  # noqa: PLR0913 - one parameter a flag
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSON lines: an object with prompt or messages in each.")],
    *,
    url: Annotated[str, typer.Option(help="Of the server.")] = "http://127.0.0.1:8000",
    admin_api_key: Annotated[str | None, typer.Option(help="The server's. Or $PAGEFOLD_ADMIN_API_KEY.")] = None,
    tenant: Annotated[str | None, typer.Option(help="For whom, where a line does not say.")] = None,
    pin: Annotated[bool | None, typer.Option(help="Whether to pin, where a line does not say.")] = None,
    ttl: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long pins last, where a line does not say.")
    ] = None,
    retention_priority: Annotated[
        float | None, typer.Option(help="Of pins, 0 to 100, where a line does not say.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of each prompt as JSON.")] = False,
) -> None:
    """Cache the prompts of FILE on a running server."""
    defaults = {"tenant": tenant, "pin": pin, "ttl_s": ttl, "retention_priority": retention_priority}
    given = {name: value for name, value in defaults.items() if value is not None}
    try:
        lines = [line._replace(fields=given | line.fields) for line in read_warm_file(file)]
        server = _Server(url, admin_api_key or environment_admin_key())
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


class _Server:
    def __init__(self, url: str, admin_key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            msg = f"--url is {url}."
            raise ConfigError(msg, remedy="It looks like http://127.0.0.1:8000.")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if admin_key is not None:
            self._headers["Authorization"] = f"Bearer {admin_key}"

    def warm(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Warm one prompt.

        Raises:
            InvalidRequestError: this prompt is refused.
            ConfigError: all would be: nobody is there, or it is not for us.
        """
        request = urllib.request.Request(  # noqa: S310 - http or https: checked above
            f"{self._url}/v1/cache/warm", json.dumps(fields).encode(), self._headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE_S) as response:  # noqa: S310 - as above
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            message = _message(error)
            if error.code in (_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _UNAVAILABLE):
                raise ConfigError(message) from None
            raise InvalidRequestError(message) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            msg = f"No Pagefold server answers at {self._url}: {reason}."
            raise ConfigError(msg, remedy=_NO_SERVER) from None
        if not isinstance(answer, dict) or answer.get("object") != "cache.warm":
            msg = f"What answers at {self._url} is no Pagefold server."
            raise ConfigError(msg, remedy=_NO_SERVER)
        return answer


def _progress(server: _Server, lines: list[WarmLine]) -> Iterator[dict[str, Any]]:
    """Warm one after another, so that later prompts find what earlier ones have in common with them."""
    from rich.console import Console  # noqa: PLC0415 - only here
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    console = Console(stderr=True)
    columns = (TextColumn("warming"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(lines))
        for line in lines:
            try:
                yield {"line": line.number, **server.warm(line.fields)}
            except InvalidRequestError as error:
                yield {"line": line.number, "error": str(error)}
            bar.advance(task)


def _message(error: urllib.error.HTTPError) -> str:
    """Return what the server says is wrong; or whoever answers in its place."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"The server answers {error.code} {error.reason}."


def _summary(warmed: list[dict[str, Any]]) -> str:
    num_tokens = sum(result["num_kept_tokens"] for result in warmed)
    num_found = sum(result["num_cached_tokens"] for result in warmed)
    num_pins = sum(result["pin"] is not None for result in warmed)
    return (
        f"warmed {len(warmed)} prompts: {num_tokens:,} tokens, of which {num_found:,} were cached already; "
        f"{num_pins} pinned"
    )
