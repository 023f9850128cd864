"""Reading traces: CSV with a header, JSON lines, and recordings of the server.

CSV has ``ContextTokens,GeneratedTokens`` as in the Azure LLM inference traces, or ``input_length``, ``output_length``.
JSON lines have ``input_length``, ``output_length``, ``timestamp`` in ms, and ``hash_ids`` as in Mooncake's: one id for
each 512 tokens of the prompt, the last one perhaps for fewer. What ``pagefold serve --record-trace`` wrote is told by
its first line.
"""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.errors import TraceError
from pagefold.sim.traces.read_recording import is_recording, read_recording
from pagefold.sim.traces.request import TOKENS_PER_ID, Trace, TraceRequest, request_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import TextIO

__all__ = ["read_trace"]

_PROMPT = ("input_length", "ContextTokens", "prompt_tokens", "input_tokens", "num_prefill_tokens", "Request tokens")
_OUTPUT = (
    "output_length",
    "GeneratedTokens",
    "completion_tokens",
    "output_tokens",
    "num_decode_tokens",
    "Response tokens",
)
_TIME = ("timestamp", "TIMESTAMP", "arrived_at", "Timestamp")
_SHOWN = 60


class _Row(NamedTuple):
    """A line of the file: its number, counted from 1, and its fields, or what is wrong with it."""

    line: int
    fields: Mapping[str, Any]
    wrong: str = ""


def read_trace(
    path: Path, *, skip_bad_lines: bool = False, max_requests: int | None = None, lengths_only: bool = False
) -> Trace:
    """Return the requests of a trace, in order of arrival, the first of them at 0 s.

    Args:
        path: the file.
        skip_bad_lines: count lines of which nothing can be made, instead of refusing the file.
        max_requests: read so many at most; None for all.
        lengths_only: lengths are all that is wanted: times may go backwards, and ids contradict lengths.

    Raises:
        TraceError: the file cannot be read, holds no requests, or a line is bad; says which, and what is wrong.
    """
    if is_recording(path):
        return read_recording(path).trace(max_requests)
    requests: list[TraceRequest] = []
    bad: list[str] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = _rows(file, path)
            for row in rows:
                try:
                    request = _request(row)
                    if not lengths_only:
                        _check(request, requests[-1] if requests else None)
                except ValueError as error:
                    wrong = f"Line {row.line} of the trace {path}: {error}."
                    if not skip_bad_lines:
                        raise TraceError(wrong, remedy=_remedy(row)) from None
                    bad.append(wrong)
                    continue
                requests.append(request)
                if max_requests is not None and len(requests) >= max_requests:
                    break
    except OSError as error:
        message = f"The trace {path} cannot be read: {error.strerror}."
        raise TraceError(message, remedy="Name a file that can be read.") from None
    except (UnicodeDecodeError, csv.Error):
        message = f"The trace {path} is no text, or no CSV."
        raise TraceError(message, remedy="Name a CSV file or a file of JSON lines.") from None
    if not requests:
        message = f"The trace {path} holds no requests." + (f" {bad[0]}" if bad else "")
        raise TraceError(message, remedy="Name a CSV file with a header, or a file of JSON lines.")
    began = min(request.arrival_s for request in requests)
    shifted = (replace(request, arrival_s=request.arrival_s - began) for request in requests)
    return Trace(path.name, tuple(shifted), len(bad), bad[0] if bad else "")


def _rows(file: TextIO, path: Path) -> Iterator[_Row]:
    if path.suffix in {".jsonl", ".json"}:
        return _json_rows(file)
    return _csv_rows(file)


def _json_rows(file: TextIO) -> Iterator[_Row]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            fields = None
        if isinstance(fields, dict):
            yield _Row(number, fields)
        else:
            yield _Row(number, {}, f"it is no JSON object: {line.strip()[:_SHOWN]!r}")


def _csv_rows(file: TextIO) -> Iterator[_Row]:
    reader = csv.DictReader(file)
    for fields in reader:
        yield _Row(reader.line_num, fields)


def _request(row: _Row) -> TraceRequest:
    """Return the request of a line.

    Raises:
        ValueError: nothing can be made of it.
    """
    if row.wrong:
        raise ValueError(row.wrong)
    fields = row.fields
    return request_of(
        _seconds(fields),
        _field(fields, _PROMPT),
        _field(fields, _OUTPUT),
        fields.get("hash_ids") or (),
        fields.get("tokens_per_id") or TOKENS_PER_ID,
    )


def _check(request: TraceRequest, before: TraceRequest | None) -> None:
    """Refuse times that go backwards, and ids that contradict the prompt's length.

    Raises:
        ValueError: it is so.
    """
    if before is not None and request.arrival_s < before.arrival_s:
        msg = f"time goes backwards, by {before.arrival_s - request.arrival_s:g} s"
        raise ValueError(msg)
    num_ids = len(request.prefix_ids)
    size = request.tokens_per_id
    if num_ids and num_ids != -(-request.prompt_tokens // size):
        msg = f"it has {num_ids} ids of {size} tokens, which contradicts its length of {request.prompt_tokens} tokens"
        raise ValueError(msg)


def _remedy(row: _Row) -> str:
    named = f"Lengths are named {_PROMPT[0]} and {_OUTPUT[0]}, or {_PROMPT[1]} and {_OUTPUT[1]}. "
    has_lengths = row.wrong or any(name in row.fields for name in _PROMPT)
    return ("" if has_lengths else named) + "Mend it, or skip bad lines (--skip-bad-lines)."


def _field(fields: Mapping[str, Any], names: tuple[str, ...]) -> Any:  # noqa: ANN401 - a cell of a file
    for name in names:
        if fields.get(name) is not None:
            return fields[name]
    shown = ", ".join(f"{name}={value!r}" for name, value in islice(fields.items(), 4))
    msg = f"it has no {names[0]}: {shown[:_SHOWN] or 'it is empty'}"
    raise ValueError(msg)


def _seconds(fields: Mapping[str, Any]) -> float:
    """Return when a request came: a number is milliseconds in JSON and seconds in CSV, a text may be a date."""
    for name in _TIME:
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, (int, float)):
            try:
                return value / 1000
            except OverflowError:
                msg = "its time is no number of milliseconds"
                raise ValueError(msg) from None
        text = str(value)
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            pass
        else:  # without a zone it is taken for UTC, which has no summer time
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        try:
            return float(text)
        except ValueError:
            msg = f"its time is {text[:_SHOWN]!r}"
            raise ValueError(msg) from None
    return 0.0
