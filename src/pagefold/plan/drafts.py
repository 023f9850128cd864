"""Drafts: what whoever drafts takes of a machine's memory beside the model, as our own server has it on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import ConfigError
from pagefold.memory.capacity import NO_SHARE, DraftShare, check_room
from pagefold.plan.settings import PlanSettings
from pagefold.plan.tables import find_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.plan.parallel import Shard
    from pagefold.plan.shape import ModelShape
    from pagefold.plan.span import Span
    from pagefold.plan.tables import Device

__all__ = ["NO_DRAFTS", "Beside", "Drafts", "Part", "plan_drafts"]

_LOGIT_BYTES = 4


class Part(NamedTuple):
    """A model, or the part of it, on one device.

    Attributes:
        shard: that.
        weights: how much its weights may be.
    """

    shard: Shard
    weights: Span


class Beside(NamedTuple):
    """What the model is that drafts are for.

    Attributes:
        longest: positions that it is served up to.
        num_tokens: that one of its steps has at most.
    """

    longest: int
    num_tokens: int


class Drafts(NamedTuple):
    """What drafts take.

    Attributes:
        weight_bytes: of the draft model's weights; 0 without one.
        logit_bytes: of logits of drafts.
        share: of the KV budget, the draft model's.
    """

    weight_bytes: int = 0
    logit_bytes: int = 0
    share: DraftShare = NO_SHARE

    @property
    def num_bytes(self) -> int:
        """Bytes beside the KV budget."""
        return self.weight_bytes + self.logit_bytes


NO_DRAFTS = Drafts()


def plan_drafts(
    shape: ModelShape,
    device: Device,
    settings: PlanSettings,
    beside: Beside,
    only_part: Callable[[ModelShape, Device, PlanSettings], Part],
) -> Drafts:
    """Return what the drafts that are asked for take.

    Args:
        shape: the model.
        device: what both run on.
        settings: of the model.
        beside: what else of it there is to know.
        only_part: what a model is on one device.

    Raises:
        ConfigError: that is not planned, or the draft model has too few positions.
        DoesNotFitError: the draft model's weights do not even fit alone.
    """
    params = settings.speculative_config
    most = 0 if params is None else params.most_in_a_step(beside.num_tokens)
    if params is None or not most:
        return NO_DRAFTS
    if not (device.is_cpu and settings.engine_on(device).is_ours):
        msg = "speculative_config is planned for our own server on a CPU only."
        raise ConfigError(msg, remedy="Leave it out, or plan for --device cpu.")
    logit_bytes = 2 * _LOGIT_BYTES * most * shape.vocab_size
    if params.model is None:
        return Drafts(0, logit_bytes)
    draft = find_model(params.model)
    if draft.max_positions < beside.longest:
        is_asked = isinstance(settings.max_model_len, int)
        what = f"max_model_len is {beside.longest}" if is_asked else f"{shape.name} goes up to {beside.longest} tokens"
        msg = f"{what}, and {draft.name}, the draft model, has {draft.max_positions} positions."
        raise ConfigError(msg, remedy=f"Give at most {draft.max_positions}, or another draft model.")
    alone = PlanSettings(
        dtype=settings.dtype,
        weight_dtype=params.quantization or "auto",
        block_size=settings.block_size,
        engine=settings.engine,
        max_model_len=beside.longest,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
    part = only_part(draft, device, alone)
    weight_bytes = part.weights.likely
    logit_bytes += _LOGIT_BYTES * most * draft.vocab_size
    check_room(weight_bytes, device.memory_bytes - logit_bytes)
    return Drafts(weight_bytes, logit_bytes, DraftShare(part.shard.layout, params.kv_cache_memory_bytes))
