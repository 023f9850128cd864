"""Logs: one handler on stderr, as text or JSON, each line with the id of the request it is about.

Modules log with the standard library, and give fields as ``extra``. Prompts, outputs and keys are never given.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from contextvars import ContextVar

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from pagefold.observe.line_handler import LineHandler

__all__ = ["current_request_id", "set_up_logs"]

current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)
"""The id of the HTTP request that is being answered, in its own task and what it starts."""

_PLAIN = re.compile(r"[\w.:/+@%-]+", re.ASCII)
_RESERVED = frozenset(RESERVED_ATTRS)


def set_up_logs(form: str, level: str) -> None:
    """Send all logs to stderr.

    Args:
        form: ``text``, or ``json`` for one object a line.
        level: of Pagefold's own logs: ``debug``, ``info``, ``warning`` or ``error``. Those of libraries begin at
            ``warning``, or at ``level`` where that is higher.
    """
    handler = LineHandler(getattr(sys.stderr.buffer, "raw", sys.stderr.buffer))
    handler.addFilter(_name_request)
    handler.setFormatter(_json_formatter() if form == "json" else _TextFormatter())
    own = logging.getLevelNamesMapping()[level.upper()]
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(own, logging.WARNING))
    logging.getLogger("pagefold").setLevel(own)


def _name_request(record: logging.LogRecord) -> bool:
    """Give a record the id of the request in whose task it was made, unless it has one; keep every record."""
    request_id = current_request_id.get()
    if request_id is not None and not hasattr(record, "request_id"):
        record.request_id = request_id
    return True


def _json_formatter() -> logging.Formatter:
    renamed = {"levelname": "level", "name": "logger"}
    return JsonFormatter("%(levelname)s %(name)s %(message)s", rename_fields=renamed, timestamp="time")


class _TextFormatter(logging.Formatter):
    """One line for people, with the fields behind it as ``name=value``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        fields = [(name, value) for name, value in vars(record).items() if name not in _RESERVED and value is not None]
        return " ".join((super().formatMessage(record), *(f"{name}={_shown(value)}" for name, value in fields)))


def _shown(value: object) -> str:
    """Write a value so that it is one word, and cannot be taken for a line or a field of its own."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
