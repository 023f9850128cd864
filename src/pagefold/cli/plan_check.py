"""``pagefold plan --check-log`` and ``--from-server``: what the planner says, beside what a server has found."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagefold.cli.running_server import RunningServer
from pagefold.errors import ConfigError, PagefoldError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pagefold.plan import Device
    from pagefold.plan.log_check import LogCheck, LogRow
    from pagefold.plan.served import Served
    from pagefold.plan.served_curve import ServedCurve
    from pagefold.plan.start_log import StartLog

__all__ = ["Given", "check_server", "check_start"]

_LARGEST_LOG = 256 * 2**20
_LARGEST_ANSWER = 16 * 2**20
_TIMEOUT_S = 10.0
_NAME_DEVICE = "Name it: --device NAME, or --device-memory SIZE."
_NEAR = 0.02
"""By which share a device's memory may differ from that of a row of the table."""
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)?")
_NAMES = {
    "outside": "outside of torch",
    "graphs": "CUDA graphs",
    "kv": "KV",
    "num_tokens": "tokens",
    "num_blocks": "blocks",
    "concurrency": "requests at once",
}


@dataclass(frozen=True, slots=True)
class Given:
    """What a user gave beside a log or a server.

    Attributes:
        model: None for the one that it names.
        device: None for the one that its memory tells.
        settings: of the plan, by their fields; they go before what the start says.
    """

    model: str | None
    device: Device | None
    settings: Mapping[str, Any]


def check_start(file: Path, given: Given, *, as_json: bool) -> None:
    """Print what the planner says of a start beside what its log has.

    Raises:
        ConfigError: the file cannot be read, or is no such log.
    """
    from pagefold.plan.start_log import read_start_log  # noqa: PLC0415

    try:
        with file.open("rb") as opened:  # a pipe has no size
            read = opened.read(_LARGEST_LOG + 1)
    except OSError as error:
        msg = f"{file} cannot be read: {error.strerror}."
        raise ConfigError(msg, remedy="Name a file with what the server printed at its start.") from None
    if len(read) > _LARGEST_LOG:
        msg = f"{file} has more than {_LARGEST_LOG:,} bytes, and is no log of one start."
        raise ConfigError(msg, remedy="Give the part from the start on until it is ready.")
    log = read_start_log(read.decode("utf-8", errors="replace"), str(file))
    _print(_check(log, given), {}, None, as_json=as_json)


def check_server(url: str, key: str | None, given: Given, *, as_json: bool) -> None:
    """Print what the planner says of a running server beside what it says itself.

    And of one of ours, what it would find of its prompts with the KV that is planned.

    Raises:
        ConfigError: it does not answer, or has no such metrics.
    """
    served = _ask(url, key)
    check = _check(served.log, given)
    curve = _curve(url, key) if served.log.is_ours else None
    _print(check, served.now, curve, as_json=as_json)


def _curve(url: str, key: str | None) -> ServedCurve | None:
    """Return the hit curve of a server's prompts; None where it has none, which is told."""
    from pagefold.plan.served_curve import read_curve  # noqa: PLC0415

    try:
        return read_curve(RunningServer(url, key).ask("/v1/cache/whatif", "cache.whatif"), url)
    except PagefoldError as error:
        typer.echo(f"no hit curve: {error}", err=True)
        return None


def _check(log: StartLog, given: Given) -> LogCheck:
    from pagefold.cli.planned_model import planned_model  # noqa: PLC0415
    from pagefold.plan.log_check import check_log, named_model, settings_of  # noqa: PLC0415

    settings = settings_of(log, given.settings)
    shape = planned_model(named_model(log, given.model))
    return check_log(log, shape, given.device if given.device is not None else _device_of(log), settings)


def _device_of(log: StartLog) -> Device:
    """Return the only device of the table whose memory is what a log has, or one of so much memory.

    Raises:
        ConfigError: the log does not tell which device it is.
    """
    from pagefold.plan import Device, device_names, find_device  # noqa: PLC0415
    from pagefold.plan.this_machine import this_cpu  # noqa: PLC0415

    if "card" in log.options:
        msg = f"{log.name} is of a card, {log.options['card']}, and does not say how much memory it has."
        raise ConfigError(msg, remedy=_NAME_DEVICE)
    if log.is_ours:
        return this_cpu()
    memory = log.sizes.get("memory")
    if memory is None:
        msg = f"{log.name} does not say how much memory the device has."
        raise ConfigError(msg, remedy=_NAME_DEVICE)
    near = [each for each in map(find_device, device_names()) if abs(each.memory_bytes - memory) <= _NEAR * memory]
    if len(near) > 1:
        names = " and ".join(each.name for each in near)
        msg = f"{log.name} has a device of {memory / 2**30:.2f} GiB, and {names} have that."
        raise ConfigError(msg, remedy=f"Say which: --device {near[0].name}, say.")
    if near:
        return near[0]
    return Device(name=f"a device of {memory / 2**30:.2f} GiB", memory_bytes=memory, source="as logged")


def _ask(url: str, key: str | None) -> Served:
    import httpx  # noqa: PLC0415 - only here

    from pagefold.plan.served import read_served  # noqa: PLC0415

    base = url.rstrip("/").removesuffix("/v1")
    try:
        metrics, models, version = asyncio.run(_answers(base, key))
    except TimeoutError:
        msg = f"{url} did not answer in {_TIMEOUT_S:g} seconds."
        raise ConfigError(msg, remedy="Name a running server, and try again when it is less busy.") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        msg = f"{url} does not answer: {error}."
        raise ConfigError(msg, remedy="Name a running server, such as http://127.0.0.1:8000.") from None
    if metrics.status != httpx.codes.OK:
        msg = f"{base}/metrics answers {metrics.status}."
        raise ConfigError(msg, remedy="Name the server itself, not a proxy that hides its metrics.")
    first = _first_model(models)
    length = first.get("max_model_len")
    found = _VERSION.match(str(_object(version).get("version", "")))
    return read_served(
        metrics.text,
        url,
        model=str(first.get("root") or first.get("id") or ""),
        max_model_len=length if type(length) is int else None,
        version=found[0] if found is not None else "",
    )


class _Answer(NamedTuple):
    """What a route answers."""

    status: int
    text: str


async def _answers(base: str, key: str | None) -> list[_Answer]:
    """Return what a server answers, all within one time.

    Raises:
        ConfigError: an answer does not end.
        TimeoutError: it takes longer.
    """
    import httpx  # noqa: PLC0415 - only here

    answers = []
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with asyncio.timeout(_TIMEOUT_S), httpx.AsyncClient(timeout=_TIMEOUT_S, headers=headers) as client:
        for route in ("/metrics", "/v1/models", "/version"):
            read = bytearray()
            async with client.stream("GET", base + route) as response:
                async for part in response.aiter_bytes():
                    read += part
                    if len(read) > _LARGEST_ANSWER:
                        msg = f"{base}{route} answers with more than {_LARGEST_ANSWER:,} bytes."
                        raise ConfigError(msg, remedy="Name the server of a vLLM or of Pagefold.")
            answers.append(_Answer(response.status_code, read.decode("utf-8", errors="replace")))
    return answers


def _object(answer: _Answer) -> dict[str, Any]:
    try:
        found = json.loads(answer.text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _first_model(answer: _Answer) -> dict[str, Any]:
    data = _object(answer).get("data")
    first = data[0] if isinstance(data, list) and data else None
    return first if isinstance(first, dict) else {}


def _print(check: LogCheck, now: Mapping[str, float], curve: ServedCurve | None, *, as_json: bool) -> None:
    sizes = {} if curve is None else _kv_tokens(check, curve.blocks_per_place)
    if as_json:
        figures = check.figures() | ({"now": dict(now)} if now else {})
        if curve is not None:
            found = {name: {"num_tokens": size, "hit_ratio": curve.at(size)} for name, size in sizes.items()}
            figures["hit_curve"] = curve.figures() | found
        typer.echo(json.dumps(figures, indent=2))
        return
    console = Console()
    console.print(Text(f"{check.model} on {check.device}, {check.engine}", style="bold"))
    outcome = {"runs": "it runs", "unknown": "whether it runs is not said"}.get(check.outcome.state)
    if outcome is None:
        outcome = f"it failed: {check.outcome.failure}"
        outcome += "" if check.outcome.is_of_memory else ", for another reason than what is planned"
    console.print(f"The planner says that it {check.verdict}; {outcome}.")
    table = Table("what", "predicted", "logged", "ratio", "why they differ", box=None, pad_edge=False)
    for row in check.rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        table.add_row(_NAMES.get(row.what, row.what), _shown(row), _number(row, row.logged), ratio, row.cause)
    console.print(table)
    if check.max_concurrency is not None:
        console.print(f"planned: {check.max_concurrency:,.2f} requests of {check.max_model_len:,} tokens at once")
    for what, value in now.items():
        console.print(f"{what}: {value:,.3g}")
    if curve is not None:
        _print_curve(console, curve, sizes)


def _kv_tokens(check: LogCheck, blocks_per_place: int) -> dict[str, float]:
    """Return the tokens of KV that are planned, and those that there are, where both are known.

    A pool's block holds ``block_size`` tokens of one cache group alone: so many blocks are needed for them.
    """
    row = next((row for row in check.rows if row.what == "num_blocks"), None)
    if row is None:
        return {}
    size = check.settings.block_size
    pools = {"planned": row.likely, "now": row.logged}
    return {name: num_blocks // blocks_per_place * size for name, num_blocks in pools.items()}


def _print_curve(console: Console, curve: ServedCurve, sizes: Mapping[str, float]) -> None:
    """Print what a server's prompts would find."""
    whose = "all prompts" if curve.is_of_all else "your prompts, with the cache for them alone,"
    console.print(f"What {whose} of the last {curve.since_s:,.0f} s would find of their tokens, by LRU:")
    table = Table("KV tokens", "found", box=None, pad_edge=False)
    for point in curve.points:
        table.add_row(f"{point.num_tokens:,}", f"{point.hit_ratio:.1%}")
    console.print(table)
    for name, size in sizes.items():
        console.print(f"{name}: {size:,.0f} tokens of KV, with which at least {curve.at(size):.1%} are found")


def _shown(row: LogRow) -> str:
    from pagefold.plan.span import Span  # noqa: PLC0415

    shown = _number(row, row.likely)
    if isinstance(row.predicted, Span) and not row.predicted.is_exact:
        shown += f" ({row.predicted.low / 2**30:,.2f} to {row.predicted.high / 2**30:,.2f})"
    return shown


def _number(row: LogRow, value: float) -> str:
    if row.is_bytes:
        return f"{value / 2**30:,.2f} GiB"
    return f"{value:,.2f}" if row.what == "concurrency" else f"{value:,.0f}"
