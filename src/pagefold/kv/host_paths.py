"""How much of a path can be gone on from with what device and host have, where there are several cache groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.names import digest_of, in_group, path_digest, root_digest
from pagefold.kv.tree import TOKEN_BYTES, PrefixHit

if TYPE_CHECKING:
    from pagefold.kv.held_block import HeldBlock
    from pagefold.kv.host_blocks import HostBlocks
    from pagefold.kv.keep_rules import KeepRules

__all__ = ["extend_by_groups"]


def extend_by_groups(hit: PrefixHit, packed: bytes, max_tokens: int, rules: KeepRules, host: HostBlocks) -> PrefixHit:
    """Return the longest part of a path of which device or host have what each group keeps.

    Where the host adds nothing, ``hit`` as it is.

    Args:
        hit: the nodes that the device has of ``packed``, whatever their blocks are.
        packed: a sequence's tokens, packed.
        max_tokens: how many of them may be found.
        rules: what each group keeps.
        host: the blocks of the host.
    """
    places = _held_by_place(hit, packed[: max(0, max_tokens) * TOKEN_BYTES], rules, host)
    num_found = 0
    num_present = [0] * len(rules)  # up to here, without a gap
    for end, held in enumerate(places, 1):
        node = hit.nodes[end - 1] if end <= len(hit.nodes) else None
        is_whole = True
        for group, rule in enumerate(rules):
            is_there = held[group] is not None or (node is not None and node.blocks[group] is not None)
            num_present[group] = num_present[group] + 1 if is_there else 0
            is_whole = is_whole and end - num_present[group] <= rule.first_block(end, rules.block_size)
        if is_whole:
            num_found = end
    loaded = tuple(
        one
        for group, rule in enumerate(rules)
        for of_groups in places[rule.first_block(num_found, rules.block_size) : num_found]
        if (one := of_groups[group]) is not None
    )
    nodes = hit.nodes[:num_found]
    if loaded:
        return PrefixHit(hit.namespace, nodes, None, 0, loaded, num_found - len(nodes))
    return hit


def _held_by_place(hit: PrefixHit, packed: bytes, rules: KeepRules, host: HostBlocks) -> list[list[HeldBlock | None]]:
    """Return for each place of a path what the host has of each group and the device does not.

    It ends where a group that keeps all has nothing.
    """
    stride = rules.block_size * TOKEN_BYTES
    places: list[list[HeldBlock | None]] = []
    digest = root_digest(hit.namespace)
    for offset in range(0, len(packed) - stride + 1, stride):
        key = packed[offset : offset + stride]
        if len(places) < len(hit.nodes):
            node = hit.nodes[len(places)]
            digest = digest_of(node)
            lacks = [block is None for block in node.blocks]
        else:
            digest = path_digest(digest, key)
            lacks = [True] * len(rules)
        held = [host.get(in_group(digest, group)) if lacking else None for group, lacking in enumerate(lacks)]
        held = [one if one is not None and one.name.key == key else None for one in held]
        if any(lacks[group] and held[group] is None and not rule.trims for group, rule in enumerate(rules)):
            break
        places.append(held)
    return places
