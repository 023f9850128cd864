"""Checking: a large body is read as JSON and checked in a process of its own, which holds up nobody.

A parser holds the interpreter until it has made all objects of a body, and bodies can be written of which that is
millions. So the server only gets what a checked request comes to, which is small or text; what is wrong with a body is
told as it would be told there.

A question is a line with the model's name and the number of bytes, and the bytes; an answer its length and a pickle.
"""

from __future__ import annotations

import importlib
import json
import pickle
import signal
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from pagefold.errors import InvalidRequestError
from pagefold.memory.native import give_back_memory
from pagefold.server.errors import Shown

if TYPE_CHECKING:
    from io import BufferedRWPair

__all__ = ["ANSWER_HEAD", "Answer", "check", "serve"]

ANSWER_HEAD = struct.Struct(">?Q")
"""Before an answer: whether the process ends now, because it has grown, and how long the answer is."""

_MAX_VALUES = 50_000
_WORN_BYTES = 160 * 2**20
_NUMBERS = (int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a body came to: one of these.

    Attributes:
        asked: the checked request.
        json_error: it is no JSON: what is wrong, and at which character.
        is_unreadable: it is no UTF-8, or nests without end.
        invalid: what pydantic says of the first field that is wrong.
        refused: what we say of it.
        fault: ours; a traceback.
    """

    asked: BaseModel | None = None
    json_error: tuple[str, int] | None = None
    is_unreadable: bool = False
    invalid: dict[str, Any] | None = None
    refused: InvalidRequestError | None = None
    fault: str | None = None


def check(model: type[BaseModel], body: bytes) -> Answer:
    """Read ``body`` as a ``model``."""
    try:
        fields = json.loads(body)
    except json.JSONDecodeError as error:
        return Answer(json_error=(error.msg, error.pos))
    except (ValueError, RecursionError):
        return Answer(is_unreadable=True)
    try:
        _refuse_if_many_values(fields)
        asked = model.model_validate(fields, from_attributes=True)  # as FastAPI does
    except InvalidRequestError as error:
        return Answer(refused=error)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return Answer(invalid={**first, "input": Shown.of(first["input"]), "ctx": {}})
    _forget_unknown(asked)
    return Answer(asked=asked)


def _refuse_if_many_values(fields: object) -> None:
    """Refuse a body of which the server would have to make very many objects. Numbers in lists are small."""
    num_values = 0
    todo = [fields]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            num_values += len(value)
            inner = [item for item in value.values() if type(item) not in _NUMBERS]
        elif isinstance(value, list):
            inner = [item for item in value if type(item) not in _NUMBERS]
            num_values += len(inner)
        else:
            continue
        if num_values > _MAX_VALUES:
            msg = f"The body holds more than {_MAX_VALUES:,} values, numbers in lists not counted."
            raise InvalidRequestError(msg, remedy="Send less in one request.")
        todo += (item for item in inner if type(item) is not str)


def _forget_unknown(asked: BaseModel) -> None:
    """Leave only the names of fields that nobody knows: they are told, and what they hold means nothing."""
    todo: list[object] = [asked]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += (item for item in value if isinstance(item, BaseModel))
        elif isinstance(value, BaseModel):
            extra = value.model_extra
            if extra:
                extra.update(dict.fromkeys(extra))
            todo += value.__dict__.values()


# The process itself.


def serve() -> None:
    """Be the process that checks, until nobody asks any more. It is called with a socket and a limit of memory."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the server; this ends with its socket
        signal.signal(number, signal.SIG_IGN)
    fileno, max_memory_bytes = map(int, sys.argv.pop().split(","))
    _limit_memory(max_memory_bytes)
    with socket.socket(fileno=fileno) as connection, connection.makefile("rwb") as stream:
        stream.write(b"\n")  # everything is imported: from here on, the time is the body's
        stream.flush()
        while line := stream.readline():
            name, num_bytes = line.split()
            body = stream.read(int(num_bytes))
            if len(body) < int(num_bytes):
                return
            if _tell(stream, _answer(name.decode(), body)):
                return
            del body
            give_back_memory()  # else it stays with this process, and there are two


def _answer(name: str, body: bytes) -> bytes:
    module, _, qualified = name.partition(":")
    model = getattr(importlib.import_module(module), qualified)
    try:
        return pickle.dumps(check(model, body), pickle.HIGHEST_PROTOCOL)
    except (MemoryError, RecursionError):
        msg = "The body takes more memory to read than there is."
        return pickle.dumps(Answer(refused=InvalidRequestError(msg, remedy="Send less in one request.")))
    except Exception:  # noqa: BLE001 - whoever asked is told
        import traceback  # noqa: PLC0415 - never needed

        return pickle.dumps(Answer(fault=traceback.format_exc()))


def _tell(stream: BufferedRWPair, answer: bytes) -> bool:
    """Send the answer; return whether this process has grown so much that a new one is better."""
    is_worn = _peak_bytes() > _WORN_BYTES
    stream.write(ANSWER_HEAD.pack(is_worn, len(answer)))
    stream.write(answer)
    stream.flush()
    return is_worn


def _peak_bytes() -> int:
    """Return the most memory that this process has had; ``getrusage`` counts what the server had when it started it."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:  # not on Linux
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def _limit_memory(max_bytes: int) -> None:
    try:
        import resource  # noqa: PLC0415 - not everywhere
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
