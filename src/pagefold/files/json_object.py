"""Reading a JSON object of a model folder, where one that is absent or damaged says as little as an empty one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_json_object"]


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object in ``file``; empty if there is no such file, or something else in it."""
    try:
        loaded = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
