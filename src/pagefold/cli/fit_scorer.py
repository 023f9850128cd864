"""Fitting a scorer for those who ask for one, or whose server needs it: a model by its name, and the texts for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.config import cache_dir
from pagefold.hub.catalog import resolve

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pagefold.hub.progress import Progress
    from pagefold.masks.scorer_file import KeptScorer

__all__ = ["ensure_scorer", "fit_scorer"]


def fit_scorer(
    model: str,
    progress: Progress,
    *,
    text: Path | None = None,
    num_contexts: int | None = None,
    threads: int | None = None,
) -> tuple[KeptScorer, Path]:
    """Fit a model's scorer and keep it; return it, and where it is.

    Args:
        model: a built-in name, a local folder, or a hub id.
        progress: is told.
        text: a file, in UTF-8; None for the text that comes with Pagefold, and parts of the default texts of an
            evaluation.
        num_contexts: of up to 2,048 tokens; None for the default.
        threads: that compute; None for all cores.

    Raises:
        PagefoldError: the model or a text cannot be had, or the model cannot have masks.
    """
    folder = resolve(model, cache_dir(), progress=progress)
    import torch  # noqa: PLC0415 - heavy, as what follows

    from pagefold.masks import calibration  # noqa: PLC0415

    if threads is not None:
        torch.set_num_threads(threads)
    texts = _texts(text, calibration.shipped_text, progress)
    num_contexts = calibration.DEFAULT_NUM_CONTEXTS if num_contexts is None else num_contexts
    kept = calibration.calibrate(folder, texts, num_contexts=num_contexts, progress=progress)
    return kept, calibration.scorer_path(folder)


def ensure_scorer(model: str, progress: Progress, *, threads: int | None = None) -> KeptScorer:
    """Return a model's scorer, fitted if nobody has fitted it yet; arguments and errors as of :func:`fit_scorer`."""
    from pagefold.masks.calibration import kept_scorer  # noqa: PLC0415 - torch comes with it

    kept = kept_scorer(resolve(model, cache_dir(), progress=progress))
    return fit_scorer(model, progress, threads=threads)[0] if kept is None else kept


def _texts(file: Path | None, shipped: Callable[[], str], progress: Progress) -> list[str]:
    from pagefold.quality.reserved import for_calibrating  # noqa: PLC0415
    from pagefold.quality.texts import fetch_default_texts, read_text  # noqa: PLC0415

    if file is not None:
        return [read_text(file).content]
    reserved = for_calibrating(fetch_default_texts(cache_dir(), progress=progress))
    return [shipped(), *(text.content for text in reserved)]
