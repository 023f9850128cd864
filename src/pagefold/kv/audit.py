"""What always holds, as code. Called after every operation in tests, and by an idle engine.

Conservation: free + active + cached = total. References: a block's counts are what tables, transfers and pins
hold. Structure: the tree, the tables, the pins and the policy agree about every block.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pagefold.kv.block import NOBODY, BlockState
from pagefold.kv.quotas import Quotas
from pagefold.kv.tree import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.kv.block import Block, BlockId, Node
    from pagefold.kv.core import KVCore
    from pagefold.kv.host_tier import HostTier
    from pagefold.kv.ops import HostOps
    from pagefold.kv.sequence_cache import SequenceCache

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
    gone = [chunk for chunk in core.blocks.idle_chunks if chunk.node is None or not chunk.node.attached]
    _check(not gone, f"{len(gone)} packed chunks may go, and nobody publishes them")
    _audit_tables(core)
    _audit_landmarks(core)
    _audit_alone(core)
    _audit_lacking(core)
    _audit_pins(core)
    _audit_quotas(core)
    _audit_policy(core)
    _audit_expectations(core)
    others = Counter(core.slow.pins())
    others.update(held.host_id for cache in core.caches for held in cache.cold)
    _audit_host(core.host, others)
    _audit_host_chunks(core)
    num_early = core.slow.writes.num_early
    _check(num_early <= core.slow.writes.max_early, f"{num_early} blocks are to be written at once")
    taken = [cache.residual_id for cache in core.caches if cache.residual_id >= 0]
    _check(len(taken) == (len(core.caches) if core.residuals.is_on else 0), "a cache has no residual, or needs none")
    every = sorted([*taken, *core.residuals.free_ids])
    _check(every == list(range(core.residuals.num_residuals)), f"residuals {every} are free or taken")
    num_cold = sum(len(cache.cold) for cache in core.caches)
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
    tables = Counter(block_id for cache in core.caches for block_id in _device_ids(cache))
    copies = (*core.moves.pending_copies, *core.moves.copies_in_flight)
    transfers = Counter(block_id for copy in copies for block_id in (copy.src, copy.dst))
    for ops in _host_ops(core.host):
        transfers.update(load.block_id for load in ops.loads)
        transfers.update(store.block_id for store in ops.stores if store.is_live)
    pins = Counter(block.block_id for pin in core.pins for block in pin.blocks)
    for block in core.pool.blocks:
        _check(block.num_pin_refs == pins[block.block_id], f"{block}: {pins[block.block_id]} pins keep it")
        _check(block.num_table_refs == tables[block.block_id], f"{block}: {tables[block.block_id]} tables hold it")
        _check(block.num_io_refs == transfers[block.block_id], f"{block}: {transfers[block.block_id]} transfers use it")
        held = bool(block.num_table_refs or block.num_io_refs)
        if block.state == BlockState.FREE:
            _check(not held and block.node is None and block.packed_by is None, f"{block}: free but held")
        elif block.state == BlockState.ACTIVE:
            _check(held, f"{block}: active but nobody holds it")
        elif block.state == BlockState.CACHED:
            _check(not block.num_table_refs and block.node is not None, f"{block}: cached but held or not published")
    num_packed = Counter(block.packed_by for block in core.pool.blocks if block.packed_by is not None)
    _check(num_packed == core.pool.num_packed, f"{core.pool.num_packed=}, and blocks say {num_packed}")
    for copy in core.moves.pending_copies:
        _check(core.pool.blocks[copy.dst].num_table_refs > 0, f"{copy}: for a block that no table holds")


def _audit_tree(core: KVCore) -> dict[int, Node]:
    published: dict[int, Node] = {}
    promised = _promised(core)
    for key, root in core.tree.roots.items():
        _check(root.key == key and root.parent is None and not root.blocks, "a root is no root")
        _check(bool(root.children) and root.attached, "a root without children stays in the tree")
    for node in core.tree.nodes():
        parent = node.parent
        assert parent is not None, "a root is no child"
        where = f"the node of blocks {node.blocks}"
        _check(len(node.blocks) == len(core.rules), f"{where}: for {len(core.rules)} groups")
        _check(parent.children.get(node.key) is node, f"{where}: its parent does not know it")
        _check(len(node.key) == core.block_size * TOKEN_BYTES, f"{where}: a key of {len(node.key)} bytes")
        _check(node.depth == parent.depth + 1, f"{where}: depth {node.depth} under {parent.depth}")
        _check(node.attached, f"{where}: in the tree but not attached")
        _check(bool(node.children) or not node.is_bare, f"{where}: a leaf without blocks")
        _check(node.committed != (node in promised), f"{where}: committed is {node.committed}, against the promises")
        evictable = not node.children
        for group, block in enumerate(node.blocks):
            if block is None:
                _check(_may_go(core, node, group), f"{where}: none of group {group}, which keeps what is there")
                continue
            _check(block.node is node and block.group == group, f"{block}: published by two nodes, or not told")
            _check(block.block_id not in published, f"{block}: published twice")
            published[block.block_id] = node
            above = parent.blocks[group] if parent.blocks else None
            if block.num_table_refs and above is not None and not _may_go(core, node, group):
                _check(above.num_table_refs > 0, f"{block}: held, but not the block before it")
            evictable = evictable and _is_idle(block)
        evictable = _audit_packed(core, node, published) and evictable
        _check(node.evictable == evictable, f"{where}: evictable is {node.evictable}")
        _check(node.born_s <= node.used_s <= core.now_s, f"{where}: born at {node.born_s}, used at {node.used_s}")
    return published


def _audit_packed(core: KVCore, node: Node, published: dict[int, Node]) -> bool:
    """Check what a node has of a packed chunk. Return whether its blocks are idle."""
    rule = core.rules.of(node.root.mask).packing
    where, end = f"the node of blocks {node.blocks}", (node.depth + 1) * core.block_size
    packed = node.packed
    if packed is None:
        return True
    _check(rule is not None and end % (rule.window or 1) == 0, f"{where}: packed, and ends no chunk")
    _check(packed.node is node, f"{where}: what is packed there is told of another node")
    for block in packed.blocks:
        _check(block.node is node and block.group == len(core.rules), f"{block}: packed, and not told so")
        _check(block.packed_by == node.root.mask, f"{block}: packed by mask {block.packed_by}, and not told so")
        _check(block.block_id not in published, f"{block}: published twice")
        published[block.block_id] = node
    idle = all(_is_idle(block) for block in packed.blocks)
    may_go = packed in core.blocks.idle_chunks
    _check(may_go == (idle and bool(packed.blocks)), f"{where}: what is packed may go is {may_go}")
    return idle


def _may_go(core: KVCore, node: Node, group: int) -> bool:
    """Whether a node may be there without its block of a group: the group leaves tokens behind, and no sinks there."""
    rules = core.rules.of(node.root.mask)
    return rules[group].trims and not rules.is_sink(node.depth, group)


def _promised(core: KVCore) -> set[Node]:
    """Return the nodes that open promises hold out."""
    promised: set[Node] = set()
    for cache in core.caches:
        promise, end = cache.promise, cache.tail
        while promise is not None:
            _check(promise.cache is cache, "a cache has another cache's promise")
            if end is not None:  # else the cache was reset
                is_next = promise.end is end or end.parent is None  # a namespace's root may have come back
                _check(is_next, "a cache's promise does not end where the next one begins")
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
    for cache in core.caches:
        every = list(cache.all_block_ids())
        _check(len(set(every)) == len(every), f"a cache holds a block twice: {every}")
        path: list[Node] = []
        node = cache.tail
        while node is not None and node.blocks:
            _check(node.attached, f"a cache's path leads through {node.blocks}, which left the tree")
            path.append(node)
            node = node.parent
        path.reverse()
        cold_ids = [core.pool.num_blocks + held.host_id for held in cache.cold]
        _check(cold_ids == every[: len(cold_ids)], f"cold blocks {cold_ids} are not the first of {every}")
        _check(not cache.streams or not cache.num_published, "a cache that streams has published blocks")
        _check(len(path) == cache.num_published, f"{cache.num_published=}, and the path has {len(path)} nodes")
        if cache.tail is not None:
            _check(cache.tail.root.mask == cache.mask, "a cache keeps others than its path")
            _audit_ends(core, cache)
        _audit_chunks(core, cache, path)
        for group, table in enumerate(cache.tables):
            _audit_table(core, cache, path, group)
            _check(cache.capacity == table.end * core.block_size, f"capacity {cache.capacity} of {table.end} blocks")


def _audit_chunks(core: KVCore, cache: SequenceCache, path: list[Node]) -> None:
    """A cache's packed chunks are those of its path, as far as that is published, and it has the others whole."""
    rules = core.rules.of(cache.mask)
    rule = rules.packing
    if rule is None:
        _check(not cache.chunks and not cache.granted, "a cache has packed chunks, and none of its groups packs")
        return
    num_blocks = rule.chunk_blocks(core.block_size)
    for at, chunk in enumerate(cache.chunks):
        place = (at + 1) * num_blocks - 1
        if place < len(path) and chunk.node is not None:
            _check(path[place].packed is chunk, f"chunk {at} of a cache is not that of its path")
        else:  # a fork may have published it
            _check(chunk.node is None or chunk.node.attached, f"chunk {at} of a cache is nowhere")
        of_mask = all(block.packed_by == cache.mask for block in chunk.blocks)
        _check(of_mask, f"chunk {at} of a cache was kept by another mask than the cache's, {cache.mask}")
        is_told = all((block.node is None) == (chunk.node is None) for block in chunk.blocks)
        _check(is_told, f"chunk {at} of a cache is published, or blocks of it alone are")
    num_packed = sum(len(chunk.blocks) for chunk in cache.chunks)
    _check(cache.num_packed_blocks == num_packed, f"{cache.num_packed_blocks=}, and its chunks fill {num_packed}")
    first = min(table.num_trimmed for table, one in zip(cache.tables, rules, strict=True) if one.packs)
    _check(first <= len(cache.chunks) * num_blocks, f"{first} blocks are gone, of {len(cache.chunks)} packed chunks")


def _audit_ends(core: KVCore, cache: SequenceCache) -> None:
    """Whoever goes on behind what a cache has published finds there what each group keeps."""
    num_blocks = max(cache.num_published, cache.num_begun)  # what was loaded is published later
    rules = core.rules.of(cache.mask)
    for group, (table, rule) in enumerate(zip(cache.tables, rules, strict=True)):
        first = rule.first_block(num_blocks, core.block_size) if rule.trims else table.num_trimmed
        what = f"group {group} begins at {table.num_trimmed}, and who goes on behind {num_blocks} needs block {first}"
        _check(table.num_trimmed <= first, what)


def _audit_table(core: KVCore, cache: SequenceCache, path: list[Node], group: int) -> None:
    table, rule = cache.tables[group], core.rules.of(cache.mask)[group]
    ids, first = table.block_ids, table.num_trimmed
    _check(not first or rule.trims, f"group {group} keeps all, and {first} blocks are gone")
    num_sink_blocks = rule.num_sink_blocks(core.block_size)
    _check(not first or first > num_sink_blocks, f"{first} blocks are gone, of which {num_sink_blocks} hold sinks")
    num_apart = num_sink_blocks if first else 0
    _check(len(table.sink_ids) == num_apart, f"sinks in blocks {table.sink_ids}, and {first} blocks are gone")
    for node, held_id in zip(path, table.sink_ids, strict=False):
        mine = core.pool.blocks[held_id]
        _check(node.blocks[group] is mine, f"sinks are in {mine}, which is not of the path {node.blocks}")
    for held_id in table.sink_ids[len(path) :]:
        _check(core.pool.blocks[held_id].node is None, f"block {held_id} is published but not by its cache's path")
    path_ids: list[int | None] = []
    for node, held_id in zip(path[first:], ids, strict=False):
        block = node.blocks[group]
        if rule.trims and core.pool.blocks[held_id].node is None:
            path_ids.append(held_id)  # it was loaded, and the node has not got it yet, or has got another one
        else:
            path_ids.append(None if block is None else block.block_id)
    _check(path_ids == ids[: max(0, len(path) - first)], f"path {path_ids} is not the table {ids}")
    for block_id in ids[max(len(cache.cold), len(path_ids)) :]:
        _check(core.pool.blocks[block_id].node is None, f"block {block_id} is published but not by its cache's path")


def _device_ids(cache: SequenceCache) -> list[BlockId]:
    return list(cache.all_block_ids())[len(cache.cold) :]


def _is_idle(block: Block) -> bool:
    return block.state == BlockState.CACHED and not block.num_io_refs and not block.num_pin_refs


def _audit_lacking(core: KVCore) -> None:
    """What is to be given to nodes is being loaded: else the block's next content would be."""
    loaded = {load.block_id for ops in _host_ops(core.host) for load in ops.loads}
    _check(loaded.issuperset(core.moves.lacking), f"of {set(core.moves.lacking)} nodes lack, {loaded} are being loaded")


def _audit_alone(core: KVCore) -> None:
    """Of groups that leave tokens behind, each cached block but of sinks is evictable, once, as landmarks say."""
    windows = core.blocks.windows
    alone = windows.all()
    _check(len(set(alone)) == len(alone), "a block is both stale and not")
    cached = [(block, block.node) for block in core.pool.blocks if _is_idle(block)]
    idle = {
        block
        for block, node in cached
        if node is not None and block.group < len(core.rules) and _may_go(core, node, block.group)
    }
    _check(set(alone) == idle, f"{len(alone)} blocks can be evicted alone, and {len(idle)} are idle")
    _check(not windows.misplaced(), f"{windows.misplaced()} are not where landmarks say")


def _audit_landmarks(core: KVCore) -> None:
    """A landmark keeps blocks of its own path, which are there, and they know it."""
    landmarks = core.blocks.windows.landmarks
    for landmark in landmarks:
        node = landmark.node
        _check(node.attached and node.committed and landmarks.at(node) is landmark, "a landmark is nowhere")
        path, rules = set(_nodes_between(node.root, node)), core.rules.of(node.root.mask)
        for block in landmark.blocks:
            _check(block.node in path, f"{block}: kept by a landmark of another path")
            _check(rules[block.group].trims, f"{block}: kept by a landmark, and its group keeps all")
            _check(landmark in landmarks.keepers(block), f"{block}: does not know the landmark that keeps it")
        for group in rules.trimmed:
            num_kept = sum(block.group == group for block in landmark.blocks)
            num_needed = node.depth + 1 - rules[group].first_block(node.depth + 1, core.block_size)
            _check(num_kept >= num_needed, f"a landmark keeps {num_kept} of {num_needed} blocks of group {group}")
    kept = {block for landmark in landmarks for block in landmark.blocks}
    for block in core.pool.blocks:
        _check(landmarks.keeps(block) == (block in kept), f"{block}: kept by a landmark that is none")


def _audit_pins(core: KVCore) -> None:
    pins = core.pins
    tails = {pin.tail for pin in pins}
    _check(len(tails) == len(pins), "two pins have the same tail")
    for pin in pins:
        _check(all(node.attached and node.committed for node in pin.path()), f"{pin.pin_id} pins what is not there")
        path = set(pin.path())
        _check(all(block.node in path for block in pin.blocks), f"{pin.pin_id} pins blocks of another path")
    num_blocks = sum(1 for block in core.pool.blocks if block.num_pin_refs)
    _check(num_blocks == pins.num_blocks <= pins.max_blocks, f"{pins.num_blocks=}, {num_blocks} are pinned")
    by_mask = Counter(block.node.root.mask for block in core.pool.blocks if block.num_pin_refs and block.node)
    _check(by_mask == pins.num_by_mask, f"{pins.num_by_mask=}, and {by_mask} are pinned")
    num_pinned = sum(1 for block in core.pool.blocks if block.num_pin_refs and block.state == BlockState.CACHED)
    _check(num_pinned == core.pool.num_pinned, f"{core.pool.num_pinned=} but {num_pinned} cached blocks are")


def _audit_policy(core: KVCore) -> None:
    candidates = {id(node) for node in core.blocks.expectations.candidates()}
    evictable = {id(node) for node in core.tree.nodes() if node.evictable}
    _check(candidates == evictable, f"policy offers {len(candidates)} nodes, {len(evictable)} are evictable")
    victim = core.blocks.expectations.victim(core.now_s)
    if core.quotas.is_on:
        candidates = _may_be_had(core)
    _check((victim is None) == (not candidates), "the policy finds no victim among its candidates")
    _check(victim is None or id(victim.node) in candidates, "the policy's victim is such as who asks cannot have")


def _may_be_had(core: KVCore) -> set[int]:
    """Return the evictable nodes that who asked last can have, as quotas say."""
    quotas = core.quotas
    assert isinstance(quotas, Quotas)
    asker = quotas.asker
    had: set[int] = set()
    for node in core.blocks.expectations.candidates():
        tenant = next(block.tenant for block in node.blocks if block is not None)
        is_given = asker.num_blocks < asker.cap_blocks and tenant.num_blocks > tenant.floor_blocks
        if tenant is asker or is_given:
            had.add(id(node))
    return had


def _audit_quotas(core: KVCore) -> None:
    """What tenants have is counted, nobody has more than its cap, and no namespace is two tenants'."""
    quotas = core.quotas
    if not isinstance(quotas, Quotas):
        return
    in_use = [block for block in core.pool.blocks if block.state != BlockState.FREE]
    cached = [block for block in in_use if block.state == BlockState.CACHED]
    for tenant in quotas:
        told = (tenant.num_blocks, tenant.num_cached, tenant.num_pinned)
        counted = (
            sum(block.tenant is tenant for block in in_use),
            sum(block.tenant is tenant for block in cached),
            sum(block.tenant is tenant and block.num_pin_refs > 0 for block in cached),
        )
        _check(told == counted, f"tenant {tenant.name!r} has {counted} blocks, cached and pinned ones, not {told}")
        _check(counted[0] <= tenant.cap_blocks, f"tenant {tenant.name!r} has {counted[0]} blocks, above its cap")
        num_withheld = tenant.withheld(counted[1] - counted[2]) if tenant.floor_blocks else 0
        _check(tenant.num_withheld == num_withheld, f"{tenant.num_withheld} blocks of {tenant.name!r} are withheld")
    num_withheld = sum(tenant.num_withheld for tenant in quotas)
    _check(num_withheld == quotas.num_withheld, f"{quotas.num_withheld=}, and tenants say {num_withheld}")
    of_root: dict[Node, object] = {}
    for block in in_use:
        if block.node is not None:
            is_same = of_root.setdefault(block.node.root, block.tenant) is block.tenant
            _check(is_same, f"{block}: published among another tenant's")
    for cache in core.caches:
        ids = list(cache.all_block_ids())
        _check(all(core.pool.blocks[one].tenant is cache.tenant for one in ids), "a cache holds another tenant's block")


def _audit_expectations(core: KVCore) -> None:
    expectations = core.blocks.expectations
    nodes = set(core.tree.nodes())
    ends = dict(expectations.ends())
    for node, paths in ends.items():
        _check(node in nodes, "an expected path ends at what is not in the tree")
        _check(
            bool(paths) and all(path.tail is node for path in paths), f"{node.depth}: no path ends there that says so"
        )
    num_superseded = sum(node.claim is NOBODY for node in nodes)
    _check(num_superseded == expectations.num_superseded, f"{expectations.num_superseded=}, {num_superseded} nodes are")
    first = {node for node in nodes if node.evictable and node.claim is NOBODY and node not in ends}
    _check(set(expectations.superseded_leaves()) == first, f"{len(first)} superseded leaves, others go first")
    last = {node for node in ends if node.evictable}
    _check(set(expectations.expected_leaves()) == last, f"{len(last)} ends of expected paths, others are kept")


def _host_ops(host: HostTier) -> list[HostOps]:
    return [host.pending, *host.in_flight]


def _audit_host(host: HostTier, others: Counter[int]) -> None:
    """Host blocks: each is free or holds one block, and is pinned once for all that reads, writes or waits for it."""
    held = list(host.blocks.all())
    ids = [one.host_id for one in held]
    free = host.blocks.free_ids()
    _check(
        sorted(ids + free) == list(range(host.blocks.num_blocks)),
        f"host blocks {sorted(ids)} in use, {sorted(free)} free",
    )
    stores = Counter(store.host_id for ops in _host_ops(host) for store in ops.stores)
    loads = Counter(load.host_id for ops in _host_ops(host) for load in ops.loads)
    for one in held:
        num_pins = stores[one.host_id] + loads[one.host_id] + others[one.host_id]
        _check(one.num_pins == num_pins, f"host block {one.host_id}: {one.num_pins} pins, not {num_pins}")
        _check(one.num_pins > 0 or host.blocks.is_found(one), f"host block {one.host_id}: kept for nobody")
    for host_id, num in stores.items():
        _check(num == 1, f"host block {host_id} is written {num} times")
        _check(host_id in ids, f"host block {host_id} is to be written, and holds nothing")
    _check(host.blocks.num_held <= len(held), "blocks are held that have no place")
    for digest, one in host.blocks.unsaved.items():
        _check(host.blocks.get(digest) is one, f"host block {one.host_id}: to be written, and not held")
        _check(not one.is_superseded, f"host block {one.host_id}: to be written, and superseded")
    for one in host.blocks.found():
        is_behind = any(other is one for other in host.blocks.behind(one.name.parent))
        _check(is_behind, f"host block {one.host_id}: not found behind the path before it")
    ranks = [not one.is_superseded for one in host.blocks.idle()]
    _check(ranks == sorted(ranks), f"{ranks.count(False)} superseded host blocks, others make room before")


def _audit_host_chunks(core: KVCore) -> None:
    """Blocks of packed chunks that the host holds say which chunk that is, and no others do."""
    rule = core.rules.packing
    num_most = 0 if rule is None else rule.chunk_blocks(core.block_size)
    for one in core.host.blocks.all():
        where, part = f"host block {one.host_id}", one.name.group - len(core.rules)
        says_so = part >= 0 and (one.chunk is not None or core.host.blocks.is_found(one))  # not yet what is on its way
        _check((one.chunk is not None) == says_so, f"{where}: of group {one.name.group}, with chunk {one.chunk}")
        if one.chunk is not None:
            is_of_it = part < one.chunk.num_blocks <= num_most
            _check(is_of_it, f"{where}: block {part} of a chunk of {one.chunk.num_blocks} blocks")
