"""What ``pagefold eval`` found, as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import RenderableType

    from pagefold.quality.result import Evaluation, PositionBin, SettingResult
    from pagefold.quality.statistics import Estimate

__all__ = ["eval_tables"]


def eval_tables(evaluation: Evaluation, floors: Mapping[str, float]) -> Iterator[RenderableType]:
    """Yield what to print.

    Args:
        evaluation: what was found.
        floors: of each setting's top-1 agreement, by name.
    """
    exact = evaluation.exact_perplexity
    yield (
        f"{evaluation.model}: {evaluation.num_tokens:,} positions in {evaluation.num_contexts} contexts of "
        f"{evaluation.context_len:,} tokens of {evaluation.text}. "
        f"Exact cache: perplexity {exact.value:.3f}{_error(exact, 1, 3)}, "
        f"{evaluation.exact_bytes_per_token:,} bytes a token."
    )
    yield _costs(evaluation, floors)
    yield _by_position(evaluation)
    if any(setting.needles for setting in evaluation.settings):
        yield _needles(evaluation)
    if evaluation.num_contexts > 1:
        yield "± is one standard error, by resampling contexts."


def _costs(evaluation: Evaluation, floors: Mapping[str, float]) -> Table:
    table = Table("setting")
    for column in ("bytes", "perplexity", "KL divergence", "top-1", "same greedy tokens"):
        table.add_column(column, justify="right")
    for found in evaluation.settings:
        floor = floors[found.name]
        share = found.bytes_per_token / evaluation.exact_bytes_per_token
        kept = "" if not floor else f", {'over' if found.top1_agreement.value >= floor else 'UNDER'} {floor:.0%}"
        table.add_row(
            found.name,
            f"{share:.1%}",
            _percent(found.perplexity_change, signed=True, digits=3),
            f"{found.kl.value:.1e}{_error(found.kl, 1, None)}",
            _percent(found.top1_agreement) + kept,
            _greedy(found),
        )
    return table


def _greedy(found: SettingResult) -> str:
    greedy = found.greedy
    if greedy is None:
        return ""
    return f"{greedy.same_tokens.value:.1f} of {greedy.num_tokens}"


def _by_position(evaluation: Evaluation) -> Table:
    table = Table("position", title="perplexity, KL divergence, top-1 by position", title_justify="left")
    for found in evaluation.settings:
        table.add_column(found.name, justify="right")
    for place, part in enumerate(evaluation.settings[0].bins):
        cells = [_at(found.bins[place]) for found in evaluation.settings]
        table.add_row(f"{part.first:,} - {part.last - 1:,}", *cells)
    return table


def _at(part: PositionBin) -> str:
    return f"{part.perplexity_change.value:+.2%}  {part.kl.value:.1e}  {part.top1_agreement.value:.1%}"


def _needles(evaluation: Evaluation) -> Table:
    table = Table("needles found at depth")
    first = evaluation.settings[0]
    table.add_column("exact", justify="right")
    for found in evaluation.settings:
        table.add_column(found.name, justify="right")
    for place, needle in enumerate(first.needles):
        own = [f"{found.needles[place].num_found} of {needle.num_needles}" for found in evaluation.settings]
        table.add_row(f"{needle.depth:.0%}", f"{needle.num_found_exact} of {needle.num_needles}", *own)
    return table


def _percent(estimate: Estimate, *, signed: bool = False, digits: int = 2) -> str:
    value = 100 * estimate.value
    return f"{value:+.{digits}f}" * signed + f"{value:.{digits}f}" * (not signed) + _error(estimate, 100, digits) + " %"


def _error(estimate: Estimate, scale: float, digits: int | None) -> str:
    """Return the standard error behind a figure; with as many digits, or two of its own."""
    if estimate.standard_error is None:
        return ""
    error = scale * estimate.standard_error
    return f" ± {error:.1e}" if digits is None else f" ± {error:.{digits}f}"
