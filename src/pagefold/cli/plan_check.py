"""``pagefold plan --check-log`` and ``--from-server``: what the planner says, beside what a server has found."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pagefold.plan import Device
    from pagefold.plan.log_check import LogCheck, LogRow
    from pagefold.plan.served import Served
    from pagefold.plan.start_log import StartLog

__all__ = ["check_server", "check_start"]

_LARGEST_LOG = 256 * 2**20
_TIMEOUT_S = 10.0
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


def check_start(
    file: Path, model: str | None, device: Device | None, weight_dtype: str = "auto", *, as_json: bool
) -> None:
    """Print what the planner says of a start beside what its log has.

    Raises:
        ConfigError: the file cannot be read, or is no such log.
    """
    from pagefold.plan.start_log import read_start_log  # noqa: PLC0415

    try:
        if file.stat().st_size > _LARGEST_LOG:
            msg = f"{file} is larger than a start's log: {file.stat().st_size:,} bytes."
            raise ConfigError(msg, remedy="Give the part from the start on until it is ready.")
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        msg = f"{file} cannot be read: {error.strerror}."
        raise ConfigError(msg, remedy="Name a file with what the server printed at its start.") from None
    check = _check(read_start_log(text, str(file)), model, device, weight_dtype)
    _print(check, {}, as_json=as_json)


def check_server(url: str, model: str | None, device: Device | None, *, as_json: bool) -> None:
    """Print what the planner says of a running server beside what it says itself.

    Raises:
        ConfigError: it does not answer, or has no such metrics.
    """
    served = _ask(url)
    check = _check(served.log, model, device, "auto")
    _print(check, served.now, as_json=as_json)


def _check(log: StartLog, model: str | None, device: Device | None, weight_dtype: str) -> LogCheck:
    from pagefold.plan import find_model  # noqa: PLC0415
    from pagefold.plan.log_check import check_log, named_model, settings_of  # noqa: PLC0415

    settings = settings_of(log)
    if weight_dtype != "auto":
        settings = replace(settings, weight_dtype=weight_dtype)
    shape = find_model(named_model(log, model))
    return check_log(log, shape, device if device is not None else _device_of(log), settings)


def _device_of(log: StartLog) -> Device:
    """Return the device of the table whose memory is nearest to what a log has, or one of so much memory."""
    from pagefold.plan import Device, device_names, find_device  # noqa: PLC0415
    from pagefold.plan.this_machine import this_cpu  # noqa: PLC0415

    if log.is_ours:
        return this_cpu()
    memory = log.sizes.get("memory")
    if memory is None:
        msg = "The log does not say how much memory the device has."
        raise ConfigError(msg, remedy="Name it: --device NAME, or --device-memory SIZE.")
    nearest = min(map(find_device, device_names()), key=lambda device: abs(device.memory_bytes - memory))
    if abs(nearest.memory_bytes - memory) <= _NEAR * memory:
        return nearest
    return Device(name=f"a device of {memory / 2**30:.2f} GiB", memory_bytes=memory, source="as logged")


def _ask(url: str) -> Served:
    import httpx  # noqa: PLC0415 - only here

    from pagefold.plan.served import read_served  # noqa: PLC0415

    base = url.rstrip("/").removesuffix("/v1")
    try:
        with httpx.Client(timeout=_TIMEOUT_S) as client:
            metrics = client.get(f"{base}/metrics")
            models, version = client.get(f"{base}/v1/models"), client.get(f"{base}/version")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        msg = f"{url} does not answer: {error}."
        raise ConfigError(msg, remedy="Name a running server, such as http://127.0.0.1:8000.") from None
    if metrics.status_code != httpx.codes.OK:
        msg = f"{base}/metrics answers {metrics.status_code}."
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


def _object(response: Any) -> dict[str, Any]:  # noqa: ANN401 - of a library that is imported where it is used
    try:
        answer = response.json()
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _first_model(response: Any) -> dict[str, Any]:  # noqa: ANN401 - as above
    data = _object(response).get("data")
    first = data[0] if isinstance(data, list) and data else None
    return first if isinstance(first, dict) else {}


def _print(check: LogCheck, now: Mapping[str, float], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(check.figures() | ({"now": dict(now)} if now else {}), indent=2))
        return
    console = Console()
    console.print(Text(f"{check.model} on {check.device}, {check.engine}", style="bold"))
    outcome = f"it failed: {check.failure}" if check.failure else "it runs"
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
