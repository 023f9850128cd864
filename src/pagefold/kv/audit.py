"""What always holds, as code. Called after every operation in tests, and by an idle engine.

Conservation: free + active + cached = total. References: a block's counts are what tables, transfers and pins
hold. Structure: the tree, the tables, the pins and the policy agree about every block.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pagefold.kv.block import BlockState
from pagefold.kv.tree import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.kv.block import Node
    from pagefold.kv.core import KVCore
    from pagefold.kv.plans import HostOps
    from pagefold.kv.tiers import HostTier

__all__ = ["AuditError", "audit"]


class AuditError(AssertionError):
    """An invariant does not hold: a bug of ours. Names what and where."""


def audit(core: KVCore) -> None:
    """Check every invariant of ``core``. O(blocks + table entries). Changes nothing.

    Raises:
        AuditError: with the first invariant that does not hold.
    """
    _audit_conservation(core)
    _audit_references(core)
    published = _audit_tree(core)
    for block in core.pool.blocks:
        _check(
            block.node is None or published.get(block.block_id) is block.node, f"{block}: its node is not in the tree"
        )
    _audit_tables(core)
    _audit_pins(core)
    _audit_policy(core)
    others = Counter(core.slow.pins())
    others.update(held.host_id for table in core.tables for held in table.cold)
    _audit_host(core.host, others)
    _check(core.slow.num_early <= core.slow.max_early, f"{core.slow.num_early} blocks are to be written at once")
    taken = [table.residual_id for table in core.tables if table.residual_id >= 0]
    _check(len(taken) == (len(core.tables) if core.residuals.is_on else 0), "a table has no residual, or needs none")
    every = sorted([*taken, *core.residuals.free_ids])
    _check(every == list(range(core.residuals.num_residuals)), f"residuals {every} are free or taken")
    num_cold = sum(len(table.cold) for table in core.tables)
    _check(num_cold == core.streaming.num_cold_blocks, f"{core.streaming.num_cold_blocks=}, {num_cold} are held")


def _check(holds: bool, what: str) -> None:  # noqa: FBT001 - the one thing it is about
    if not holds:
        raise AuditError(what)


def _audit_conservation(core: KVCore) -> None:
    pool = core.pool
    count = Counter(block.state for block in pool.blocks)
    _check([block.block_id for block in pool.blocks] == list(range(pool.num_blocks)), "a block is not at its place")
    _check(count[BlockState.CACHED] == pool.num_cached, f"{pool.num_cached=} but {count[BlockState.CACHED]} are")
    _check(len(set(pool.free_ids)) == len(pool.free_ids), "a block is in the free list twice")
    free = {block.block_id for block in pool.blocks if block.state == BlockState.FREE}
    _check(set(pool.free_ids) == free, f"free list and FREE states differ: {set(pool.free_ids) ^ free}")


def _audit_references(core: KVCore) -> None:
    tables = Counter(block_id for table in core.tables for block_id in table.block_ids[len(table.cold) :])
    copies = (*core.moves.pending_copies, *core.moves.copies_in_flight)
    transfers = Counter(block_id for copy in copies for block_id in (copy.src, copy.dst))
    for ops in _host_ops(core.host):
        transfers.update(load.block_id for load in ops.loads)
        transfers.update(store.block_id for store in ops.stores if store.is_live)
    pins = Counter(node.block.block_id for pin in core.pins for node in pin.path() if node.block is not None)
    for block in core.pool.blocks:
        _check(block.num_pin_refs == pins[block.block_id], f"{block}: {pins[block.block_id]} pins keep it")
        _check(block.num_table_refs == tables[block.block_id], f"{block}: {tables[block.block_id]} tables hold it")
        _check(block.num_io_refs == transfers[block.block_id], f"{block}: {transfers[block.block_id]} transfers use it")
        held = bool(block.num_table_refs or block.num_io_refs)
        if block.state == BlockState.FREE:
            _check(not held and block.node is None, f"{block}: free but held")
        elif block.state == BlockState.ACTIVE:
            _check(held, f"{block}: active but nobody holds it")
        elif block.state == BlockState.CACHED:
            _check(not block.num_table_refs and block.node is not None, f"{block}: cached but held or not published")
    for copy in core.moves.pending_copies:
        _check(core.pool.blocks[copy.dst].num_table_refs > 0, f"{copy}: for a block that no table holds")


def _audit_tree(core: KVCore) -> dict[int, Node]:
    published: dict[int, Node] = {}
    promised = _promised(core)
    for key, root in core.tree.roots.items():
        _check(root.key == key and root.parent is None and root.block is None, "a root is no root")
        _check(bool(root.children) and root.attached, "a root without children stays in the tree")
    for node in core.tree.nodes():
        block, parent = node.block, node.parent
        _check(block is not None and parent is not None, "a node without block or parent")
        assert block is not None
        assert parent is not None
        _check(parent.children.get(node.key) is node, f"{block}: its parent does not know it")
        _check(len(node.key) == core.block_size * TOKEN_BYTES, f"{block}: a key of {len(node.key)} bytes")
        _check(node.depth == parent.depth + 1, f"{block}: depth {node.depth} under {parent.depth}")
        _check(node.attached, f"{block}: in the tree but not attached")
        _check(block.node is node, f"{block}: published by two nodes, or not told")
        _check(block.block_id not in published, f"{block}: published twice")
        published[block.block_id] = node
        if block.num_table_refs and parent.block is not None:
            _check(parent.block.num_table_refs > 0, f"{block}: held, but not the block before it")
        _check(node.committed != (node in promised), f"{block}: committed is {node.committed}, against the promises")
        evictable = block.state == BlockState.CACHED
        evictable = evictable and not (node.children or block.num_io_refs or block.num_pin_refs)
        _check(node.evictable == evictable, f"{block}: evictable is {node.evictable}")
        _check(node.born_s <= node.used_s <= core.now_s, f"{block}: born at {node.born_s}, used at {node.used_s}")
    return published


def _promised(core: KVCore) -> set[Node]:
    """Return the nodes that open promises hold out."""
    promised: set[Node] = set()
    for table in core.tables:
        promise, end = table.promise, table.tail
        while promise is not None:
            _check(promise.table is table, "a table has another table's promise")
            if end is not None:  # else the cache was reset
                is_next = promise.end is end or end.parent is None  # a namespace's root may have come back
                _check(is_next, "a table's promise does not end where the next one begins")
                end = promise.tail
                promised.update(_nodes_between(promise.tail, promise.end))
            promise = promise.before
    return promised


def _nodes_between(head: Node, end: Node) -> Iterator[Node]:
    """Yield the nodes of a path behind ``head``, from ``end`` up."""
    node: Node | None = end
    while node is not None and node is not head:
        yield node
        node = node.parent


def _audit_tables(core: KVCore) -> None:
    for table in core.tables:
        ids = table.block_ids
        _check(len(set(ids)) == len(ids), f"a table holds a block twice: {ids}")
        _check(table.capacity == len(ids) * core.block_size, f"capacity {table.capacity} of {len(ids)} blocks")
        _check(table.num_published <= len(ids), "more published than held")
        path: list[int] = []
        node = table.tail
        while node is not None and node.block is not None:
            _check(node.attached, f"a table's path leads through block {node.block.block_id}, which left the tree")
            path.append(node.block.block_id)
            node = node.parent
        num_cold = len(table.cold)
        cold_ids = [core.pool.num_blocks + held.host_id for held in table.cold]
        _check(cold_ids == ids[:num_cold], f"cold blocks {cold_ids} are not the first of {ids}")
        _check(not table.streams or not table.num_published, "a table that streams has published blocks")
        _check(path[::-1] == ids[: table.num_published], f"path {path[::-1]} is not the table {ids}")
        for block_id in ids[max(num_cold, table.num_published) :]:
            _check(
                core.pool.blocks[block_id].node is None, f"block {block_id} is published but not by its table's path"
            )


def _audit_pins(core: KVCore) -> None:
    pins = core.pins
    tails = {pin.tail for pin in pins}
    _check(len(tails) == len(pins), "two pins have the same tail")
    for pin in pins:
        _check(all(node.attached and node.committed for node in pin.path()), f"{pin.pin_id} pins what is not there")
    num_blocks = sum(1 for block in core.pool.blocks if block.num_pin_refs)
    _check(num_blocks == pins.num_blocks <= pins.max_blocks, f"{pins.num_blocks=}, {num_blocks} are pinned")
    num_pinned = sum(1 for block in core.pool.blocks if block.num_pin_refs and block.state == BlockState.CACHED)
    _check(num_pinned == core.pool.num_pinned, f"{core.pool.num_pinned=} but {num_pinned} cached blocks are")


def _audit_policy(core: KVCore) -> None:
    candidates = {id(node) for node in core.policy.candidates()}
    evictable = {id(node) for node in core.tree.nodes() if node.evictable}
    _check(candidates == evictable, f"policy offers {len(candidates)} nodes, {len(evictable)} are evictable")
    victim = core.policy.victim()
    _check((victim is None) == (not candidates), "the policy finds no victim among its candidates")


def _host_ops(host: HostTier) -> list[HostOps]:
    return [host.pending, *host.in_flight]


def _audit_host(host: HostTier, others: Counter[int]) -> None:
    """Host blocks: each is free or holds one block, and is pinned once for all that reads, writes or waits for it."""
    held = list(host.held())
    ids = [one.host_id for one in held]
    free = host.free_ids()
    _check(sorted(ids + free) == list(range(host.num_blocks)), f"host blocks {sorted(ids)} in use, {sorted(free)} free")
    stores = Counter(store.host_id for ops in _host_ops(host) for store in ops.stores)
    loads = Counter(load.host_id for ops in _host_ops(host) for load in ops.loads)
    for one in held:
        num_pins = stores[one.host_id] + loads[one.host_id] + others[one.host_id]
        _check(one.num_pins == num_pins, f"host block {one.host_id}: {one.num_pins} pins, not {num_pins}")
        _check(one.num_pins > 0 or host.get(one.name.digest) is one, f"host block {one.host_id}: kept for nobody")
    for host_id, num in stores.items():
        _check(num == 1, f"host block {host_id} is written {num} times")
        _check(host_id in ids, f"host block {host_id} is to be written, and holds nothing")
    _check(host.num_held <= len(held), "blocks are held that have no place")
    for digest, one in host.unsaved.items():
        _check(host.get(digest) is one, f"host block {one.host_id}: to be written, and not held")
