"""``pagefold calibrate``: fit the scorer of a model, once, which says what older tokens masks keep."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from pagefold.cli.fail import fail
from pagefold.cli.models import progress_bar
from pagefold.cli.serve import check_installed, quiet_transformers
from pagefold.config import cache_dir
from pagefold.errors import ConfigError, PagefoldError
from pagefold.hub.catalog import resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.hub.progress import Progress
    from pagefold.masks.scorer_file import KeptScorer

__all__ = ["calibrate"]

_SHARES = (0.75, 0.5, 0.25)
"""Shares of older tokens whose thresholds are shown."""


def calibrate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A built-in name, a local folder, or a hub id org/name.")
    ] = "smollm2-135m",
    *,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8; if not given, the text that comes with Pagefold, and the last tenth of each default text of "
            "pagefold eval, fetched once.",
        ),
    ] = None,
    num_contexts: Annotated[int, typer.Option(help="Contexts of up to 2,048 tokens; every fourth is held out.")] = 6,
    threads: Annotated[int | None, typer.Option(help="Threads that compute; all cores if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Fit the scorer that says what older tokens of MODEL masks keep; it is kept in the cache folder."""
    try:
        check_installed()
        if threads is not None and threads < 1:
            msg = f"threads is {threads}."
            raise ConfigError(msg, remedy="Give at least 1, or leave it out for all cores.")
        with progress_bar() as progress:
            folder = resolve(model, cache_dir(), progress=progress)
            quiet_transformers(is_loaded=True)
            import torch  # noqa: PLC0415 - heavy, as what follows

            from pagefold.masks import calibration  # noqa: PLC0415

            if threads is not None:
                torch.set_num_threads(threads)
            texts = _texts(text, calibration.shipped_text, progress)
            kept = calibration.calibrate(folder, texts, num_contexts=num_contexts, progress=progress)
            file = calibration.scorer_path(folder)
    except PagefoldError as error:
        fail(error)
    _print(model, kept, file, as_json=as_json)


def _texts(file: Path | None, shipped: Callable[[], str], progress: Progress) -> list[str]:
    from pagefold.quality.reserved import for_calibrating  # noqa: PLC0415
    from pagefold.quality.texts import fetch_default_texts, read_text  # noqa: PLC0415

    if file is not None:
        return [read_text(file).content]
    reserved = for_calibrating(fetch_default_texts(cache_dir(), progress=progress))
    return [shipped(), *(text.content for text in reserved)]


def _print(model: str, kept: KeptScorer, file: Path, *, as_json: bool) -> None:
    thresholds = {share: float(kept.scorer.thresholds(share).max()) for share in _SHARES}
    if as_json:
        told = {
            "model": model,
            "file": str(file),
            "digest": kept.scorer.digest,
            **asdict(kept.found_on),
            "thresholds": {str(share): threshold for share, threshold in thresholds.items()},
        }
        typer.echo(json.dumps(told, indent=2))
        return
    found_on, (num_layers, num_kv_heads, _) = kept.found_on, kept.scorer.weights.shape
    mean, least, greatest = found_on.explained
    table = Table(title=f"scorer of {model}", show_header=False)
    table.add_row("KV heads", f"{num_kv_heads} in each of {num_layers} layers")
    table.add_row("fitted to", f"{found_on.num_tokens:,} tokens, in contexts of {found_on.context_len:,}")
    table.add_row(
        "explains, in contexts held out",
        f"{mean:.0%} of the variance; of single KV heads {least:.0%} to {greatest:.0%}",
    )
    for share, threshold in thresholds.items():
        table.add_row(f"threshold that keeps {share:.0%} of older tokens", f"{threshold:.2f}")
    table.add_row("digest", kept.scorer.digest)
    Console().print(table)
    typer.echo(f"kept in {file}")
