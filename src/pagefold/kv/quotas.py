"""Quotas: of the device's blocks, how many a tenant keeps whoever asks, and how many it may have.

Tenants never share a block: their name is part of the namespace. So each block is one tenant's, from when it is
allocated for it until it is free, held or cached.

- Up to its *floor*, a tenant's cached blocks are not evicted for other tenants. What it does not use of that, others
  may use meanwhile. (Memory that is reserved beside memory that all share is as in A. Cidon et al., "Memshare: a
  dynamic multi-tenant key-value cache", USENIX ATC 2017, section 3.)
- Beyond its *cap*, a tenant gets no block: where it has so many, one of its own that is cached goes for the next.

Tenants without a quota are one here, which has neither.

It is known of caches of one group that keeps all: a leaf is one block there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.ordered import OrderedNodes
from pagefold.kv.tenant_blocks import KVQuota, TenantBlocks
from pagefold.kv.tenants_order import TenantsNodes, TenantsPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pagefold.kv.eviction import EvictionPolicy

__all__ = ["EVERYBODY", "NO_QUOTAS", "AnyQuotas", "Quotas"]

EVERYBODY = TenantBlocks("", KVQuota())
"""All tenants, where none has a quota. Nothing is counted of it."""


class AnyQuotas:
    """Quotas as they are where nobody has one: nothing is kept from anybody.

    Attributes:
        is_on: whether any tenant may have one.
    """

    is_on: bool = False

    @property
    def is_at_cap(self) -> bool:
        """Whether who asks for memory gets none but its own."""
        return False

    def arrived(self, tenant: str, quota: KVQuota | None) -> None:
        """A request of ``tenant`` has come."""

    def of(self, tenant: str) -> TenantBlocks:  # noqa: ARG002
        """Return what a tenant has."""
        return EVERYBODY

    def ask(self, tenant: TenantBlocks) -> None:
        """From now on ``tenant`` asks for memory."""

    def limit(self, num_available: int) -> int:
        """Return how many of the blocks that are free or can be evicted who asks can have."""
        return num_available

    def num_withheld_from(self, tenant: str) -> int:  # noqa: ARG002
        """Return how many of the blocks that could be evicted ``tenant`` cannot have."""
        return 0

    def num_withheld_without_pins(self, tenant: str) -> int:  # noqa: ARG002
        """Return how many of all cached blocks ``tenant`` cannot have, whatever pins are given up."""
        return 0

    def helps(self, tenant: str, other: str, num_new: int) -> bool:  # noqa: ARG002
        """Return whether ``tenant``, which lacks ``num_new`` blocks, can have what ``other`` gives up."""
        return True

    def unpinning_helps(self, tenant: str, other: TenantBlocks, num_new: int) -> bool:  # noqa: ARG002
        """Return whether ``tenant``, which lacks ``num_new`` blocks, can have what a pin of ``other`` keeps."""
        return True

    def nodes(self) -> OrderedNodes:
        """Return an empty set of evictable nodes, whose first one is such as who asks can have."""
        return OrderedNodes()

    def policy(self, policy: EvictionPolicy, make: Callable[[], EvictionPolicy]) -> EvictionPolicy:  # noqa: ARG002
        """Return what chooses among leaves that who asks can have.

        Args:
            policy: of those without a quota.
            make: makes one for a tenant that has one.
        """
        return policy


NO_QUOTAS = AnyQuotas()


class Quotas(AnyQuotas):
    """What tenants have, and who may have whose.

    Attributes:
        tenants: that have a quota, by name, since their first request.
        rest: all others.
        asker: for whom memory is asked.
        num_withheld: of all tenants.
    """

    is_on = True

    def __init__(self) -> None:
        self.rest = TenantBlocks("", KVQuota())
        self.tenants: dict[str, TenantBlocks] = {}
        self.asker = self.rest
        self.num_withheld = 0
        self._all = [self.rest]

    @property
    def is_at_cap(self) -> bool:
        """See :class:`AnyQuotas`."""
        return self.asker.num_blocks >= self.asker.cap_blocks

    def __iter__(self) -> Iterator[TenantBlocks]:
        """Yield all tenants, those without a quota as one, first."""
        return iter(self._all)

    def arrived(self, tenant: str, quota: KVQuota | None) -> None:
        """See :class:`AnyQuotas`. A tenant's quota is that of its first request."""
        if quota is not None and tenant not in self.tenants:
            self.tenants[tenant] = made = TenantBlocks(tenant, quota)
            self._all.append(made)

    def of(self, tenant: str) -> TenantBlocks:
        """See :class:`AnyQuotas`."""
        return self.tenants.get(tenant, self.rest)

    def ask(self, tenant: TenantBlocks) -> None:
        """See :class:`AnyQuotas`."""
        self.asker = tenant

    def limit(self, num_available: int) -> int:
        """See :class:`AnyQuotas`."""
        asker = self.asker
        return min(num_available - self.num_withheld + asker.num_withheld, asker.room)

    def num_withheld_from(self, tenant: str) -> int:
        """See :class:`AnyQuotas`."""
        return self.num_withheld - self.of(tenant).num_withheld

    def num_withheld_without_pins(self, tenant: str) -> int:
        """See :class:`AnyQuotas`."""
        own = self.of(tenant)
        return sum(other.withheld(other.num_cached) for other in self._all if other is not own)

    def helps(self, tenant: str, other: str, num_new: int) -> bool:
        """See :class:`AnyQuotas`. At its cap a tenant's own alone does; and nobody's who has no more than its floor."""
        own, giver = self.of(tenant), self.of(other)
        return giver is own or (own.room >= num_new and giver.num_above_floor > 0)

    def unpinning_helps(self, tenant: str, other: TenantBlocks, num_new: int) -> bool:
        """See :class:`AnyQuotas`."""
        own = self.of(tenant)
        if other is own:
            return True
        return own.room >= num_new and other.num_cached - other.num_pinned < other.num_above_floor

    def nodes(self) -> OrderedNodes:
        """See :class:`AnyQuotas`."""
        return TenantsNodes(self.givers)

    def policy(self, policy: EvictionPolicy, make: Callable[[], EvictionPolicy]) -> EvictionPolicy:
        """See :class:`AnyQuotas`."""
        return TenantsPolicy(self.givers, self.rest, policy, make)

    def givers(self) -> list[TenantBlocks]:
        """Return the tenants of which a leaf may go for who asks."""
        asker = self.asker
        if asker.num_blocks >= asker.cap_blocks:
            return [asker]
        return [one for one in self._all if one is asker or one.num_blocks > one.floor_blocks]

    def count(self, tenant: TenantBlocks, num_blocks: int, num_cached: int, num_pinned: int) -> None:
        """Note that a tenant has so many blocks more, of which so many are cached, and so many pinned of these."""
        tenant.num_blocks += num_blocks
        tenant.num_cached += num_cached
        tenant.num_pinned += num_pinned
        if tenant.floor_blocks:
            num_withheld = tenant.withheld(tenant.num_cached - tenant.num_pinned)
            self.num_withheld += num_withheld - tenant.num_withheld
            tenant.num_withheld = num_withheld
