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
from pagefold.cli.fit_scorer import fit_scorer
from pagefold.cli.models import progress_bar
from pagefold.cli.options import MODEL_HELP
from pagefold.cli.serve import check_installed, quiet_transformers
from pagefold.errors import ConfigError, PagefoldError

if TYPE_CHECKING:
    from pagefold.masks.scorer_file import KeptScorer

__all__ = ["calibrate"]

_SHARES = (0.75, 0.5, 0.25)
"""Shares of older tokens whose thresholds are shown."""


def calibrate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = "smollm2-135m",
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
            quiet_transformers(is_loaded=True)
            kept, file = fit_scorer(model, progress, text=text, num_contexts=num_contexts, threads=threads)
    except PagefoldError as error:
        fail(error)
    _print(model, kept, file, as_json=as_json)


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
