"""What may be said of an answer, whatever was asked: nothing of our insides, and always in a form that clients read."""

from __future__ import annotations

import json
import re
from typing import Any

_MOST_ERROR_BYTES = 20_000


def complaint(status: int, content_type: str, text: str) -> str:
    """What is wrong with an answer; nothing, if nothing is."""
    if status >= 500:
        return f"a {status}: {text}"
    if re.search(r"Traceback \(most recent|site-packages", text):
        return f"our insides: {text}"
    if status >= 400:
        return _complaint_of_error(text)
    if content_type.startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return "".join(_complaint_of_json(event, is_event=True) for event in events if event != "[DONE]")
    return _complaint_of_json(text) if content_type.startswith("application/json") else ""


def _complaint_of_error(text: str) -> str:
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return f"an error in no form: {text}"
    if not error.get("message") or not error.get("type"):
        return f"an error that says nothing: {text}"
    return f"an error of {len(text)} bytes: {text}" if len(text) > _MOST_ERROR_BYTES else ""


def _complaint_of_json(text: str, *, is_event: bool = False) -> str:
    try:
        value: Any = json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        return f"no JSON ({error}): {text}"
    error = value.get("error") if is_event and isinstance(value, dict) else None
    if isinstance(error, dict) and error.get("type") in ("server_error", "service_unavailable_error", "timeout_error"):
        return f"a stream that failed: {text}"
    return ""


def _refuse(name: str) -> None:
    msg = f"{name} is no JSON"
    raise ValueError(msg)
