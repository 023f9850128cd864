"""Traces: requests that somebody recorded, with their lengths and, where it is known, what they share.

Read are CSV with a header (``ContextTokens,GeneratedTokens`` as in the Azure LLM inference traces, or ``input_length``,
``output_length``) and JSON lines (``input_length``, ``output_length``, ``timestamp`` in ms, ``hash_ids`` as in
Mooncake's).
"""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from pagefold.errors import ConfigError
from pagefold.plan.workload import MAX_TOKENS, Lengths, Workload, spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["TraceRequest", "read_trace", "request_of", "trace_workload", "workload_of"]

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

_MAX_REQUESTS = 200_000
_MAX_LENGTHS = 2048
_TOKENS_PER_ID = 512
"""In Mooncake's traces."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request.

    Attributes:
        arrival_s: seconds after the first one.
        prompt_tokens, output_tokens: its lengths.
        prefix_ids: a chain of ids, one for so many tokens of the prompt: equal ids mean equal prompts up to there.
        tokens_per_id: tokens that an id stands for.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    tokens_per_id: int = _TOKENS_PER_ID


def read_trace(path: Path) -> list[TraceRequest]:
    """Return the requests of a trace, in its order; at most 200,000.

    Raises:
        ConfigError: the file cannot be read, or a line has no lengths; says which.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = _json_rows(file, path) if path.suffix in {".jsonl", ".json"} else iter(csv.DictReader(file))
            requests = [_request(row, number, path) for number, row in enumerate(islice(rows, _MAX_REQUESTS), start=1)]
    except OSError as error:
        message = f"The trace {path} cannot be read: {error.strerror}."
        raise ConfigError(message, remedy="Name a file that can be read.") from None
    except (UnicodeDecodeError, csv.Error):
        message = f"The trace {path} is no text, or no CSV."
        raise ConfigError(message, remedy="Name a CSV file or a file of JSON lines.") from None
    if not requests:
        message = f"The trace {path} holds no requests."
        raise ConfigError(message, remedy="Name a CSV file with a header, or a file of JSON lines.")
    began = min(request.arrival_s for request in requests)
    return [
        TraceRequest(r.arrival_s - began, r.prompt_tokens, r.output_tokens, r.prefix_ids, r.tokens_per_id)
        for r in requests
    ]


def _json_rows(file: Iterator[str], path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            message = f"Line {number} of the trace {path} is no JSON object."
            raise ConfigError(message, remedy="Each line is an object with input_length and output_length.")
        yield row


def _request(row: Mapping[str, Any], number: int, path: Path) -> TraceRequest:
    try:
        return request_of(
            _seconds(row),
            _field(row, _PROMPT),
            _field(row, _OUTPUT),
            row.get("hash_ids") or (),
            row.get("tokens_per_id") or _TOKENS_PER_ID,
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        message = f"Request {number} of the trace {path} has no lengths, or absurd ones: {str(dict(row))[:80]}"
        raise ConfigError(
            message, remedy=f"Name them {_PROMPT[0]} and {_OUTPUT[0]}, or {_PROMPT[1]} and {_OUTPUT[1]}."
        ) from None


def request_of(arrival_s: Any, prompt: Any, output: Any, ids: Any, tokens_per_id: Any) -> TraceRequest:  # noqa: ANN401
    """Return a request of what a file says; one without an output still has a step.

    Raises:
        TypeError, ValueError, OverflowError: it says what is no number, or none that a request can have.
    """
    num_prompt, num_output, size = int(prompt), int(output), int(tokens_per_id)
    if not (1 <= num_prompt <= MAX_TOKENS and 0 <= num_output <= MAX_TOKENS and size >= 1):
        raise ValueError(num_prompt, num_output, size)
    if not math.isfinite(arrival_s):
        raise ValueError(arrival_s)
    return TraceRequest(arrival_s, num_prompt, max(1, num_output), tuple(int(each) for each in ids), size)


def _field(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:  # noqa: ANN401 - a cell of a file
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise KeyError(names[0])


def _seconds(row: Mapping[str, Any]) -> float:
    for name in _TIME:
        value = row.get(name)
        if value is None:
            continue
        if isinstance(value, (int, float)):
            return value / 1000
        try:
            return datetime.fromisoformat(str(value)[:26]).timestamp()
        except ValueError:
            return float(value)
    return 0.0


def trace_workload(path: Path) -> Workload:
    """Return a trace's workload: its lengths (all, or so many that means are quick) and the beginning it shares.

    Raises:
        ConfigError: the file cannot be read.
    """
    requests = read_trace(path)
    return workload_of(requests, f"{path.name}: {len(requests):,} requests")


def workload_of(requests: Sequence[TraceRequest], name: str) -> Workload:
    """Return the workload of recorded requests, one at least: their lengths, and the beginning that most share."""
    lengths = spread((Lengths(request.prompt_tokens, request.output_tokens) for request in requests), _MAX_LENGTHS)
    shared, share = common_prefix(requests)
    shared = min(shared, max(each.prompt for each in lengths) - 1)
    name += f", {share:.0%} of which begin with the same {shared:,} tokens" if shared else ""
    return Workload(name=name, lengths=lengths, prefix_len=shared, prefix_share=share if shared else 1.0)


def common_prefix(requests: Sequence[TraceRequest]) -> tuple[int, float]:
    """Return (tokens, share of requests) of the beginning that spares the most when shared; (0, 0) without any."""
    counts: dict[tuple[int, int], list[int]] = {}
    for request in requests:
        for depth, each in enumerate(request.prefix_ids, start=1):
            counts.setdefault((depth, each), []).append(request.tokens_per_id)
    best, share = 0, 0.0
    for (depth, _), sizes in counts.items():
        tokens = depth * min(sizes)
        if len(sizes) > 1 and tokens * len(sizes) > best * share * len(requests):
            best, share = tokens, len(sizes) / len(requests)
    return best, share
