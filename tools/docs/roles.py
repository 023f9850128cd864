"""Docstrings say ``:class:`~pagefold.kv.KVCore``` and ``::``; pages of Markdown show `KVCore` and a colon."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from griffe import Extension

if TYPE_CHECKING:
    from griffe import Object

__all__ = ["Roles"]

_ROLE = re.compile(r":(?:class|meth|func|mod|attr|data):`(?:~(?:\w+\.)*)?([\w.]+)`")


class Roles(Extension):
    """Rewrites docstrings as they are collected."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:  # noqa: ANN401, ARG002 - griffe's form
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
