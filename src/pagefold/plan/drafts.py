"""Drafts: what whoever drafts takes of a machine's memory beside the model, as our own server has it on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import ConfigError
from pagefold.memory.capacity import DraftShare
from pagefold.plan.settings import PlanSettings
from pagefold.plan.tables import find_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.plan.memory import Memory
    from pagefold.plan.shape import ModelShape
    from pagefold.plan.tables import Device

__all__ = ["NO_DRAFTS", "Drafts", "plan_drafts"]

_LOGIT_BYTES = 4


class Drafts(NamedTuple):
    """What drafts take.

    Attributes:
        weight_bytes: of the draft model's weights; 0 without one.
        logit_bytes: of logits of drafts.
        share: of the KV budget, the draft model's; None without one.
    """

    weight_bytes: int = 0
    logit_bytes: int = 0
    share: DraftShare | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes beside the KV budget."""
        return self.weight_bytes + self.logit_bytes


NO_DRAFTS = Drafts()


def plan_drafts(
    shape: ModelShape,
    device: Device,
    settings: PlanSettings,
    longest: int,
    plan: Callable[[ModelShape, Device, PlanSettings], Memory],
) -> Drafts:
    """Return what the drafts that are asked for take.

    Args:
        shape: the model.
        device: what both run on.
        settings: of the model.
        longest: positions that it is served up to.
        plan: plans a model alone.

    Raises:
        ConfigError: that is not planned, or the draft model has too few positions.
        DoesNotFitError: the draft model does not even fit alone.
    """
    params = settings.speculative_config
    if params is None or params.is_off:
        return NO_DRAFTS
    if not (device.is_cpu and settings.engine_on(device).is_ours):
        msg = "speculative_config is planned for our own server on a CPU only."
        raise ConfigError(msg, remedy="Leave it out, or plan for --device cpu.")
    engine = settings.engine_on(device)
    num_tokens = settings.max_num_batched_tokens or engine.num_batched_tokens(device)
    most = params.most_in_a_step(num_tokens)
    logit_bytes = 2 * _LOGIT_BYTES * most * shape.vocab_size
    if params.model is None:
        return Drafts(0, logit_bytes)
    draft = find_model(params.model)
    if draft.max_positions < longest:
        msg = f"max_model_len is {longest}, and {draft.name}, the draft model, has {draft.max_positions} positions."
        raise ConfigError(msg, remedy=f"Give at most {draft.max_positions}, or another draft model.")
    alone = PlanSettings(
        dtype=settings.dtype,
        weight_dtype=params.quantization or "auto",
        block_size=settings.block_size,
        engine=settings.engine,
        max_model_len=longest,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
    (part,) = plan(draft, device, alone).devices
    logit_bytes += _LOGIT_BYTES * most * draft.vocab_size
    return Drafts(part.weights.likely, logit_bytes, DraftShare(part.shard.layout, params.kv_cache_memory_bytes))
