"""Missing: what of a path neither device nor host has, for slower tiers to be asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from pagefold.kv.host_chunks import ChunkPlace, held_chunk
from pagefold.kv.names import digest_of, in_group, names_behind, root_digest
from pagefold.kv.tree import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.kv.held_block import HeldBlock
    from pagefold.kv.host_blocks import HostBlocks
    from pagefold.kv.keep_rules import KeepRules
    from pagefold.kv.names import BlockName
    from pagefold.kv.tree import PrefixHit

__all__ = ["NOTHING_MISSING", "Has", "Missing", "missing_by_groups", "missing_of_one_group"]

Has: TypeAlias = "Callable[[BlockName], bool]"
"""Whether a tier that answers at once has a block."""


def has_nothing(_: BlockName) -> bool:
    """Say of every block that no tier that answers at once has it."""
    return False


class Missing:
    """Blocks that a sequence needs and nobody near has.

    Where groups keep the last tokens only, it takes two questions: how far tiers have what the other groups keep, and
    whether they have the windows there. A part of that is of no use. Where there are no other groups, tiers that answer
    at once are asked where the last place is whose windows are near or there; and all of the end of the path, if there
    is none.

    Where chunks are packed, nothing leads to a path's end but these: tiers are asked for one block of each chunk first.
    How many blocks it has is told with that, so the others are known when those have come: :meth:`rest` are these.

    What bringing them saves is counted in *places*, each of ``block_size`` tokens that are not computed: of several
    groups, blocks are more than places.

    Attributes:
        names: of the groups that keep all, in the order of their places.
        near: what the host has of the path, heads before tails: what is brought is of no use without it.
        needs_windows: whether there are groups that do not, so that ``names`` are not all.
        is_whole_or_nothing: whether a part is of no use.
        num_led: so many of the first ``names`` are those that were sought before, where windows are sought now.
        num_more: how many blocks more are expected, which cannot be named yet.
    """

    needs_windows = False
    is_whole_or_nothing = False
    num_more = 0

    def __init__(self, names: list[BlockName], near: Sequence[HeldBlock] = ()) -> None:
        self.names = names
        self.near = near
        self.num_led = len(names)

    def rest(self) -> Missing:
        """Return what could not be named before ``names`` had come, and is missing yet."""
        return NOTHING_MISSING

    def mixed(self) -> list[bytes]:
        """Return the digests of all blocks of packed chunks that have come and are not of one packing."""
        return []

    def gain(self, num_blocks: int) -> int:
        """Return how many places need not be computed, given the first ``num_blocks`` of ``names``."""
        return num_blocks

    def at_stake(self, num_blocks: int) -> int:
        """Return how many places ``num_blocks`` of ``names`` are worth, if all others are there."""
        return num_blocks

    def with_windows(self, num_found: int, has: Has = has_nothing) -> Missing:  # noqa: ARG002
        """Return all that is missing to go on behind the first ``num_found`` of ``names``.

        Args:
            num_found: that tiers have.
            has: asked where no group keeps all: then there are no ``names``.
        """
        return self

    def up_to(self, num_blocks: int) -> Missing:
        """Return as much of it as ``num_blocks`` hold."""
        return Missing(self.names[:num_blocks], self.near)


NOTHING_MISSING = Missing([])


class _Whole(Missing):
    """What is missing of a path, windows included: a part of it is of no use.

    Args:
        names: of the groups that keep all, and behind them of the windows.
        near: see :class:`Missing`.
        num_places: that all of them are worth.
        num_led: see :class:`Missing`.
        chunks: packed ones, of which blocks are missing.
    """

    is_whole_or_nothing = True

    def __init__(
        self,
        names: list[BlockName],
        near: Sequence[HeldBlock],
        num_places: int,
        *,
        num_led: int = 0,
        chunks: Sequence[_Chunk] = (),
    ) -> None:
        super().__init__(names, near)
        self.num_led = num_led
        self._num_places = num_places
        self._chunks = chunks
        self._unknown = [chunk for chunk in chunks if not chunk.is_known]
        self.num_more = sum(chunk.num_expected - 1 for chunk in self._unknown)

    def rest(self) -> Missing:
        names: list[BlockName] = []
        for chunk in self._unknown:
            lacking = chunk.lacking()
            if not chunk.is_known:  # its first block has gone since
                return NOTHING_MISSING
            names += lacking
        return _Whole(names, self.near, self._num_places, chunks=self._chunks) if names else NOTHING_MISSING

    def mixed(self) -> list[bytes]:
        return [digest for chunk in self._chunks if chunk.is_mixed for digest in chunk.digests()]

    def gain(self, num_blocks: int) -> int:
        return self._num_places if num_blocks == len(self.names) else 0

    def at_stake(self, num_blocks: int) -> int:
        return self._num_places if num_blocks else 0


class _MissingByGroups(Missing):
    """The same where there are several groups.

    Args:
        path: the names of the path's places.
        has: for each place and group whether device or host has its block.
        near: see :class:`Missing`.
        rules: what each group keeps.
    """

    def __init__(
        self, path: list[BlockName], has: list[list[bool]], near: Sequence[HeldBlock], rules: KeepRules
    ) -> None:
        self._path = path
        self._has = has
        self._rules = rules
        self._keeping = [group for group, rule in enumerate(rules) if not rule.trims]
        self._num_near = next(
            (at for at, row in enumerate(has) if not all(row[group] for group in self._keeping)), len(has)
        )
        sought = range(self._num_near, len(path))
        super().__init__([self._name(at, group) for at in sought for group in self._keeping], near)
        self.needs_windows = bool(rules.trimmed)
        # What is near can be gone on from up to here; where windows are missing, that is less than what is near.
        self._num_whole = rules.last_whole(self._num_near, lambda at, group: has[at][group])

    def gain(self, num_blocks: int) -> int:
        return self._num_near + num_blocks // len(self._keeping) - self._num_whole

    def at_stake(self, num_blocks: int) -> int:
        return self._num_near + -(-num_blocks // len(self._keeping)) - self._num_whole

    def with_windows(self, num_found: int, has: Has = has_nothing) -> Missing:  # noqa: ARG002
        if not self.needs_windows:
            return self
        end = self._num_near + num_found // len(self._keeping)
        names = self.names[:num_found] + self._lacking(end)
        return _Whole(names, self.near, end - self._num_whole, num_led=num_found)

    def up_to(self, num_blocks: int) -> Missing:
        is_all = len(self.with_windows(len(self.names)).names) <= num_blocks
        return self if is_all else NOTHING_MISSING

    def _lacking(self, end: int) -> list[BlockName]:
        """Return what nobody near has of the windows behind which a path of ``end`` places goes on."""
        return [
            self._name(at, group)
            for group in self._rules.trimmed
            for at in self._rules[group].places(end, self._rules.block_size)
            if not self._has[at][group]
        ]

    def _name(self, at: int, group: int) -> BlockName:
        return self._path[at].of_group(group)


class _MissingWindows(_MissingByGroups):
    """The same where no group keeps all: nothing leads to the windows, and a path may end wherever they are."""

    def gain(self, num_blocks: int) -> int:  # noqa: ARG002
        return 0

    def at_stake(self, num_blocks: int) -> int:  # noqa: ARG002
        return self._num_near - self._num_whole

    def with_windows(self, num_found: int, has: Has = has_nothing) -> Missing:  # noqa: ARG002
        end = self._rules.last_whole(
            len(self._path), lambda at, group: self._has[at][group] or has(self._name(at, group))
        )
        if end <= self._num_whole:
            end = len(self._path)
        return _Whole(self._lacking(end), self.near, end - self._num_whole)

    def up_to(self, num_blocks: int) -> Missing:
        size = self._rules.block_size
        most = sum(rule.num_blocks_for(len(self._path) * size, 0, size) for rule in self._rules)
        return self if most <= num_blocks else NOTHING_MISSING


class _Chunk:
    """A packed chunk of a path that neither device nor host has whole.

    Args:
        name: of the block of its path's last place.
        place: where it is among the names of the path.
        num_expected: how many blocks it is expected to have.
        host: the blocks of the host.

    Attributes:
        num_expected: as given.
        sought: the block that is asked for first.
    """

    def __init__(self, name: BlockName, place: ChunkPlace, num_expected: int, host: HostBlocks) -> None:
        self.num_expected = max(1, num_expected)
        self._name = name
        self._place = place
        self._host = host
        self.sought = self.lacking()[0]

    @property
    def is_known(self) -> bool:
        """Whether the host holds its first block, which says how many there are."""
        return self._place.held(self._host, 0) is not None

    @property
    def is_mixed(self) -> bool:
        """Whether the host holds blocks under its names that are not of one packing, or not of this chunk."""
        return any(self._host.get(name.digest) is not None for name in self.lacking())

    def digests(self) -> list[bytes]:
        """Return what names its blocks, as far as they are known."""
        first = self._place.held(self._host, 0)
        num_parts = 1 if first is None or first.chunk is None else first.chunk.num_blocks
        return [self._name_of(part).digest for part in range(num_parts)]

    def lacking(self) -> list[BlockName]:
        """Return the names of the blocks that the host lacks; of the first alone, where it lacks that."""
        first = self._place.held(self._host, 0)
        if first is None or first.chunk is None:
            return [self._name_of(0)]
        parts = [(part, self._place.held(self._host, part)) for part in range(1, first.chunk.num_blocks)]
        return [
            self._name_of(part)
            for part, held in parts
            if held is None or held.chunk is None or not held.chunk.is_as(first.chunk)
        ]

    def _name_of(self, part: int) -> BlockName:
        return self._name.of_group(self._place.num_groups + part)


class _MissingPacked(_MissingWindows):
    """The same where chunks are packed: whoever goes on needs all of them, and they lead to the windows.

    Args:
        path, has, near, rules: those of :class:`_MissingByGroups`.
        chunks: of the path; None for those that device or host have.
    """

    def __init__(
        self,
        path: list[BlockName],
        has: list[list[bool]],
        near: Sequence[HeldBlock],
        rules: KeepRules,
        chunks: list[_Chunk | None],
    ) -> None:
        super().__init__(path, has, near, rules)
        assert rules.packing is not None, "some group packs"
        self._rule = rules.packing
        self._chunks = chunks
        self._sought = [number for number, chunk in enumerate(chunks) if chunk is not None]
        self.names = [chunk.sought for chunk in chunks if chunk is not None]
        self.num_led = len(self.names)
        self._num_whole = rules.last_whole(self._reach(0), lambda at, group: has[at][group])

    def with_windows(self, num_found: int, has: Has = has_nothing) -> Missing:
        size = self._rules.block_size
        most = self._reach(num_found)
        end = self._rules.last_whole(most, lambda at, group: self._has[at][group] or has(self._name(at, group)))
        if end <= self._num_whole:
            end = most
        if end <= self._num_whole:
            return NOTHING_MISSING
        needed = [number for number in self._sought if number < self._rule.num_packed(end * size)]
        chunks = [chunk for number in needed if (chunk := self._chunks[number]) is not None]
        known = [name for chunk in chunks for name in chunk.lacking() if name != chunk.sought]
        return _Whole(
            [*self.names[: len(needed)], *known, *self._lacking(end)],
            self.near,
            end - self._num_whole,
            num_led=len(needed),
            chunks=chunks,
        )

    def _reach(self, num_found: int) -> int:
        """Return how many places of the path lead on, where the first ``num_found`` of ``names`` are found."""
        num_chunks = self._sought[num_found] if num_found < len(self._sought) else len(self._chunks)
        return min(len(self._path), self._rule.reach(num_chunks) // self._rules.block_size)


def missing_of_one_group(hit: PrefixHit, packed: bytes, stride: int) -> Missing:
    """Return what is missing of ``packed`` behind what ``hit`` found on device and host.

    Args:
        hit: what they have.
        packed: a sequence's tokens, packed, as far as they may be found.
        stride: bytes of a block's packed tokens.
    """
    root = root_digest(hit.namespace)
    parent = digest_of(hit.nodes[-1]) if hit.nodes else root
    if hit.held:
        parent = hit.held[-1].name.digest
    return Missing(names_behind(root, parent, packed[hit.num_blocks * stride :], stride), hit.held)


def missing_by_groups(hit: PrefixHit, packed: bytes, rules: KeepRules, host: HostBlocks, of_chunk: int = 0) -> Missing:
    """Return what is missing of ``packed`` where there are several groups.

    Args:
        hit: the nodes that the device has of it, whatever their blocks are.
        packed: a sequence's tokens, packed, as far as they may be found.
        rules: what each group keeps.
        host: the blocks of the host.
        of_chunk: how many blocks a packed chunk is expected to fill, of which that is not known.
    """
    root = root_digest(hit.namespace)
    path = names_behind(root, root, packed, rules.block_size * TOKEN_BYTES)
    held = [[host.get(in_group(name.digest, group)) for group in range(len(rules))] for name in path]
    has = []
    for at, on_host in enumerate(held):
        on_device = hit.nodes[at].blocks if at < len(hit.nodes) else [None] * len(rules)
        has.append([mine is not None or other is not None for mine, other in zip(on_device, on_host, strict=True)])
    near = [one for on_host in held for one in on_host if one is not None]
    rule, size = rules.packing, rules.block_size
    if rule is not None:
        chunks: list[_Chunk | None] = []
        for number in range(rule.num_packed(len(path) * size)):
            at = rule.chunk_places(number, size)[-1]
            place = ChunkPlace(number, path[at].path, path[at].key, len(rules))
            is_near = at < len(hit.nodes) and hit.nodes[at].packed is not None
            if not is_near:
                parts = (place.held(host, part) for part in range(rule.chunk_blocks(size)))
                near += [one for one in parts if one is not None]
                is_near = bool(held_chunk(host, place))
            chunks.append(None if is_near else _Chunk(path[at], place, of_chunk, host))
        return _MissingPacked(path, has, near, rules, chunks)
    return (_MissingByGroups if rules.keeps_paths else _MissingWindows)(path, has, near, rules)
