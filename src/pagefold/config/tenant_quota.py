"""TenantQuota: which share of the device's blocks a tenant keeps, and which it may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pagefold.config.server_config import Account

__all__ = ["TenantQuota", "check_quotas", "quotas_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuota:
    """A tenant's quota of the blocks of the device.

    Attributes:
        tenant: its name.
        kv_floor: up to this share of all blocks its cached ones are not evicted for other tenants, 0 (none) to 1.
        kv_cap: it never has more than this share of all blocks, above 0; 1 for any number.
    """

    tenant: str
    kv_floor: float = 0.0
    kv_cap: float = 1.0


def quotas_of(accounts: Iterable[Account]) -> tuple[TenantQuota, ...]:
    """Return the quotas of those tenants that have one, by the accounts of a key file."""
    made: dict[str, TenantQuota] = {}
    for one in accounts:
        if one.kv_floor is not None or one.kv_cap is not None:
            cap = 1.0 if one.kv_cap is None else one.kv_cap
            made[one.tenant] = TenantQuota(tenant=one.tenant, kv_floor=one.kv_floor or 0.0, kv_cap=cap)
    return tuple(made.values())


def check_quotas(quotas: Sequence[TenantQuota]) -> None:
    """See that shares are shares, and go together.

    Raises:
        ConfigError: they do not; with the tenant and what can be.
    """
    for one in quotas:
        if not 0 <= one.kv_floor < 1:
            msg = f"Tenant {one.tenant} has kv_floor {one.kv_floor:g}."
            raise ConfigError(msg, remedy="It must be a share of the cache's blocks, at least 0 and below 1.")
        if not 0 < one.kv_cap <= 1:
            msg = f"Tenant {one.tenant} has kv_cap {one.kv_cap:g}."
            raise ConfigError(msg, remedy="It must be a share of the cache's blocks, above 0 and at most 1.")
        if one.kv_floor > one.kv_cap:
            msg = f"Tenant {one.tenant} has kv_floor {one.kv_floor:g}, and kv_cap {one.kv_cap:g}, which is less."
            raise ConfigError(msg, remedy="Give a floor of at most the cap.")
    names = [one.tenant for one in quotas]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        msg = f"Tenant {twice} has two quotas."
        raise ConfigError(msg, remedy="Give one for each tenant.")
    together = sum(one.kv_floor for one in quotas)
    if together >= 1:
        floors = ", ".join(f"{one.tenant} {one.kv_floor:g}" for one in quotas if one.kv_floor)
        msg = f"The kv_floor of all tenants together is {together:g} ({floors})."
        raise ConfigError(msg, remedy="It must be below 1: what runs needs blocks beside them.")
