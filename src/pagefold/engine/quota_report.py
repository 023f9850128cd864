"""What an engine tells about tenants' quotas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefold.engine.tenant_limits import TenantLimits
    from pagefold.kv import KVCore

__all__ = ["QuotaStatus", "report_quotas"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaStatus:
    """A tenant's quota, and what it has of the device's blocks now.

    Attributes:
        tenant: its name.
        num_blocks: all that it has, held or cached.
        num_cached: how many of them no request holds.
        floor_blocks: so many of these others cannot have evicted.
        cap_blocks: it never has more; None for any number.
    """

    tenant: str
    num_blocks: int
    num_cached: int
    floor_blocks: int
    cap_blocks: int | None


def report_quotas(core: KVCore, tenants: TenantLimits) -> tuple[QuotaStatus, ...]:
    """Return what there is to tell of all tenants with a quota, those too who have never come."""
    told: list[QuotaStatus] = []
    for tenant, quota in tenants.quotas().items():
        has = core.quotas.of(tenant)
        is_known = has.name == tenant
        told.append(
            QuotaStatus(
                tenant=tenant,
                num_blocks=has.num_blocks if is_known else 0,
                num_cached=has.num_cached if is_known else 0,
                floor_blocks=quota.floor_blocks,
                cap_blocks=quota.cap_blocks,
            )
        )
    return tuple(told)
