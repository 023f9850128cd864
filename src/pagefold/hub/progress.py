"""How the hub reports what it is doing: it calls a function and prints nothing itself."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Progress", "silent"]

# progress(what, done, total): what is being done, in words, and how far it is, in units of the caller's choice. A total
# of 0 says that the length is not known. `what` changes when another piece of work begins.
Progress = Callable[[str, int, int], None]


def silent(_what: str, _done: int, _total: int) -> None:
    """Report to no one."""
