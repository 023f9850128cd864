"""What tenants have that can be evicted, each in an order of its own, of which those are asked that may give a leaf.

Ranks of one policy say nothing beside those of another. So each tenant with a quota has a policy of its own, which
learns from its requests alone, and of the leaves that these name the one goes that was used least recently. To find it
takes one look at each tenant that may give one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.ordered import OrderedNodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pagefold.kv.block import Node
    from pagefold.kv.eviction import EvictionPolicy, RequestFacts
    from pagefold.kv.tenant_blocks import TenantBlocks

__all__ = ["TenantsNodes", "TenantsPolicy"]


def _tenant_of(node: Node) -> TenantBlocks:
    """Return whose a node is that the tree publishes."""
    block = node.blocks[0]
    assert block is not None, "its one group keeps all"
    return block.tenant


class TenantsNodes(OrderedNodes):
    """A set of nodes with keys, the first one among those that who asks can have.

    Args:
        givers: returns the tenants whose nodes who asks can have.
    """

    def __init__(self, givers: Callable[[], list[TenantBlocks]]) -> None:
        super().__init__()
        self._givers = givers
        self._of: dict[TenantBlocks, OrderedNodes] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __iter__(self) -> Iterator[Node]:
        for nodes in self._of.values():
            yield from nodes

    def __contains__(self, node: Node) -> bool:
        nodes = self._of.get(_tenant_of(node))
        return nodes is not None and node in nodes

    def add(self, node: Node, key: tuple[float, ...]) -> None:
        """See :class:`OrderedNodes`."""
        tenant = _tenant_of(node)
        if tenant not in self._of:
            self._of[tenant] = OrderedNodes()
        self._of[tenant].add(node, key)

    def remove(self, node: Node) -> None:
        """See :class:`OrderedNodes`."""
        self._of[_tenant_of(node)].remove(node)

    def first(self) -> Node | None:
        """See :class:`OrderedNodes`."""
        found = self._best()
        return None if found is None else found.first()

    def first_key(self) -> tuple[float, ...] | None:
        """See :class:`OrderedNodes`."""
        found = self._best()
        return None if found is None else found.first_key()

    def _best(self) -> OrderedNodes | None:
        best, least = None, None
        for tenant in self._givers():
            nodes = self._of.get(tenant)
            key = None if nodes is None else nodes.first_key()
            if key is not None and (least is None or key < least):
                best, least = nodes, key
        return best


class TenantsPolicy:
    """An eviction policy that has one for each tenant with a quota, and one for all others.

    Args:
        givers: returns the tenants whose nodes who asks can have.
        rest: all tenants without a quota.
        policy: theirs.
        make: makes one for a tenant with a quota.
    """

    def __init__(
        self,
        givers: Callable[[], list[TenantBlocks]],
        rest: TenantBlocks,
        policy: EvictionPolicy,
        make: Callable[[], EvictionPolicy],
    ) -> None:
        self._givers = givers
        self._make = make
        self._of = {rest: policy}

    def on_insert(self, node: Node) -> None:
        """Tell its tenant's."""
        self._at(node).on_insert(node)

    def on_hit(self, path: list[Node]) -> None:
        """Tell its tenant's."""
        self._at(path[0]).on_hit(path)

    def on_release(self, tail: Node, facts: RequestFacts) -> None:
        """Tell its tenant's."""
        self._at(tail).on_release(tail, facts)

    def on_evict(self, node: Node) -> None:
        """Tell its tenant's."""
        self._at(node).on_evict(node)

    def on_idle(self, node: Node) -> None:
        """Offer ``node`` to its tenant's."""
        self._at(node).on_idle(node)

    def on_busy(self, node: Node) -> None:
        """Withdraw ``node`` from its tenant's."""
        self._at(node).on_busy(node)

    def victim(self) -> Node | None:
        """Ask those of all tenants that may give a leaf to who asks: the least recently used of these goes."""
        best = None
        for tenant in self._givers():
            policy = self._of.get(tenant)
            node = None if policy is None else policy.victim()
            if node is not None and (best is None or (node.last_used, -node.depth) < (best.last_used, -best.depth)):
                best = node
        return best

    def score(self, node: Node) -> float:
        """Ask its tenant's."""
        return self._at(node).score(node)

    def candidates(self) -> Iterator[Node]:
        """Yield all evictable nodes, of whomever."""
        for policy in self._of.values():
            yield from policy.candidates()

    def _at(self, node: Node) -> EvictionPolicy:
        tenant = _tenant_of(node)
        policy = self._of.get(tenant)
        if policy is None:
            policy = self._of[tenant] = self._make()
        return policy
