"""How much of a path can be gone on from with what device and host have, where there are several cache groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.host_chunks import ChunkPlace, held_chunk
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
    path = _Path(hit, packed[: max(0, max_tokens) * TOKEN_BYTES], rules, host)
    num_found = path.num_found()
    loaded = [
        one
        for group, rule in enumerate(rules)
        for at in (rule.places(num_found, rules.block_size) if rule.trims else range(len(hit.nodes), num_found))
        if (one := path.held(at, group)) is not None
    ]
    loaded += path.held_chunks(num_found)
    nodes = hit.nodes[:num_found]
    if loaded:
        return PrefixHit(hit.namespace, nodes, None, 0, tuple(loaded), num_found - len(nodes))
    return hit


class _Path:
    """A path, as far as device or host have what the groups have of it that keep all.

    Nodes have all of that. So the host is asked of what lies behind them, and of windows only where a path may end.
    Where no group keeps all, a path is as long as the tokens, and may end wherever its windows are: the last such place
    is looked for from the end.

    Args:
        hit, packed, rules, host: as of :func:`extend_by_groups`.
    """

    def __init__(self, hit: PrefixHit, packed: bytes, rules: KeepRules, host: HostBlocks) -> None:
        self._nodes = hit.nodes
        self._rules = rules
        self._host = host
        self._behind: list[tuple[bytes, bytes]] = []  # digest and key of each place behind the nodes
        keeping = [group for group, rule in enumerate(rules) if not rule.trims]
        if not keeping and not host.num_held:
            return
        stride = rules.block_size * TOKEN_BYTES
        digest = digest_of(hit.nodes[-1]) if hit.nodes else root_digest(hit.namespace)
        for offset in range(len(hit.nodes) * stride, len(packed) - stride + 1, stride):
            key = packed[offset : offset + stride]
            digest = path_digest(digest, key)
            if any(self._at_host(digest, key, group) is None for group in keeping):
                break
            self._behind.append((digest, key))

    def held(self, at: int, group: int) -> HeldBlock | None:
        """Return what the host has of a group at one place, if the device has not got it."""
        if at >= len(self._nodes):
            return self._at_host(*self._behind[at - len(self._nodes)], group)
        node = self._nodes[at]
        return None if node.blocks[group] is not None else self._at_host(digest_of(node), node.key, group)

    def num_found(self) -> int:
        """Return how many blocks of it can be gone on from."""
        num_places, rule, size = len(self._nodes) + len(self._behind), self._rules.packing, self._rules.block_size
        if rule is not None:
            chunks = range(num_places // rule.chunk_blocks(size))
            num_chunks = next((chunk for chunk in chunks if self._chunk(chunk) is None), len(chunks))
            num_places = min(num_places, rule.reach(num_chunks) // size)
        return self._rules.last_whole(num_places, self._has)

    def held_chunks(self, num_found: int) -> list[HeldBlock]:
        """Return the blocks of packed chunks, of the first ``num_found`` of it, that the device lacks, in order."""
        rule, size = self._rules.packing, self._rules.block_size
        if rule is None:
            return []
        return [one for chunk in range(rule.num_packed(num_found * size)) for one in self._chunk(chunk) or ()]

    def _chunk(self, chunk: int) -> list[HeldBlock] | None:
        """Return what the host has of a packed chunk; nothing where the device has it, None where neither does."""
        assert self._rules.packing is not None, "some group packs"
        at = self._rules.packing.chunk_places(chunk, self._rules.block_size)[-1]
        if at >= len(self._nodes):
            path, key = self._behind[at - len(self._nodes)]
        else:
            node = self._nodes[at]
            if node.packed is not None:
                return []
            path, key = digest_of(node), node.key
        return held_chunk(self._host, ChunkPlace(chunk, path, key, len(self._rules))) or None

    def _has(self, at: int, group: int) -> bool:
        on_device = at < len(self._nodes) and self._nodes[at].blocks[group] is not None
        return on_device or self.held(at, group) is not None

    def _at_host(self, digest: bytes, key: bytes, group: int) -> HeldBlock | None:
        held = self._host.get(in_group(digest, group))
        return held if held is not None and held.name.key == key else None
