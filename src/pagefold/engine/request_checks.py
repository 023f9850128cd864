"""RequestChecks: refuses requests that this engine can never serve, or cannot keep pinned now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.engine.kinds import EXACT
from pagefold.engine.output_rules import refuse_without_tokenizer
from pagefold.errors import InvalidRequestError, PinQuotaError
from pagefold.sampling import MAX_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pagefold.engine.kinds import Kind
    from pagefold.engine.limits import ModelLimits
    from pagefold.engine.tenant_limits import TenantLimits
    from pagefold.memory.capacity import Capacity
    from pagefold.request import Caller, Request, WarmUp
    from pagefold.sampling import SamplingParams
    from pagefold.scheduler import Scheduler

__all__ = ["RequestChecks"]


class RequestChecks:
    """Says no, with the field at fault and what to do.

    Args:
        scheduler: with its core; how many run at once, and in which order.
        limits: of the model.
        capacity: what fits.
        tenants: what of that each tenant may have.
        has_tokenizer: whether the engine knows text.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        limits: ModelLimits,
        capacity: Capacity,
        tenants: TenantLimits,
        *,
        has_tokenizer: bool,
    ) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._capacity = capacity
        self._tenants = tenants
        self._has_tokenizer = has_tokenizer

    def check(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, caller: Caller) -> None:
        """Refuse what can never be served. Reads nothing that changes, so any thread may call it.

        Raises:
            InvalidRequestError: with the field at fault.
        """
        num_tokens = len(prompt_token_ids)
        self._check_length(num_tokens)
        self._check_cap(num_tokens, sampling, caller.tenant)
        self._check_ids(prompt_token_ids, "prompt")
        self._check_ids(sampling.stop_token_ids, "stop_token_ids")
        self._check_ids(sampling.logit_bias or (), "logit_bias")
        self._check_ids(sampling.allowed_token_ids or (), "allowed_token_ids")
        if sampling.min_tokens:
            self._check_min_tokens(num_tokens, sampling, self._tenants.most_tokens(caller.tenant))
        if not self._has_tokenizer:
            refuse_without_tokenizer(sampling)
        kind = self._limits.kind_of(caller)
        self._check_samples(num_tokens, sampling, kind, caller.tenant)
        policy = self._scheduler.policy
        if caller.priority and not policy.heeds_priority:
            msg = f"priority is {caller.priority}, but {policy.name} looks at none."
            raise InvalidRequestError(
                msg, param="priority", remedy="Leave it out, or start with scheduling_policy=priority."
            )
        if caller.warm_up is not None:
            self._check_warm_up(num_tokens, caller.warm_up)
        self._check_ids(caller.predicted, "prediction")

    def check_pin_quota(self, request: Request) -> None:
        """Refuse before it is computed what could not be pinned now. Others may be faster: then pinning fails.

        Raises:
            PinQuotaError: it asks for more than the quota leaves.
        """
        core = self._scheduler.core
        core.pins.expire(request.arrival_s)
        num_blocks = request.num_prompt_tokens // core.block_size
        packed, mask = request.packed(), request.mask
        known = core.match(request.namespace, packed, request.num_prompt_tokens, mask=mask).nodes
        num_new = core.pins.num_new_blocks(known, num_blocks, mask=mask)
        num_pinned = core.pins.num_blocks - core.pins.num_hinted(known)  # hints yield
        if num_pinned + num_new > core.pins.max_blocks:
            msg = (
                f"{num_pinned} of at most {core.pins.max_blocks} blocks are pinned, and this prompt would "
                f"pin {num_new} more."
            )
            raise PinQuotaError(
                msg, remedy="Take pins away, warm it without a pin, or start with a larger max_pinned_share."
            )

    def stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Return what ends the output. A grammar lets the end of sequence come only where an output may end."""
        stop_ids = frozenset(sampling.stop_token_ids)
        if sampling.ignore_eos and sampling.structured_outputs is None:
            return stop_ids
        return stop_ids.union(self._limits.eos_token_ids)

    def _check_length(self, num_tokens: int) -> None:
        """Refuse a prompt without tokens, or with too many."""
        max_len = self._capacity.max_model_len
        if not num_tokens:
            msg = "The prompt is empty."
            raise InvalidRequestError(msg, param="prompt", remedy="Send at least one token.")
        if num_tokens >= max_len:
            msg = f"The prompt has {num_tokens} tokens; max_model_len is {max_len}, and one must be left to generate."
            context = self._capacity.context
            if context.why:
                msg += f" Beyond that, {context.why}."
            remedy = context.or_without(f"Send at most {max_len - 1} tokens")
            raise InvalidRequestError(msg, param="prompt", remedy=remedy)

    def _check_cap(self, num_tokens: int, sampling: SamplingParams, tenant: str) -> None:
        """Refuse what does not fit below the cap of the caller's tenant."""
        kv_cap, most = self._tenants.kv_cap_of(tenant), self._tenants.most_tokens(tenant)
        wanted = max(1, sampling.max_tokens or 1)
        if kv_cap is None or num_tokens + wanted <= most or most == self._capacity.max_model_len:
            return
        msg = (
            f"The prompt has {num_tokens} tokens, and {wanted} more are to be generated; kv_cap is {kv_cap:g} of the "
            f"cache, {most} tokens."
        )
        if num_tokens >= most:
            raise InvalidRequestError(msg, param="prompt", remedy=f"Send at most {most - 1} tokens.")
        raise InvalidRequestError(msg, param="max_tokens", remedy=f"Ask for at most {most - num_tokens}.")

    def _check_ids(self, token_ids: Collection[int], param: str) -> None:
        """Refuse ids that are none of the vocabulary's."""
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if lowest < 0 or highest >= self._limits.vocab_size:
            bad = lowest if lowest < 0 else highest
            msg = f"Token id {bad} is not in the model's vocabulary."
            raise InvalidRequestError(msg, param=param, remedy=f"Ids go from 0 to {self._limits.vocab_size - 1}.")

    def _check_min_tokens(self, num_tokens: int, sampling: SamplingParams, most_tokens: int) -> None:
        """Refuse ``min_tokens`` that do not fit, or where every token that may come ends the output."""
        max_tokens = sampling.max_tokens
        if max_tokens is None:
            max_tokens = most_tokens - num_tokens
        if sampling.min_tokens > max_tokens:
            msg = f"min_tokens is {sampling.min_tokens}, and the output has at most {max_tokens} tokens."
            raise InvalidRequestError(msg, param="min_tokens", remedy=f"Ask for at most {max_tokens}.")
        stop_ids = self.stop_ids(sampling)
        if len(stop_ids) >= self._limits.vocab_size:
            msg = "Every token is a stop token, so none can come before min_tokens."
            raise InvalidRequestError(msg, param="stop_token_ids", remedy="Leave some out.")
        allowed = sampling.allowed_token_ids
        if allowed is not None and sampling.structured_outputs is None and stop_ids.issuperset(allowed):
            msg = "Every allowed token ends the output, so none can come before min_tokens."
            raise InvalidRequestError(msg, param="allowed_token_ids", remedy="Allow more, or leave min_tokens out.")

    def _check_samples(self, num_tokens: int, sampling: SamplingParams, kind: Kind, tenant: str) -> None:
        """Refuse more samples than sequences run at once, or several of a prompt that fills the device."""
        max_samples = self._scheduler.limits.max_num_seqs
        if sampling.num_samples > max_samples:
            param = "n" if sampling.n > max_samples else "best_of"
            msg = f"{param} is {getattr(sampling, param)}, but at most {max_samples} sequences run at once."
            remedy = f"Ask for at most {max_samples}, or start with a larger max_num_seqs."
            raise InvalidRequestError(msg, param=param, remedy=remedy)
        if sampling.use_beam_search:
            self._check_beams(num_tokens, sampling, kind, tenant)
        max_in_blocks = self._capacity.num_blocks * self._capacity.block_size
        if sampling.num_samples > 1 and num_tokens >= max_in_blocks:
            msg = (
                f"The prompt has {num_tokens} tokens; of more than the KV budget's {max_in_blocks} one sample is made."
            )
            raise InvalidRequestError(msg, param="n", remedy="Ask for one sample a request.")

    def _check_beams(self, num_tokens: int, sampling: SamplingParams, kind: Kind, tenant: str) -> None:
        """Refuse more beams than a step tells tokens for, or than fit if all part behind the prompt; and of a share.

        The whole blocks of the prompt are there once, of groups that keep all.
        """
        width, num_stop = sampling.num_samples, len(self.stop_ids(sampling))
        most = min(MAX_LOGPROBS, self._limits.vocab_size) - num_stop
        param = "n" if sampling.best_of is None else "best_of"
        if width > most:
            msg = f"{param} is {width}: with {num_stop} tokens that end an output, at most {max(0, most)} beams run."
            raise InvalidRequestError(msg, param=param, remedy="Ask for fewer beams, or for fewer stop_token_ids.")
        core = self._scheduler.core
        if kind.share < 1:
            msg = f"use_beam_search is set, and of older tokens a share of {kind.share} is kept ({kind.name!r})."
            remedy = "Leave it out, or start with kv_keep 1 among others."
            if any(offered.share == 1 for offered in self._limits.kinds):
                remedy = f"Leave it out, or ask for kv_quality {EXACT!r} (kv_keep 1.0)."
            raise InvalidRequestError(msg, param="use_beam_search", remedy=remedy)
        num_all = self._tenants.most_tokens(tenant)
        if sampling.max_tokens is not None:
            num_all = min(num_all, num_tokens + sampling.max_tokens)
        whole = core.num_blocks_for(num_all, self._scheduler.limits.max_num_batched_tokens, mask=kind.mask)
        num_shared = num_tokens // core.block_size * (core.num_groups - len(core.rules.of(kind.mask).trimmed))
        needed = width * whole - (width - 1) * num_shared
        most = self._tenants.most_blocks(tenant)
        if needed > most:
            whose = "the KV budget has" if most == self._capacity.num_blocks else "kv_cap and kv_floor of tenants leave"
            msg = f"{width} beams of {num_all} tokens take up to {needed} blocks, and {whose} {most}."
            raise InvalidRequestError(msg, param=param, remedy="Ask for fewer beams, or for a smaller max_tokens.")

    def _check_warm_up(self, num_tokens: int, warm_up: WarmUp) -> None:
        """Refuse a warm-up that leaves nothing, or more than may ever be pinned."""
        core = self._scheduler.core
        if not core.publishes:
            msg = "Prefix caching is off, so there is nothing to warm."
            raise InvalidRequestError(msg, param="prompt", remedy="Start with enable_prefix_caching.")
        num_blocks = num_tokens // core.block_size
        if not num_blocks:
            msg = f"The prompt has {num_tokens} tokens to keep, which do not fill a block of {core.block_size}."
            raise InvalidRequestError(msg, param="prompt", remedy="There is nothing to gain from warming it.")
        if warm_up.pin and num_blocks > core.pins.max_blocks:
            msg = f"The prompt fills {num_blocks} blocks, and at most {core.pins.max_blocks} may be pinned."
            raise PinQuotaError(msg, remedy="Warm it without a pin, or start with a larger max_pinned_share.")
