"""A driver of a core that packs: what every block must hold is written down, and looked at after every operation.

Blocks hold what a runner would have written there: whole ones the path of their tokens, those of a packed chunk the
path up to the chunk's end and which of its blocks they are. How many blocks a chunk fills hangs on its path alone.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from pagefold.kv import KEEP_ALL, NO_HOST, HostTier, KeepRule, KVCore, Promise, audit
from pagefold.kv.packing import Packed

if TYPE_CHECKING:
    from random import Random

NAMESPACE = b"n"
RULES = {
    "alone": (KeepRule(8, is_chunked=True, num_before=1, packs=True),),
    "one chunk": (KeepRule(4, is_chunked=True, packs=True),),
    "beside a full group": (KEEP_ALL, KeepRule(4, is_chunked=True, num_before=1, packs=True)),
    "beside a window": (KeepRule(4, is_chunked=True, num_before=2, packs=True), KeepRule(5)),
}


def packed_of(tokens) -> bytes:
    return array("i", tokens).tobytes()


class Row:
    """A sequence: its tokens, and how many are computed."""

    def __init__(self, cache, tokens, num_computed):
        self.cache, self.tokens, self.num_computed = cache, tokens, num_computed


class Planned(NamedTuple):
    """What a step is to compute of a sequence: up to where, and what it promises."""

    row: Row
    end: int
    promise: Promise | None


class PackingDriver:
    """Random operations on a core of small blocks.

    Args:
        rules: of its groups.
        random: decides.
        block_size, num_blocks: of the core.
        caches_prefixes: whether anything is published.
        num_host_blocks: of the host tier; 0 for none.
    """

    def __init__(
        self,
        rules,
        random: Random,
        block_size: int = 2,
        num_blocks: int = 60,
        *,
        caches_prefixes: bool = True,
        num_host_blocks: int = 0,
    ) -> None:
        self.random, self.size = random, block_size
        self.core = KVCore(
            num_blocks,
            block_size=block_size,
            rules=rules,
            enable_prefix_caching=caches_prefixes,
            host=HostTier(num_host_blocks) if num_host_blocks else NO_HOST,
        )
        self.rule = next(rule for rule in rules if rule.packs)
        self.rows: list[Row] = []
        self.holds: dict[int, object] = {}  # of each block, what was written there last
        self.arena: dict[int, object] = {}  # of each block of the host, likewise
        self.ended: list[list[int]] = []  # tokens of those that ended last
        self.num_loaded_chunks = self.num_damaged = 0
        self.num_hits = self.num_packed = self.num_short = self.num_joined = self.num_alone = 0

    # What a runner writes.

    def content(self, row: Row, group: int, place: int) -> object:
        """What the whole block of a group at one place of a sequence must hold, up to what is computed."""
        end = min((place + 1) * self.size, row.num_computed)
        return group, tuple(row.tokens[:end])

    def has(self, block_id: int, row: Row, group: int, place: int) -> bool:
        """Whether a block holds what it must; it may hold more, of tokens that were never computed for good."""
        expected = self.content(row, group, place)
        written = self.holds[block_id]
        return written[0] == expected[0] and written[1][: len(expected[1])] == expected[1]

    def copy(self) -> None:
        """Copy what was decided, as a step does before its first write: first to the host and from there."""
        ops = self.core.moves.take_host_ops()
        self.arena |= {store.host_id: self.holds.get(store.block_id) for store in ops.stores}
        self.holds |= {load.block_id: self.arena[load.host_id] for load in ops.loads}
        self.core.moves.host_done(ops)
        copies = self.core.moves.take_copies()
        for copy in copies:
            self.holds[copy.dst] = self.holds[copy.src]
        self.core.moves.copies_done(copies)

    def kept(self, tokens) -> Packed:
        """What is kept of the chunk that these tokens end."""
        number = int.from_bytes(blake2b(packed_of(tokens), digest_size=4).digest(), "little")
        return Packed(number % (self.rule.chunk_blocks(self.size) + 1), ("counts", number))

    def write(self, row: Row, start: int) -> list[Packed]:
        """Write what a step computes of a sequence from ``start`` on, and what it packs; return what was packed."""
        for group, table in enumerate(row.cache.tables):
            for place in range(start // self.size, -(-row.num_computed // self.size)):
                block_id = table.at(place)
                assert block_id is not None, "what is computed has its block"
                self.holds[block_id] = self.content(row, group, place)
        found, cb = [], self.rule.chunk_blocks(self.size)
        for at in range(self.core.packing.num_due(row.cache, row.num_computed)):
            chunk = len(row.cache.chunks) + at
            tokens = row.tokens[: (chunk + 1) * self.rule.window]
            for place in range(chunk * cb, (chunk + 1) * cb):  # it is packed from whole blocks
                group = list(self.core.rules).index(self.rule)
                block_id = row.cache.tables[group].at(place)
                assert block_id is not None, "what is packed is there"
                assert self.has(block_id, row, group, place)
            one = self.kept(tokens)
            for number, block in enumerate(row.cache.granted[at * cb : at * cb + one.num_blocks]):
                self.holds[block.block_id] = ("packed", tuple(tokens), number)
            found.append(one)
            self.num_packed += 1
        return found

    # Operations.

    def begin(self) -> None:
        """A sequence begins with what is known of it."""
        random = self.random
        known = [*(row.tokens for row in self.rows), *self.ended]
        if known and random.random() < 0.7:
            other = random.choice(known)
            tokens = [*other[: random.choice([len(other), random.randrange(len(other) + 1)])]]
        else:
            tokens = []
        tokens += [random.randrange(2) for _ in range(random.randrange(1, 40))]
        for _ in range(1 + (random.random() < 0.3)):  # two may compute the same at once
            hit = self.core.match(NAMESPACE, packed_of(tokens), len(tokens) - 1)
            cache, num_computed = self.core.acquire(hit)
            loads = self.core.host.pending.loads
            if loads and random.random() < 0.15:
                self.damage(cache, random.choice(loads).host_id)
                return
            self.num_loaded_chunks += sum(chunk.node is None for chunk in cache.chunks)
            self.copy()
            self.num_hits += bool(cache.chunks)
            self.rows.append(Row(cache, tokens, num_computed))

    def damage(self, cache, host_id: int) -> None:
        """What ``cache`` began with comes back damaged: the step fails that was to load it."""
        core = self.core
        ops, copies = core.moves.take_host_ops(), core.moves.take_copies()
        core.moves.host_failed(ops, frozenset({host_id}))
        core.release(cache)
        core.moves.copies_failed(copies)
        self.num_damaged += 1

    def take_all(self) -> None:
        """Nobody runs who could give way, and all that can be had is asked for: all that counts as such is."""
        core = self.core
        chunks = [chunk for chunk in core.blocks.idle_chunks if chunk.node.children]
        got = []
        for _ in range(core.num_available):
            block = core.blocks.allocate()
            assert block is not None, "it was said to be available"
            got.append(block)
        assert core.blocks.allocate() is None
        self.num_alone += len(chunks)
        for block in got:
            core.pool.release(block)

    def step(self, *, fails: bool = False) -> None:
        """Some sequences compute some tokens; or a step fails that was to compute them."""
        rows = self.random.sample(self.rows, self.random.randrange(len(self.rows) + 1))
        planned = [one for one in map(self.plan, rows) if one is not None]
        if fails:
            self.fail(planned)
        else:
            self.apply(planned)

    def plan(self, row: Row) -> Planned | None:
        """Plan some tokens of a sequence; None where there is no room."""
        random, start = self.random, row.num_computed
        if start == len(row.tokens):
            row.tokens = [*row.tokens, random.randrange(2)]
        num = len(row.tokens) - start
        end = start + random.choice([num, random.randrange(1, num + 1)])
        has_room = self.core.extend(row.cache, start, end)
        self.copy()  # without room, too: some blocks may be its own now
        if not has_room:
            self.num_short += 1
            return None
        return Planned(row, end, self.core.publishing.promise(row.cache, packed_of(row.tokens), end))

    def fail(self, planned: list[Planned]) -> None:
        """A step fails, perhaps when it has written."""
        for row, end, _ in planned:
            start, row.num_computed = row.num_computed, end
            if self.random.random() < 0.5:
                self.write(row, start)
            row.num_computed = start
        self.core.lodgers.on_failed([(row.cache, row.num_computed) for row, *_ in planned], [])
        for *_, promise in reversed(planned):
            if promise is not None:
                self.core.publishing.abandon(promise)

    def apply(self, planned: list[Planned]) -> None:
        """A step has run."""
        packed = []
        for row, end, _ in planned:
            start, row.num_computed = row.num_computed, end
            packed.append(self.write(row, start))
        promises = [promise for *_, promise in planned if promise is not None]
        for promise in promises:
            self.core.publishing.commit(promise, joins=False)
        for promise in promises:
            self.core.publishing.join(promise)
        for (row, *_), of_row in zip(planned, packed, strict=True):
            granted = {*row.cache.granted}
            self.core.packing.commit(row.cache, of_row)
            new = row.cache.chunks[len(row.cache.chunks) - len(of_row) :]
            self.num_joined += sum(not granted.issuperset(chunk.blocks) for chunk in new)
        for row, *_ in planned:
            self.core.trim(row.cache, row.num_computed)

    def release(self) -> None:
        """A sequence ends."""
        row = self.rows.pop(self.random.randrange(len(self.rows)))
        self.core.release(row.cache)
        self.ended = [*self.ended[-4:], row.tokens]

    def fork(self) -> None:
        """A sequence goes on twice."""
        row = self.random.choice(self.rows)
        self.rows.append(Row(self.core.fork(row.cache), [*row.tokens[: row.num_computed]], row.num_computed))

    def forget(self) -> None:
        """Everything is forgotten, or what one sequence has."""
        if self.random.random() < 0.3:
            self.core.forgetting.reset()
        else:
            row = self.random.choice(self.rows)
            self.core.forgetting.distrust(row.cache, NAMESPACE, packed_of(row.tokens))

    def pin(self) -> None:
        """A path is pinned, or a pin is removed."""
        pins = self.core.pins
        name = f"p{self.random.randrange(3)}"
        if pins.get(name) is not None:
            pins.remove(name)
        else:
            pins.add(name, self.random.choice(self.rows).cache.tail, 0.0)

    def run(self, num_operations: int) -> None:
        """Do random operations, and look at everything after each."""
        random = self.random
        for _ in range(num_operations):
            draw = random.random()
            if not self.rows or (draw < 0.2 and len(self.rows) < 6):
                self.begin()
            elif draw < 0.72:
                self.step(fails=random.random() < 0.1)
            elif draw < 0.88:
                self.release()
            elif draw < 0.93 and len(self.rows) < 6:
                self.fork()
            elif draw < 0.97:
                self.pin()
            elif draw < 0.976:
                self.forget()
            else:
                self.take_all()
            self.check()

    def check(self) -> None:
        """What must always hold."""
        audit(self.core)
        for row in self.rows:
            cache, end = row.cache, row.num_computed
            assert not cache.granted, "between steps nobody has what was granted"
            due = self.rule.num_packed(end)
            assert len(cache.chunks) == due
            for group, (rule, table) in enumerate(zip(self.core.rules, cache.tables, strict=True)):
                for place in range(rule.first_seen(end) // self.size, -(-end // self.size)):
                    block_id = table.at(place)
                    assert block_id is not None, "what is seen whole is there"
                    assert self.has(block_id, row, group, place)
            for at, chunk in enumerate(cache.chunks):
                tokens = row.tokens[: (at + 1) * self.rule.window]
                expected = self.kept(tokens)
                assert (len(chunk.blocks), chunk.counts) == expected
                for number, block in enumerate(chunk.blocks):
                    assert self.holds[block.block_id] == ("packed", tuple(tokens), number)
