"""An evaluation as a picture, by matplotlib: the only file of this package that needs it."""

from __future__ import annotations

from importlib.util import find_spec
from io import BytesIO
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

    from pagefold.quality.result import Evaluation, PositionBin
    from pagefold.quality.statistics import Estimate

__all__ = ["ensure_matplotlib", "evaluation_png"]

_WIDTH, _HEIGHT, _DPI = 12.0, 6.4, 110


def ensure_matplotlib() -> None:
    """Return if a picture can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        msg = "To draw a PNG, matplotlib must be installed."
        raise ConfigError(msg, remedy='pip install "pagefold[sim]", or take --json.')


def evaluation_png(evaluation: Evaluation) -> bytes:
    """Return a PNG: top-1 agreement, KL divergence and perplexity change by position, and needles by depth.

    Bars are standard errors. The same evaluation makes the same bytes.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    ensure_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    contexts = f"{evaluation.num_contexts} contexts of {evaluation.context_len:,} tokens"
    figure.suptitle(f"{evaluation.model}: against the exact cache, {contexts} ({evaluation.text})", fontsize=10)
    axes = figure.subplots(2, 2)
    _by_position(axes[0][0], evaluation, "Top-1 agreement", "%", lambda part: part.top1_agreement, 100)
    _by_position(axes[0][1], evaluation, "KL divergence", "nats", lambda part: part.kl, 1)
    _by_position(axes[1][0], evaluation, "Change of perplexity", "%", lambda part: part.perplexity_change, 100)
    _needles(axes[1][1], evaluation)
    out = BytesIO()
    figure.savefig(out, format="png", metadata={"Software": "pagefold"})
    return out.getvalue()


def _by_position(  # noqa: PLR0913, PLR0917 - a drawing
    axis: Axes, evaluation: Evaluation, title: str, unit: str, of: Callable[[PositionBin], Estimate], scale: float
) -> None:
    for setting in evaluation.settings:
        middles = [(part.first + part.last) / 2 for part in setting.bins]
        estimates = [of(part) for part in setting.bins]
        errors = [scale * (estimate.standard_error or 0.0) for estimate in estimates]
        values = [scale * estimate.value for estimate in estimates]
        axis.errorbar(middles, values, yerr=errors, marker="o", markersize=3, capsize=2, label=setting.name)
    _name(axis, title, "position", unit)


def _needles(axis: Axes, evaluation: Evaluation) -> None:
    for setting in evaluation.settings:
        shares = [100 * needle.num_found / needle.num_needles for needle in setting.needles]
        axis.plot([needle.depth for needle in setting.needles], shares, marker="o", label=setting.name)
    exact = evaluation.settings[0].needles
    shares = [100 * needle.num_found_exact / needle.num_needles for needle in exact]
    axis.plot([needle.depth for needle in exact], shares, color="gray", linestyle="--", label="exact")
    axis.set_ylim(-5, 105)
    _name(axis, "Needles found", "depth", "%")


def _name(axis: Axes, title: str, x_label: str, y_label: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(x_label, fontsize=8)
    axis.set_ylabel(y_label, fontsize=8)
    axis.legend(fontsize=7)
