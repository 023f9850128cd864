"""Files of prompts to warm: JSON lines, each an object with the fields of ``POST /v1/cache/warm``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from pagefold.server.warm_schemas import WarmRequest

__all__ = ["WarmLine", "read_warm_file", "warm_request_of"]


class WarmLine(NamedTuple):
    """A prompt of a file.

    Attributes:
        number: of the line, from 1 on.
        fields: what it says.
    """

    number: int
    fields: dict[str, Any]


def read_warm_file(path: str) -> list[WarmLine]:
    """Return the prompts of a file; empty lines are passed over.

    Raises:
        ConfigError: it cannot be read, holds no prompts, or a line of it is no JSON object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        msg = f"{path} cannot be read: {reason}."
        raise ConfigError(msg, remedy="Give a file with a JSON object a line.") from None
    lines = [_parsed(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        msg = f"{path} holds no prompts."
        raise ConfigError(msg, remedy="Give a file with a JSON object a line.")
    return lines


def warm_request_of(fields: dict[str, Any], where: str) -> WarmRequest:
    """Return what fields ask for, as ``POST /v1/cache/warm`` would take it.

    Args:
        fields: as they were read.
        where: from where, for people; a sentence begins with it.

    Raises:
        ConfigError: they ask for nothing that can be.
    """
    from pydantic import ValidationError  # noqa: PLC0415 - only here

    from pagefold.server.warm_schemas import WarmRequest  # noqa: PLC0415 - imports fastapi

    try:
        return WarmRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        msg = f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}."
        raise ConfigError(msg) from None
    except InvalidRequestError as error:
        msg = f"{where}: {error}"
        raise ConfigError(msg) from None


def _parsed(path: str, number: int, line: str) -> WarmLine:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = "it nests too deep" if isinstance(error, RecursionError) else "it holds a number of too many digits"
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg} at column {error.colno}"
        msg = f"Line {number} of {path} is not valid JSON: {reason}."
        raise ConfigError(msg, remedy='A line looks like {"prompt": "You are ...", "pin": true}.') from None
    if not isinstance(fields, dict):
        msg = f"Line {number} of {path} is no JSON object."
        raise ConfigError(msg, remedy='A line looks like {"prompt": "You are ...", "pin": true}.')
    return WarmLine(number, fields)
