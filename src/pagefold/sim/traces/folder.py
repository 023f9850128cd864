"""Where real traces lie. They are not part of the project: it ships generators."""

from __future__ import annotations

from pathlib import Path

from pagefold.config import environment_traces

__all__ = ["traces_folder"]

_REPOSITORY = Path(__file__).parents[4]


def traces_folder() -> Path | None:
    """Return ``$PAGEFOLD_TRACES``, else ``../shared/traces`` beside the repository; None where there is no such folder.

    ``None`` is a reason to skip, visibly, what needs a real trace.
    """
    folder = environment_traces() or _REPOSITORY.parent / "shared" / "traces"
    return folder if folder.is_dir() else None
