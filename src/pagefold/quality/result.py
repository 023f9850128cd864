"""What an evaluation found, as values that are written out as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagefold.config import TransportCodec
    from pagefold.quality.statistics import Estimate

__all__ = ["Evaluation", "GreedyResult", "NeedleResult", "PositionBin", "SettingResult"]


@dataclass(frozen=True, slots=True)
class PositionBin:
    """Figures of positions ``[first, last)`` of all contexts; a position's number is that of tokens before it.

    Attributes:
        first, last: of the positions.
        perplexity_change: as in ``SettingResult``, of these positions.
        kl: as there.
        top1_agreement: as there.
    """

    first: int
    last: int
    perplexity_change: Estimate
    kl: Estimate
    top1_agreement: Estimate


@dataclass(frozen=True, slots=True)
class GreedyResult:
    """How long greedy continuations stayed those of the exact cache.

    Attributes:
        num_tokens: of each continuation.
        same_tokens: how many of them came before the first difference, ``num_tokens`` where none did.
        num_texts: continuations.
        num_never_diverged: of which so many had no difference.
    """

    num_tokens: int
    same_tokens: Estimate
    num_texts: int
    num_never_diverged: int


@dataclass(frozen=True, slots=True)
class NeedleResult:
    """Needles at one depth.

    Attributes:
        depth: 0 at the begin of the text, 1 at its end.
        num_needles: so many were hidden there.
        num_found_exact: found with the exact cache.
        num_found: found under the setting.
    """

    depth: float
    num_needles: int
    num_found_exact: int
    num_found: int


@dataclass(frozen=True, slots=True)
class SettingResult:
    """What one setting costs against the exact cache.

    Attributes:
        name: of the setting.
        overrides: fields of the engine's config that make it.
        transport: how blocks were packed, as on their way to a pool.
        dtype: what the engine computed in.
        mask: names by what older tokens were kept, where a share was; else empty.
        num_tokens: positions that its figures are of, in all contexts: where a share of older tokens is kept only those
            that have any.
        bytes_per_token: of KV, scales included.
        perplexity: of the text under the setting.
        perplexity_change: relative, 0.01 for 1 % more.
        kl: mean divergence of next-token distributions, in nats.
        kl_99: 99 % of positions have a smaller one.
        kl_max: the largest.
        top1_agreement: share of positions where the likeliest token is that of the exact cache.
        bins: the same by position.
        greedy: of free-running greedy text; None if none was asked for.
        needles: by depth; empty if none were asked for.
    """

    name: str
    overrides: Mapping[str, Any]
    transport: TransportCodec
    dtype: str
    mask: str
    num_tokens: int
    bytes_per_token: int
    perplexity: float
    perplexity_change: Estimate
    kl: Estimate
    kl_99: float
    kl_max: float
    top1_agreement: Estimate
    bins: tuple[PositionBin, ...]
    greedy: GreedyResult | None
    needles: tuple[NeedleResult, ...]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model, a text, and several settings against the exact cache, in one run.

    Attributes:
        model: what the user called it.
        fingerprint: of its weights and config.
        text: names of the texts.
        text_digest: digest of those texts.
        context_len: tokens of each context.
        num_contexts: contexts.
        num_tokens: positions compared, of all contexts.
        exact_perplexity: of the text with the exact cache.
        exact_bytes_per_token: of its KV.
        settings: one each.
        date: of the run, ISO 8601, UTC.
        version: of Pagefold.
    """

    model: str
    fingerprint: str
    text: str
    text_digest: str
    context_len: int
    num_contexts: int
    num_tokens: int
    exact_perplexity: Estimate
    exact_bytes_per_token: int
    settings: tuple[SettingResult, ...]
    date: str
    version: str

    def as_dict(self) -> dict[str, Any]:
        """Return the evaluation as what JSON can hold."""
        return asdict(self)
