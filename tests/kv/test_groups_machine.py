"""KVCore with several cache groups under random operations, beside bytes that can be checked.

Held after every operation:

* ``audit`` passes;
* every position that a group keeps of a sequence reads back what that sequence expects there: a cell of the simulated
  slab names its group and all tokens up to its position. Blocks are poisoned when they become free and when they are
  allocated;
* a sequence holds no more blocks than its rules allow, and what it gave back is free or cached in the same moment;
* ``match`` finds the longest prefix of which each group has what it keeps, by a look at all of the tree;
* where blocks are sealed, a block holds something only when it is full, in all groups at once; what a sequence has of
  its last block is in its residual, and who loses that by a failed step finds all that the block's first token sees;
* memory is refused only when it is short.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.kv import (
    KEEP_ALL,
    NO_HOST,
    NO_RESIDUALS,
    TOKEN_BYTES,
    HostTier,
    KeepRule,
    KVCore,
    PinLimits,
    Residuals,
    audit,
    make_policy,
    root_digest,
)
from pagefold.kv.block import BlockState
from pagefold.kv.names import in_group, names_behind

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.kv import CopyOp, HostOps, PrefixHit, Promise, ResidualCopy, SequenceCache
    from pagefold.kv.block import Node

SIZE = 4
MAX_TOKENS = 60
MAX_RUNNING = 6
MAX_NEW = 11
NS = b"namespace"
POISON = None

_streams = Random(0)
STREAMS = [[_streams.randrange(2) for _ in range(MAX_TOKENS)] for _ in range(3)]

RULES = {
    "full": (KEEP_ALL,),
    "full and full": (KEEP_ALL, KEEP_ALL),
    "full and a window": (KEEP_ALL, KeepRule(9)),
    "a window first": (KeepRule(6), KEEP_ALL),
    "a window within a block": (KEEP_ALL, KeepRule(2)),
    "windows alone": (KeepRule(7), KeepRule(12)),
    "one window": (KeepRule(5),),
    "chunks": (KEEP_ALL, KeepRule(8, is_chunked=True)),
    "chunks alone": (KeepRule(8, is_chunked=True),),
    "chunks across blocks": (KeepRule(6, is_chunked=True), KeepRule(3), KEEP_ALL),
    "one token": (KeepRule(1), KEEP_ALL),
    "a sink": (KeepRule(6, num_sinks=1), KEEP_ALL),
    "a block of sinks alone": (KeepRule(7, num_sinks=SIZE),),
    "sinks beyond a block": (KEEP_ALL, KeepRule(5, num_sinks=SIZE + 1)),
    "sinks and windows alone": (KeepRule(2, num_sinks=2 * SIZE), KeepRule(9), KeepRule(3, num_sinks=1)),
}


def pack(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


@dataclass(eq=False)
class Sequence:
    """A request: its tokens, and how many of them are computed."""

    tokens: list[int]
    cache: SequenceCache
    num_computed: int


@dataclass(eq=False)
class Row:
    """A sequence of the step being planned, which computes [start, end)."""

    sequence: Sequence
    start: int
    end: int
    is_admitted: bool
    promise: Promise | None = None


class Moved(NamedTuple):
    """What a step copies before it computes."""

    copies: list[CopyOp]
    ops: HostOps
    residual_copies: list[ResidualCopy]


@dataclass
class Machine:
    """A scheduler and a runner of the simplest kind around a core with groups."""

    rules: tuple[KeepRule, ...]
    num_blocks: int
    random: Random
    policy: str = "lru"
    num_host_blocks: int = 0
    seals: bool = False
    publishes: bool = True
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        host = HostTier(self.num_host_blocks) if self.num_host_blocks else NO_HOST
        self.core = KVCore(
            self.num_blocks,
            host=host,
            block_size=SIZE,
            rules=self.rules,
            policy=make_policy(self.policy),
            enable_prefix_caching=self.publishes,
            pin_limits=PinLimits(0.5),
            residuals=Residuals(MAX_RUNNING, SIZE) if self.seals else NO_RESIDUALS,
        )
        self.slab: list[list[object]] = [[POISON] * SIZE for _ in range(self.num_blocks)]
        self.arena: list[list[object]] = [[POISON] * SIZE for _ in range(self.num_host_blocks)]
        self.residuals: list[list[object]] = [[POISON] * SIZE for _ in range(MAX_RUNNING)]
        self.running: list[Sequence] = []
        self.num_pins = 0

    # Operations.

    def step(self) -> None:
        """Plan rows for some who run and some who come; run; apply or fail."""
        rows: list[Row] = []
        for sequence in [one for one in self.running if self.random.random() < 0.8]:
            if sequence in self.running:  # it may have been preempted
                self._plan(rows, sequence, is_admitted=False)
        while len(self.running) < MAX_RUNNING and self.random.random() < 0.5:
            tokens = self._prompt()
            hit = self.core.match(NS, pack(tokens), len(tokens) - 1)
            self._check_hit(tokens, hit)
            self.seen["hit"] += bool(hit.nodes)
            self.seen["held hit"] += bool(hit.held)
            self.seen["partial hit"] += hit.partial is not None
            found = {block.block_id for block in self.core.rules.blocks_of(hit)}
            num_ends = self.random.randrange(min(4, len(tokens) + 1))
            ends = sorted(self.random.sample(range(1, len(tokens) + 1), num_ends))
            cache, num_computed = self.core.acquire(hit, ends, is_return=self.random.random() < 0.2)
            assert hit.held or found <= set(cache.all_block_ids()), "it was to hold other blocks"
            sequence = Sequence(tokens, cache, num_computed)
            self.running.append(sequence)
            self._plan(rows, sequence, is_admitted=True)
        self._check_tables()
        moves = self.core.moves
        moved = Moved(moves.take_copies(), moves.take_host_ops(), self.core.residuals.take_copies())
        is_failing = self.random.random() < 0.15
        if not is_failing or self.random.random() < 0.5:
            self._run(rows, moved)
        if is_failing:
            self._fail(rows, moved)
        else:
            self._apply(rows, moved)

    def fork(self) -> None:
        """Let a sequence go on twice."""
        if not self.running or len(self.running) >= MAX_RUNNING:
            return
        sequence = self.random.choice(self.running)
        cache = self.core.fork(sequence.cache)
        self.running.append(Sequence(sequence.tokens[: sequence.num_computed], cache, sequence.num_computed))

    def release(self) -> None:
        """End a sequence."""
        if self.running:
            self._release(self.random.choice(self.running))

    def reclaim(self) -> None:
        """Evict some blocks."""
        wanted = self.random.randrange(8)
        num_free = self.core.pool.num_free
        landmarks = self.core.blocks.windows.landmarks
        num_landmarks = len(landmarks)
        self.seen["landmark"] += num_landmarks
        self.seen["firm landmark"] += sum(landmark.is_firm for landmark in landmarks)
        num_evicted = self.core.blocks.reclaim(wanted)
        self.seen["landmark gone"] += num_landmarks - len(landmarks)
        assert self.core.pool.num_free == num_free + num_evicted
        assert num_evicted >= min(wanted, self._num_obtainable(num_free))

    def pin(self) -> None:
        """Pin what a sequence has published."""
        if self.running:
            self.num_pins += 1
            sequence = self.random.choice(self.running)
            self.seen["pinned"] += self.core.pins.add(f"pin {self.num_pins}", sequence.cache.tail, 0.0) is not None

    def unpin(self) -> None:
        """Take a pin away, or give one up."""
        pins = [pin.pin_id for pin in self.core.pins]
        if pins and self.random.random() < 0.5:
            self.core.pins.remove(self.random.choice(pins))
        else:
            num_pinned = self.core.pool.num_pinned
            assert self.core.pins.give_up(0.0) == (num_pinned > 0)
            assert len(self.core.pins) == len(pins) - (num_pinned > 0)  # several may keep one block

    def reset(self) -> None:
        """Forget all prefixes."""
        self.core.forgetting.reset()

    def distrust(self) -> None:
        """Drop what a sequence has, as if its logits had been no numbers."""
        if self.running:
            sequence = self.random.choice(self.running)
            before = {held.name.digest for held in self.core.host.blocks.found()}
            digests = self.core.forgetting.distrust(sequence.cache, NS, pack(sequence.tokens))
            after = {held.name.digest for held in self.core.host.blocks.found()}
            assert before - after == before & digests, "slower tiers are not told of all that is forgotten"

    def drain(self) -> None:
        """End all; then everything can be had."""
        for sequence in list(self.running):
            self._release(sequence)
        self.check()
        for pin in list(self.core.pins):
            self.core.pins.remove(pin.pin_id)
        assert self.core.num_available == self.num_blocks
        assert self.core.blocks.make_free(self.num_blocks)
        self.check()
        assert not self.core.tree.roots

    def check(self) -> None:
        """Look at everything."""
        audit(self.core)
        storing = {store.block_id for store in self.core.host.pending.stores}
        for block in self.core.pool.blocks:
            if block.state == BlockState.FREE and block.block_id not in storing:
                self.slab[block.block_id] = [POISON] * SIZE
        for host_id in self.core.host.blocks.free_ids():
            self.arena[host_id] = [POISON] * SIZE
        for sequence in self.running:
            num_computed = sequence.num_computed
            start = num_computed - num_computed % SIZE if self.seals else num_computed  # where it may begin again
            self._check_content(sequence, start, num_computed)
        for node in self.core.tree.nodes():
            tokens = self._tokens_of(node)
            for group, block in enumerate(node.blocks):
                if block is not None and node.committed:
                    assert block.group == group
                    cells = [(group, tuple(tokens[: end + 1])) for end in range(len(tokens) - SIZE, len(tokens))]
                    assert self.slab[block.block_id] == cells, "a published block holds something else"

    # Inside.

    def _prompt(self) -> list[int]:
        tokens = self.random.choice(STREAMS)[: self.random.randrange(1, 45)]
        return tokens + [self.random.randrange(2) for _ in range(self.random.randrange(6))]

    def _plan(self, rows: list[Row], sequence: Sequence, *, is_admitted: bool) -> None:
        start = sequence.num_computed
        num_new = self.random.choice((1, 1, 3, MAX_NEW))
        while len(sequence.tokens) < min(start + num_new, MAX_TOKENS):
            sequence.tokens.append(self.random.choice(STREAMS)[len(sequence.tokens)])
        end = min(start + num_new, len(sequence.tokens))
        end = start + self.core.lodgers.limit(sequence.cache, start, end - start, len(sequence.tokens))
        if end == start:
            self._release(sequence)
            return
        before = set(sequence.cache.all_block_ids())
        while not self.core.extend(sequence.cache, start, end):
            self.seen["memory short"] += 1
            needed = len(self.rules) * max(0, -(-end // SIZE) - sequence.cache.tables[0].end)
            shared = sum(self.core.pool.blocks[one].num_table_refs > 1 for one in sequence.cache.all_block_ids())
            assert self._num_obtainable(0) < needed + shared + len(self.rules), "refused, though there is memory"
            planned = {row.sequence for row in rows}
            victims = [one for one in self.running if one is not sequence and one not in planned]
            if not victims:
                if self.core.pins.give_up(0.0):
                    continue
                self._release(sequence)
                return
            self._release(self.random.choice(victims))
            before = set(sequence.cache.all_block_ids())
        copied = {copy.dst for copy in self.core.moves.pending_copies}
        kept = copied.union(store.block_id for store in self.core.host.pending.stores)
        for block_id in set(sequence.cache.all_block_ids()) - before - kept:
            self.slab[block_id] = [POISON] * SIZE
        row = Row(sequence, start, end, is_admitted)
        row.promise = self.core.publishing.promise(sequence.cache, pack(sequence.tokens), end)
        rows.append(row)

    def _run(self, rows: list[Row], moved: Moved) -> None:
        for store in moved.ops.stores:
            self.arena[store.host_id] = list(self.slab[store.block_id])
        for load in moved.ops.loads:
            self.seen["load"] += 1
            self.slab[load.block_id] = list(self.arena[load.host_id])
        for copy in moved.copies:
            self.seen["copy"] += 1
            source = self.slab[copy.src][: copy.num_tokens]
            self.slab[copy.dst] = source + [POISON] * (SIZE - copy.num_tokens)
        for residual in moved.residual_copies:
            self.seen["residual copy"] += 1
            self.residuals[residual.dst] = list(self.residuals[residual.src])
        for row in rows:
            for position in range(row.start, row.end):
                self._write(row.sequence, position)
        for row in rows:
            self._check_content(row.sequence, row.start, row.end)

    def _write(self, sequence: Sequence, position: int) -> None:
        cells = [tuple(sequence.tokens[: position + 1])]
        first = position
        if self.seals:
            residual = self.residuals[sequence.cache.residual_id]
            residual[position % SIZE] = cells[0]
            cells = residual if (position + 1) % SIZE == 0 else []
            first = position // SIZE * SIZE
        for group, table in enumerate(sequence.cache.tables):
            for at, cell in enumerate(cells, first):
                self.slab[table.block_ids[at // SIZE - table.num_trimmed]][at % SIZE] = (group, cell)

    def _apply(self, rows: list[Row], moved: Moved) -> None:
        for row in rows:
            if row.promise is not None:
                self.core.publishing.commit(row.promise)
        self.core.moves.copies_done(moved.copies)
        self.core.moves.host_done(moved.ops)
        for row in rows:
            sequence = row.sequence
            sequence.num_computed = row.end
            held = list(sequence.cache.all_block_ids())
            self.core.trim(sequence.cache, row.end)
            self.seen["given back"] += len(set(held) - set(sequence.cache.all_block_ids()))
            if sequence.cache.tail is not None and sequence.cache.num_published < row.end // SIZE:
                continue  # what is still to be published stays
            for rule, table in zip(self.rules, sequence.cache.tables, strict=True):
                assert table.num_held <= rule.num_blocks_for(sequence.cache.capacity, MAX_NEW, SIZE)

    def _fail(self, rows: list[Row], moved: Moved) -> None:
        self.seen["failed step"] += 1
        for row in reversed(rows):
            if row.promise is not None:
                self.core.publishing.abandon(row.promise)
        self.core.moves.copies_failed(moved.copies)
        damaged = [load.host_id for load in moved.ops.loads if self.random.random() < 0.2]
        self.core.moves.host_failed(moved.ops, frozenset(damaged))
        self.core.lodgers.on_failed([], moved.residual_copies)
        for row in reversed(rows):
            if row.is_admitted:
                self._release(row.sequence)
        self._lose_residuals()

    def _lose_residuals(self) -> None:
        """Some were overwritten by a step behind the one that failed; who lost one begins its block again."""
        begun = [(sequence.cache, 0) for sequence in self.running if self.random.random() < 0.3]
        self.core.lodgers.on_failed(begun, [])
        for sequence in self.running:
            left = self.core.lodgers.num_left(sequence.cache, sequence.num_computed)
            if left != sequence.num_computed:
                self.seen["lost residual"] += 1
                self.residuals[sequence.cache.residual_id] = [POISON] * SIZE
                sequence.num_computed = left

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        held = [self.core.pool.blocks[block_id].node for block_id in sequence.cache.all_block_ids()]
        self.core.now_s += 1.0
        self.core.release(sequence.cache)
        used = {(node.last_used, node.used_s) for node in held if node is not None}
        assert used <= {(self.core.blocks.tick, self.core.now_s)}, "released, and not used just now"

    def _check_content(self, sequence: Sequence, start: int, end: int) -> None:
        """What whoever computes from ``start`` on sees, up to ``end``."""
        if self.seals:
            residuals = list(self.residuals)
            for copy in self.core.residuals.pending_copies:
                residuals[copy.dst] = residuals[copy.src]
            begin = end - end % SIZE
            cells = [tuple(sequence.tokens[: position + 1]) for position in range(begin, end)]
            assert residuals[sequence.cache.residual_id][: end - begin] == cells, "a residual holds something else"
            for table in sequence.cache.tables:
                assert table.num_trimmed <= begin // SIZE, "the block that is being filled was given back"
            end = begin
        waiting = {copy.dst for copy in self.core.moves.pending_copies}
        waiting.update(load.block_id for load in self.core.host.pending.loads)
        for group, (rule, table) in enumerate(zip(self.rules, sequence.cache.tables, strict=True)):
            first_seen = rule.first_seen(start)
            for position in [*range(min(rule.num_sinks, first_seen, end)), *range(first_seen, end)]:
                block_id = table.at(position // SIZE)
                assert block_id is not None, f"position {position} was given back, and is seen from {start} on"
                if block_id not in waiting:
                    cell = (group, tuple(sequence.tokens[: position + 1]))
                    assert self.slab[block_id][position % SIZE] == cell, "a sequence reads what is not its own"

    def _check_tables(self) -> None:
        every = Counter(group for one in self.running for group in one.cache.all_block_ids())
        for block_id, num in every.items():
            assert self.core.pool.blocks[block_id].num_table_refs == num

    def _check_hit(self, tokens: list[int], hit: PrefixHit) -> None:
        """``hit`` is the longest path of which each group has what it keeps, on the device or the host."""
        path: list[Node] = []
        node = self.core.tree.roots.get(NS)
        while node is not None and (len(path) + 1) * SIZE <= len(tokens) - 1:
            node = node.children.get(pack(tokens[len(path) * SIZE : (len(path) + 1) * SIZE]))
            if node is not None:
                path.append(node)
        root, stride = root_digest(NS), SIZE * TOKEN_BYTES
        names = names_behind(root, root, pack(tokens[: len(tokens) - 1]), stride)

        def is_there(at: int, group: int) -> bool:
            on_device = at < len(path) and path[at].blocks[group] is not None
            return on_device or self.core.host.blocks.get(in_group(names[at].digest, group)) is not None

        best = 0
        for length in range(1, len(names) + 1):
            if all(is_there(at, group) for group, rule in enumerate(self.rules) for at in _needed(rule, length)):
                best = length
        assert hit.num_blocks == best
        assert hit.nodes == path[:best]
        assert hit.lost == (path[-1] if best < len(path) else None)
        assert hit.num_lost == max(0, len(path) - best)
        self.seen["cut hit"] += best < len(path)

    def _num_obtainable(self, num_free: int) -> int:
        """How many blocks beside ``num_free`` could be free: those that nobody holds, above which nobody holds one."""
        stuck: set[Node] = set()
        num = 0 if num_free else self.core.pool.num_free
        for node in self.core.tree.nodes():
            if any(block is not None and not _is_idle(block) for block in node.blocks):
                above: Node | None = node
                while above is not None:
                    stuck.add(above)
                    above = above.parent
        for node in self.core.tree.nodes():
            for group, block in enumerate(node.blocks):
                goes_alone = self.rules[group].trims and node.depth * SIZE >= self.rules[group].num_sinks
                if block is not None and _is_idle(block) and (goes_alone or node not in stuck):
                    num += 1
        return num

    def _tokens_of(self, node: Node) -> list[int]:
        keys: list[bytes] = []
        while node.parent is not None:
            keys.append(node.key)
            node = node.parent
        return [token for key in reversed(keys) for token in memoryview(key).cast("i")]


def _needed(rule: KeepRule, num_blocks: int) -> set[int]:
    """Which of so many blocks have a position that the next token sees; and the last one always."""
    position = num_blocks * SIZE
    seen = {at // SIZE for at in range(position) if at >= rule.first_seen(position) or at < rule.num_sinks}
    return seen | {num_blocks - 1}


def _is_idle(block) -> bool:
    return block.state == BlockState.CACHED and not block.num_io_refs and not block.num_pin_refs


OPERATIONS: dict[str, int] = {
    "step": 40, "fork": 5, "release": 8, "reclaim": 4, "pin": 3, "unpin": 2, "reset": 1, "distrust": 1,
}  # fmt: skip


def random_operations(
    seed: int, name: str, num_operations: int, policy: str = "lru", *, has_host: bool = False, seals: bool = False
) -> Counter[str]:
    random = Random(f"{seed} {name}")
    num_blocks, num_host_blocks = random.choice((24, 40, 70)), random.choice((5, 30, 200)) if has_host else 0
    publishes = not seals or random.random() < 0.7  # what is published is kept from the beginning of a block anyway
    machine = Machine(RULES[name], num_blocks, random, policy, num_host_blocks, seals, publishes)
    log: list[str] = []
    try:
        for operation in random.choices(list(OPERATIONS), list(OPERATIONS.values()), k=num_operations):
            log.append(operation)
            run: Callable[[], None] = getattr(machine, operation)
            run()
            machine.check()
        machine.drain()
    except BaseException as error:
        what = f"random_operations({seed}, {name!r}, {num_operations}, {has_host=}, {seals=})"
        error.add_note(f"{what}: operation {len(log)}: {log[-8:]}")
        raise
    return machine.seen


@pytest.mark.quick(every=16)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), num_operations=st.integers(1, 60))
@pytest.mark.parametrize("name", RULES)
def test_random_operations(name: str, seed: int, num_operations: int) -> None:
    random_operations(seed, name, num_operations)


@pytest.mark.quick(every=16)
@settings(max_examples=18)
@given(seed=st.integers(0, 2**32), num_operations=st.integers(1, 60))
@pytest.mark.parametrize("name", RULES)
def test_random_operations_with_a_host_tier(name: str, seed: int, num_operations: int) -> None:
    random_operations(seed, name, num_operations, has_host=True)


@pytest.mark.quick(every=8)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), num_operations=st.integers(1, 60), has_host=st.booleans())
@pytest.mark.parametrize("name", RULES)
def test_random_operations_where_blocks_are_sealed(name: str, seed: int, num_operations: int, has_host: bool) -> None:
    random_operations(seed, name, num_operations, has_host=has_host, seals=True)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("policy", ["s3-fifo", "learned", "2q"])
def test_random_operations_with_other_policies(policy: str) -> None:
    for name in RULES:
        random_operations(1, name, 100, policy)


@pytest.mark.long
def test_what_is_worth_testing_happens() -> None:
    seen: Counter[str] = Counter()
    for name in RULES:
        seen.update(random_operations(0, name, 200, has_host=True))
        seen.update(random_operations(0, name, 100, seals=True))
    for what in (
        "held hit",
        "load",
        "hit",
        "partial hit",
        "cut hit",
        "copy",
        "memory short",
        "given back",
        "failed step",
        "pinned",
        "residual copy",
        "lost residual",
        "landmark",
        "firm landmark",
        "landmark gone",
    ):
        assert seen[what] > 0, f"{what} never happened: {seen}"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", RULES)
def test_very_many_random_operations(name: str) -> None:
    random_operations(1000, name, 1600)
    random_operations(2000, name, 1600, has_host=True)
    random_operations(3000, name, 1600, has_host=True, seals=True)
