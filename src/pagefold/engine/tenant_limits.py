"""TenantLimits: tenants' quotas in blocks, and what a request of each may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.kv import KVQuota

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.config import TenantQuota
    from pagefold.engine.blueprint import Blueprint
    from pagefold.memory.capacity import Capacity

__all__ = ["TenantLimits", "check_fit", "check_layout"]


class TenantLimits:
    """What tenants may have of a cache.

    Args:
        quotas: of those tenants that have one.
        capacity: what fits.
    """

    def __init__(self, quotas: Sequence[TenantQuota], capacity: Capacity) -> None:
        self._capacity = capacity
        self._shares = {one.tenant: one for one in quotas}
        self._quotas: dict[str, KVQuota] = {}
        for one in quotas:
            cap = None if one.kv_cap == 1 else int(one.kv_cap * capacity.num_blocks)
            self._quotas[one.tenant] = KVQuota(int(one.kv_floor * capacity.num_blocks), cap)
        self.num_floor_blocks = sum(quota.floor_blocks for quota in self._quotas.values())

    def quota_of(self, tenant: str) -> KVQuota | None:
        """Return a tenant's quota; None for none."""
        return self._quotas.get(tenant)

    def quotas(self) -> dict[str, KVQuota]:
        """Return all quotas, by tenant."""
        return dict(self._quotas)

    def kv_cap_of(self, tenant: str) -> float | None:
        """Return the share of all blocks that a tenant may have; None for any."""
        quota = self._quotas.get(tenant)
        return None if quota is None or quota.cap_blocks is None else self._shares[tenant].kv_cap

    def most_tokens(self, tenant: str) -> int:
        """Return the longest prompt and output together that a tenant may ask for."""
        quota = self._quotas.get(tenant)
        if quota is None or quota.cap_blocks is None:
            return self._capacity.max_model_len
        return min(self._capacity.max_model_len, quota.cap_blocks * self._capacity.block_size)

    def most_blocks(self, tenant: str) -> int:
        """Return how many blocks a tenant can have at once, whatever others have cached."""
        quota = self._quotas.get(tenant) or KVQuota()
        left = self._capacity.num_blocks - self.num_floor_blocks + quota.floor_blocks
        return left if quota.cap_blocks is None else min(left, quota.cap_blocks)


def check_layout(blueprint: Blueprint) -> None:
    """See that quotas are known of such a cache: of one group of layers that keeps all tokens.

    Raises:
        ConfigError: they are not.
    """
    config, groups = blueprint.config, blueprint.geometry.groups
    if not config.kv_quotas:
        return
    named = f"Tenant {config.kv_quotas[0].tenant} has a kv_floor or kv_cap"
    for name, is_set in (("allow_streaming", config.allow_streaming), ("streaming_llm", config.streaming_llm)):
        if is_set:
            msg = f"{named}, and {name} is set: quotas are not known there yet."
            raise ConfigError(msg, remedy=f"Leave out {name}, or the quotas.")
    if config.kv_keep and any(share < 1 for share in config.kv_keep):
        msg = f"{named}, and kv_keep is set: quotas are not known of kept tokens yet."
        raise ConfigError(msg, remedy="Leave out kv_keep, or the quotas.")
    if len(groups) != 1 or groups[0].keeps.trims:
        msg = f"{named}, and {blueprint.spec.folder.name} has sliding windows, where quotas are not known yet."
        remedy = "Leave them out, or give a max_model_len that no window is shorter than."
        raise ConfigError(msg, remedy=remedy)


def check_fit(quotas: Sequence[TenantQuota], capacity: Capacity) -> None:
    """See that the largest request fits beside all floors, and that a cap holds any request at all.

    Raises:
        ConfigError: it does not; with what can be.
    """
    limits = TenantLimits(quotas, capacity)
    num_blocks, size = capacity.num_blocks, capacity.block_size
    for one in quotas:
        quota = limits.quota_of(one.tenant)
        if quota is not None and quota.cap_blocks is not None and quota.cap_blocks * size < 2:  # noqa: PLR2004
            msg = f"Tenant {one.tenant} has kv_cap {one.kv_cap:g}, which of {num_blocks} blocks holds no request."
            raise ConfigError(msg, remedy=f"Give at least {1 / num_blocks:.2g}, or a larger KV budget.")
    left = num_blocks - limits.num_floor_blocks
    if limits.num_floor_blocks and left < capacity.num_blocks_per_request:
        together = sum(one.kv_floor for one in quotas)
        most = max(0.0, (num_blocks - capacity.num_blocks_per_request) / num_blocks)
        msg = (
            f"The kv_floor of all tenants together is {together:g}, which leaves {left} of {num_blocks} blocks; one "
            f"request of max_model_len = {capacity.max_model_len} tokens needs {capacity.num_blocks_per_request}."
        )
        remedy = f"Give floors of at most {int(most * 100) / 100:g} together, "
        remedy += f"max_model_len={left * size}, " if left * size > 1 else ""
        raise ConfigError(msg, remedy=remedy + "or a larger KV budget.")
