"""Warming: known prompts are computed before anybody sends them, by the scheduler, as requests are."""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pagefold.config import Account
from pagefold.errors import InvalidRequestError, PinQuotaError
from pagefold.request import Caller
from pagefold.sampling import SamplingParams
from pagefold.server.generation import Generation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagefold.config import ServerConfig
    from pagefold.engine.pins import PinReport, PinStatus
    from pagefold.server.served import Served
    from pagefold.server.warm_schemas import WarmRequest

__all__ = ["Warmer", "described", "tenants_of"]

_NOBODY = Account(key="")
_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Warmer:
    """Warms prompts one by one.

    Attributes:
        served: what they are warmed on.
        tenants: those whom a key file names, each with an account of it, whose terms are those of all.
    """

    served: Served
    tenants: Mapping[str, Account]

    async def warm(self, asked: WarmRequest) -> dict[str, Any]:
        """Cache the prompt, or the part of it that stays the same whatever follows; return what came of it.

        Raises:
            InvalidRequestError: it can never be warmed; with the field at fault.
            PinQuotaError: it may be cached now, but could not be pinned.
            EngineStoppedError, QueueFullError, RequestTimeoutError, StepFailedError: as for any request.
        """
        self._check_tenant(asked.tenant)
        prompt = await self.served.encode_prefix(asked)
        asks = asked.kv_keep is not None or asked.kv_quality is not None
        account = self.tenants.get(asked.tenant or "", _NOBODY)
        caller = Caller(
            tenant=asked.tenant or "",
            weight=1.0 if account.weight is None else account.weight,
            cache_salt=asked.cache_salt or "",
            warm_up=asked.warm_up(),
            kv_keep=asked.kv_keep if asks else account.kv_keep,
            kv_quality=asked.kv_quality or "",
            adapter=self.served.adapter_of(asked.model),
        )
        generation = Generation(
            self.served.client,
            request_id=f"warm-{uuid.uuid4().hex}",
            prompts=[prompt.token_ids],
            sampling=_SAMPLING,
            caller=caller,
            param="prompt" if asked.messages is None else "messages",
        )
        try:
            await generation.run()
        finally:
            generation.close()
        (pin_id,) = generation.request_ids
        told = {
            "id": pin_id,
            "object": "cache.warm",
            "num_prompt_tokens": prompt.num_tokens,
            "num_kept_tokens": len(prompt.token_ids),
            "num_cached_tokens": generation.outputs[0].num_cached_tokens,
        }
        nothing = {"pin": None, "cause": None}
        return told | (_outcome(await self.served.client.pins(), pin_id) if asked.pin else nothing)

    def _check_tenant(self, tenant: str | None) -> None:
        if tenant and tenant not in self.tenants:
            msg = f"There is no tenant {ascii(tenant)[:80]} here."
            remedy = "Name one of the key file." if self.tenants else "Leave it out: without a key file there is one."
            raise InvalidRequestError(msg, param="tenant", remedy=remedy)


def tenants_of(config: ServerConfig) -> dict[str, Account]:
    """Return the tenants whom the key file names, each with its last account there: all of them have the same terms."""
    return {account.tenant: account for account in config.accounts}


def described(pin: PinStatus) -> dict[str, Any]:
    """Return a pin as clients are told of it."""
    fields = asdict(pin)
    return {"id": fields.pop("pin_id"), "object": "cache.pin", **fields}


def _outcome(report: PinReport, pin_id: str) -> dict[str, Any]:
    """Say what became of a pin: it is there, or has gone already, which is no failure, or never was."""
    pin = next((described(pin) for pin in report.pins if pin.pin_id == pin_id), None)
    cause = next((gone.cause for gone in report.dropped if gone.pin_id == pin_id), None)
    if cause == "quota":
        msg = f"The prompt is cached, but not pinned: {report.num_blocks} of at most {report.max_blocks} blocks are."
        raise PinQuotaError(msg, remedy="Take pins away, or start with a larger max_pinned_share.")
    return {"pin": pin, "cause": cause}
