"""``pagefold explain``: why a request found what it found in the cache of a running server, and what it waited for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from pagefold.cli.fail import fail
from pagefold.cli.running_server import RunningServer
from pagefold.config import environment_admin_key
from pagefold.errors import ConfigError, PagefoldError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["explain", "lines_of"]

_MOST = 100


def explain(  # noqa: PLR0913 - one parameter a flag
    request_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="Of a response, or of its header X-Request-Id.")
    ] = None,
    *,
    last: Annotated[int | None, typer.Option(min=1, max=_MOST, metavar="NUM", help="The last so many.")] = None,
    worst: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST, metavar="NUM", help="Those that computed most tokens which need not have been."),
    ] = None,
    advice: Annotated[
        bool, typer.Option("--advice", help="What cost most in the last hour, and what would help.")
    ] = False,
    url: Annotated[str, typer.Option(help="Of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="Whose requests: a client's key, or the admin's. Or $PAGEFOLD_ADMIN_API_KEY.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say why tokens of a request were computed though there is a cache, and what it waited for."""
    try:
        if sum(one is not None for one in (request_id, last, worst)) + advice > 1:
            msg = "ID, --last, --worst and --advice are four questions."
            raise ConfigError(msg, remedy="Ask one of them.")
        server = RunningServer(url, api_key or environment_admin_key())
        if advice:
            _tell_advice(server.ask("/v1/advice", "list"), as_json=as_json)
            return
        if request_id is not None:
            told = server.ask(f"/v1/explain/{quote(request_id, safe='')}", "explanation")
            explained = [told]
        else:
            query = f"worst={worst}" if worst is not None else f"last={last or 1}"
            told = server.ask(f"/v1/explain?{query}", "list")
            explained = told["data"]
    except PagefoldError as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    if not explained:
        typer.echo("No request has come yet.")
    for one in explained:
        for line in lines_of(one):
            typer.echo(line)
    reach = told["reach"]["complete_for_s"]
    if reach is not None:
        typer.echo(f"Causes are complete for the last {reach:,.0f} s; what was forgotten had gone before.")


def _tell_advice(told: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(told, indent=2))
        return
    num, num_tokens = told["num_requests"], told["computed_tokens"]
    if not num:
        typer.echo("No request has come in the last hour.")
        return
    since_s = f"{told['since_s']:,.0f} s"
    typer.echo(f"{num:,} request{'' if num == 1 else 's'} of the last {since_s}: {_tokens(num_tokens)} computed.")
    for one in told["data"]:
        whose = f"{one['tenant']}: " if one["tenant"] else ""
        typer.echo(f"  {whose}{_shown(one['told'])}")
        typer.echo(f"    {one['num_requests']:,} requests, {_tokens(one['tokens'])}. {one['remedy']}")
    if not told["data"]:
        typer.echo("  Nothing of that could be had from the cache.")


def lines_of(explained: dict[str, Any]) -> Iterator[str]:
    """Yield an explanation as lines for people."""
    refused = explained["refused"]
    if refused is not None:
        yield f"{explained['id']}: refused with {refused['status']}. {_shown(refused['message'])}"
    for request in explained["requests"]:
        yield from _request(request)


def _request(request: dict[str, Any]) -> Iterator[str]:
    head = f"{request['id']}: {_tokens(request['prompt_tokens'])} in the prompt"
    if not request["was_let_in"]:
        yield f"{head}, and it was never let in"
    else:
        tiers = request["cached_tokens_from_tiers"]
        found = f"{request['cached_tokens']:,} cached" + (f", {tiers:,} of them in tiers" if tiers else "")
        yield f"{head}: {found}; {request['computed_tokens']:,} computed{_times(request)}"
    for miss in request["misses"]:
        yield from _miss(miss)
    for miss in request["recomputed"]:
        yield from _miss(miss)
    for wait in request["waits"]:
        yield f"  waited {wait['ms']:,.1f} ms: {wait['told']}"
    for preemption in request["preemptions"]:
        whose = preemption["for"] or "another request"
        yield f"  gave its memory to {whose}, with {_tokens(preemption['tokens'])} computed: {preemption['told']}"


def _miss(miss: dict[str, Any]) -> Iterator[str]:
    first, last = miss["start"], miss["end"] - 1
    where = f"token {first:,}" if first == last else f"tokens {first:,} to {last:,}"
    what = [*miss["fields"], *([miss["detail"]] if miss["detail"] else [])]
    yield f"  {where} ({miss['cause']}): {miss['told']}{': ' + ', '.join(what) if what else ''}"
    difference, eviction = miss["difference"], miss["eviction"]
    if difference is not None:
        yield f"    token {difference['token']:,} differs from {difference['nearest']}"
        if difference["own_text"] is not None:
            yield f"      both   ...{_shown(difference['text_before'])}"
            yield f"      here   {_shown(difference['own_text'])}"
            yield f"      there  {_shown(difference['nearest_text'])}"
    if eviction is not None:
        yield f"    {_eviction(eviction)}"
    if miss["remedy"]:
        yield f"    {miss['remedy']}"


def _eviction(eviction: dict[str, Any]) -> str:
    score = "" if eviction["score"] is None else f" (score {eviction['score']:.4g})"
    by = "" if eviction["policy"] is None else f" by {eviction['policy']}{score}"
    whom = "" if eviction["for"] is None else f" for {eviction['for']}"
    return f"gone {eviction['ago_s']:,.1f} s before{by}{whom}"


def _times(request: dict[str, Any]) -> str:
    parts = [("first token after", request["ttft_s"]), ("ended after", request["e2e_s"])]
    told = [f"{what} {seconds:.3g} s" for what, seconds in parts if seconds is not None]
    return f"; {', '.join(told)}" if told else ""


def _tokens(num: int) -> str:
    return f"{num:,} token{'' if num == 1 else 's'}"


def _shown(text: str) -> str:
    """Return a text in one line, without what would move a cursor."""
    return json.dumps(text, ensure_ascii=False)[1:-1] if text.isprintable() else ascii(text)[1:-1]
