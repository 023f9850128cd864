"""KVCore under random operations, beside bytes that can be checked and a slow, obvious model of a prefix cache.

Held after every operation, for every policy:

* ``audit`` passes;
* every position that a sequence has computed reads back exactly what that sequence expects there: a cell of the
  simulated slab is the name of (namespace, all tokens up to that position). Blocks are poisoned when they become free
  and when they are allocated, so a use after free, a missed copy-on-write, a wrong share or a stale reuse shows;
* every committed node of the tree has the bytes that its path promises;
* the tree is exactly what the model says was published, less what events said was evicted and what was reset;
* ``match`` finds exactly the model's longest prefix: whole blocks, then a part of one more;
* memory is refused only when it is short, and what is evicted is a leaf that nobody holds and no pin keeps;
* what the host tier holds has the bytes that its path promises, and a match goes on in it as far as it does;
* pins are those of the model, which looks at all of them: they never keep more than their quota, end at their time, and
  the one that is given up has the least priority of those that alone keep a block from being evicted.

The machine follows the protocol in core.py: a step is planned (match, acquire, extend, promise for each sequence), its
copies are taken, it runs, and then it is committed in plan order, or it fails: its copies are handed back, its promises
abandoned newest first, and the tables admitted in it released. Sequences may be forked, cancelled and preempted, blocks
reclaimed, prefixes pinned and unpinned, and the cache reset at any point of that, except that a table is never released
or forked while it has an open promise, or while a step in flight writes it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from until_seen import IN_FULL, until_seen

from pagefold.events import BlockEvicted, BlocksPublished, BlocksReused, CacheReset, Event, HostTransfer, PinDropped
from pagefold.kv import (
    NO_HOST,
    NO_HOST_OPS,
    POLICIES,
    HostOps,
    HostTier,
    KeyPolicy,
    KVCore,
    Namespace,
    PinLimits,
    PrefixHit,
    audit,
    make_policy,
)
from pagefold.kv.block import BlockState
from pagefold.kv.names import digest_of, path_digest, root_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pagefold.kv import CopyOp, EvictionPolicy, Promise, SequenceCache
    from pagefold.kv.block import Node

BLOCK_SIZE = 4
NUM_BLOCKS = 24
MAX_RUNNING = 7
MAX_WAITING = 4
MAX_STASHED = 3
MAX_TOKENS = 44  # of one sequence: about half of the pool
HALF_LIFE = 16
PINNED_SHARE = 0.6
POISON = -1
POISONED = [POISON] * BLOCK_SIZE

NAMESPACES = tuple(Namespace(model="m", tenant=tenant).key() for tenant in ("", "a", "b"))
_streams = Random(0)
STREAMS = tuple(tuple(_streams.choices((0, 1), k=MAX_TOKENS)) for _ in range(3))
"""What prompts begin with and outputs follow, so that prefixes, partial matches and duplicates are frequent."""

Prefix = tuple[int, tuple[int, ...]]
"""Number of a namespace, and a whole number of blocks of tokens."""


def pack(tokens: list[int] | tuple[int, ...]) -> bytes:
    """Return ``tokens`` as the core wants them."""
    return array("i", tokens).tobytes()


def digest(namespace: int, tokens: list[int] | tuple[int, ...]) -> bytes:
    """Name a path of whole blocks as the host tier does."""
    found = root_digest(NAMESPACES[namespace])
    for start in range(0, len(tokens), BLOCK_SIZE):
        found = path_digest(found, pack(tokens[start : start + BLOCK_SIZE]))
    return found


class Picky(KeyPolicy):
    """LRU that refuses to keep deep blocks: the one policy here whose ``admit`` ever says no."""

    def __init__(self) -> None:
        super().__init__(lambda node: (node.last_used, -node.depth))

    def admit(self, node: Node) -> bool:
        """Keep the first three blocks of a prefix."""
        return node.depth < 3


def policy_of(name: str) -> EvictionPolicy:
    """Return a fresh policy by name, ``picky`` among them."""
    return Picky() if name == "picky" else make_policy(name)


# The slow model.


@dataclass
class Known:
    """One block-aligned prefix that the cache knows.

    Attributes:
        block_id: the block of its last tokens.
        cells: what that block's bytes must be once it is committed.
        committed: whether the step that writes it has run.
    """

    block_id: int
    cells: list[int]
    committed: bool


class Longest(NamedTuple):
    """The longest known prefix: whole blocks, then tokens of one more."""

    num_blocks: int
    num_partial_tokens: int


class PrefixModel:
    """A prefix cache as a dict of prefixes; everything is found by looking at all of it."""

    def __init__(self) -> None:
        self.known: dict[Prefix, Known] = {}

    def longest(self, namespace: int, tokens: list[int], max_tokens: int) -> Longest:
        """Return the longest known prefix of ``tokens``, of at most ``max_tokens``."""
        wanted = tuple(tokens[:max_tokens])
        num_blocks = 0
        while len(wanted) >= (num_blocks + 1) * BLOCK_SIZE and self.has(namespace, wanted, num_blocks):
            num_blocks += 1
        covered = num_blocks * BLOCK_SIZE
        num_partial_tokens = 0
        for (other, prefix), known in self.known.items():
            if other != namespace or not known.committed or len(prefix) != covered + BLOCK_SIZE:
                continue
            if prefix[:covered] == wanted[:covered]:
                num_partial_tokens = max(num_partial_tokens, num_common(prefix[covered:], wanted[covered:]))
        return Longest(num_blocks, num_partial_tokens)

    def has(self, namespace: int, tokens: list[int] | tuple[int, ...], index: int) -> bool:
        """Whether block ``index`` of ``tokens`` is known."""
        return (namespace, tuple(tokens[: (index + 1) * BLOCK_SIZE])) in self.known

    def evicted(self, block_id: int) -> None:
        """Forget the prefix that ends in block ``block_id``, which must have been written and be a leaf."""
        prefixes = [prefix for prefix, known in self.known.items() if known.block_id == block_id]
        assert len(prefixes) == 1, f"block {block_id} was evicted, and {len(prefixes)} prefixes end in it"
        namespace, tokens = prefixes[0]
        assert self.known.pop(prefixes[0]).committed, "a block was evicted before it was written"
        for other, longer in self.known:
            assert other != namespace or longer[: len(tokens)] != tokens, "a prefix was broken in the middle"


@dataclass(frozen=True)
class ModelPin:
    """What the model knows of a pin: its prefix, and until when it stays."""

    pin_id: str
    prefix: Prefix
    priority: float
    pinned_at: int
    expires_at: float

    def prefixes(self) -> set[Prefix]:
        """All that it keeps, one prefix a block."""
        namespace, tokens = self.prefix
        return {(namespace, tokens[:end]) for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)}

    def rank(self, now: int) -> tuple[float, int]:
        """The smaller goes first: its priority, halved as often as it must be."""
        return self.priority / 2 ** ((now - self.pinned_at) / HALF_LIFE), self.pinned_at


def num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many leading tokens are equal."""
    num = 0
    while num < min(len(one), len(other)) and one[num] == other[num]:
        num += 1
    return num


# The machine.


@dataclass(eq=False)
class Sequence:
    """A request as a scheduler sees it.

    Attributes:
        tokens, cells: all that are known, and the name of the history that ends in each.
        num_computed: [0, num_computed) has KV.
        num_published: what ``table.num_published`` must be.
        publishes: False once the cache was reset under its table.
    """

    namespace: int
    tokens: list[int]
    cells: list[int]
    cache: SequenceCache | None = None
    num_computed: int = 0
    num_published: int = 0
    publishes: bool = True


@dataclass(eq=False)
class Row:
    """One sequence of the step being planned or run."""

    sequence: Sequence
    start: int
    end: int
    admitted: bool
    promise: Promise | None = None
    first: int = 0  # the sequence's num_published before
    promised: list[Prefix] = field(default_factory=list)
    promised_ids: list[int] = field(default_factory=list)


class Stashed(NamedTuple):
    """A hit that is kept for later, when it may be stale."""

    namespace: int
    tokens: list[int]
    hit: PrefixHit


class Machine:
    """A scheduler and a runner of the simplest kind around one KVCore.

    Arguments of operations are any ints, taken modulo what there is. An operation that makes no sense now does nothing
    and returns False.

    Args:
        policy: name of an eviction policy.
        num_blocks: of the pool.
        variety: how many pairs of a stream and a namespace prompts are made of, 1 to 9: with few, nearly all sequences
            run the same tokens beside each other.
        enable_prefix_caching: as for KVCore.
        num_host_blocks: of the host tier; 0 for none.
    """

    def __init__(
        self,
        policy: str,
        *,
        num_blocks: int = NUM_BLOCKS,
        variety: int = 9,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
    ) -> None:
        self.core = KVCore(
            num_blocks,
            block_size=BLOCK_SIZE,
            policy=policy_of(policy),
            enable_prefix_caching=enable_prefix_caching,
            pin_limits=PinLimits(PINNED_SHARE, HALF_LIFE),
            host=HostTier(num_host_blocks) if num_host_blocks else NO_HOST,
            emit=self._on_event,
        )
        self.arena: list[list[int]] = [POISONED] * num_host_blocks
        self.told: set[bytes] = set()  # paths that events say are cached
        self.evicted: dict[bytes, list[int]] = {}  # what each evicted path's last block must be
        self.offered: set[bytes] = set()  # those that were evicted since the last reset
        self.host_ops: HostOps = NO_HOST_OPS
        self.max_pinned = int(num_blocks * PINNED_SHARE)
        self.pins: dict[str, ModelPin] = {}
        self.num_pins = 0
        self.now = 0
        self.publishes = enable_prefix_caching
        self.variety = variety
        self.model = PrefixModel()
        self.slab: list[int] = POISONED * num_blocks
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.stashed: list[Stashed] = []
        self.plan: list[Row] = []
        self.in_flight = False
        self.copies: list[CopyOp] = []
        self.seen: dict[str, int] = {}  # how often what was worth testing happened
        self._names: dict[tuple[int, int], int] = {}

    # Operations of a scheduler.

    def admit(self, prompt: tuple[int, int, int, int], chunk: int, victim: int) -> bool:
        """Plan a new sequence."""
        if self.in_flight or len(self.running) >= MAX_RUNNING:
            return False
        sequence = self._new_sequence(prompt)
        return self._admit(sequence, self._match(sequence.namespace, sequence.tokens), chunk, victim)

    def readmit(self, which: int, chunk: int, victim: int) -> bool:
        """Plan a sequence that was preempted or whose first step failed."""
        if self.in_flight or len(self.running) >= MAX_RUNNING or not self.waiting:
            return False
        sequence = self.waiting.pop(which % len(self.waiting))
        return self._admit(sequence, self._match(sequence.namespace, sequence.tokens), chunk, victim)

    def stash(self, prompt: tuple[int, int, int, int]) -> bool:
        """Match now, to acquire later."""
        sequence = self._new_sequence(prompt)
        hit = self._match(sequence.namespace, sequence.tokens)
        self.stashed = [*self.stashed[1 - MAX_STASHED :], Stashed(sequence.namespace, sequence.tokens, hit)]
        return True

    def admit_stashed(self, which: int, chunk: int, victim: int) -> bool:
        """Plan a sequence with a hit that may be stale."""
        if self.in_flight or len(self.running) >= MAX_RUNNING or not self.stashed:
            return False
        namespace, tokens, hit = self.stashed.pop(which % len(self.stashed))
        return self._admit(Sequence(namespace, tokens, self._cells(namespace, tokens)), hit, chunk, victim)

    def grow(self, which: int, num_new: int, coin: int, victim: int) -> bool:
        """Plan more tokens of a running sequence: a further chunk, or what it decodes."""
        idle = self._unplanned()
        if self.in_flight or not idle:
            return False
        sequence = idle[which % len(idle)]
        start = sequence.num_computed
        end = start + 1 + num_new % 9
        if end > MAX_TOKENS:
            return False
        while len(sequence.tokens) < end:  # decoded tokens follow a stream, mostly
            stream = STREAMS[coin % min(self.variety, len(STREAMS))]
            token = stream[len(sequence.tokens)] if coin % 5 or self.variety == 1 else coin // 5 % 2
            sequence.tokens.append(token)
            sequence.cells.append(self._name(sequence.cells[-1], token))
        return self._plan_row(sequence, end, victim, admitted=False)

    def fork(self, which: int) -> bool:
        """Make a second sequence that goes on from the same tokens."""
        idle = self._unplanned()
        if not idle or len(self.running) >= MAX_RUNNING:
            return False
        sequence = idle[which % len(idle)]
        assert sequence.cache is not None
        num = sequence.num_computed
        twin = Sequence(sequence.namespace, sequence.tokens[:num], sequence.cells[:num])
        twin.cache = self.core.fork(sequence.cache)
        twin.num_computed = num
        twin.num_published = sequence.num_published
        twin.publishes = sequence.publishes
        self.running.append(twin)
        return True

    def cancel(self, which: int) -> bool:
        """Finish or cancel a sequence."""
        candidates = self._releasable()
        if not candidates:
            return False
        self._release(candidates[which % len(candidates)])
        return True

    def reclaim(self, num_blocks: int) -> bool:
        """Evict some cached blocks."""
        wanted = num_blocks % 6
        obtainable = self._num_obtainable() - self.core.pool.num_free
        num_free = self.core.pool.num_free
        num_evicted = self.core.blocks.reclaim(wanted)
        assert num_evicted == min(wanted, obtainable)
        assert self.core.pool.num_free == num_free + num_evicted
        return True

    def reset(self) -> bool:
        """Clear the cache, whatever is going on."""
        self._saw("reset with open promises", any(row.promise is not None for row in self.plan))
        self._saw("reset with pins", bool(self.pins))
        num_cached = self.core.pool.num_cached
        self.pins.clear()
        self.model.known.clear()
        self.offered.clear()
        assert self.core.forgetting.reset() == num_cached
        for sequence in self.running:
            sequence.publishes = False
            sequence.num_published = 0
        assert not list(self.core.tree.nodes())
        return True

    def pin(self, which: int, ttl: int, priority: int) -> bool:
        """Pin what a running sequence has published, as far as it is written."""
        if not self.running:
            return False
        sequence = self.running[which % len(self.running)]
        assert sequence.cache is not None
        self.num_pins += 1
        pin_id, expires_at = f"p{self.num_pins}", self.now + 1 + ttl % 20 if ttl % 3 else float("inf")
        tokens = self._written(sequence)
        wanted = ModelPin(pin_id, (sequence.namespace, tokens), priority % 7, self.now, expires_at)
        fits = len(self._pinned() | wanted.prefixes()) <= self.max_pinned
        pinned = self.core.pins.add(
            pin_id,
            sequence.cache.tail,
            self.now,
            ttl_s=None if expires_at == float("inf") else expires_at - self.now,
            priority=wanted.priority,
        )
        assert (pinned is not None) == (fits and bool(tokens))
        self._saw("nothing to pin", not tokens)
        self._saw("beyond the quota", not fits)
        if pinned is not None:
            for other in [other for other in self.pins.values() if other.prefix == wanted.prefix]:
                self._saw("renewed pin")
                del self.pins[other.pin_id]
            self.pins[pin_id] = wanted
        return pinned is not None

    def unpin(self, which: int) -> bool:
        """Take a pin away."""
        if not self.pins:
            assert self.core.pins.remove("p0") is None
            return False
        pin_id = list(self.pins)[which % len(self.pins)]
        assert self.core.pins.remove(pin_id) is not None
        del self.pins[pin_id]
        return True

    def pass_time(self, seconds: int) -> bool:
        """Time goes on, and pins expire."""
        self.now += seconds % 6
        self.core.pins.expire(self.now)
        expired = [pin.pin_id for pin in self.pins.values() if pin.expires_at <= self.now]
        self._saw("expired pin", bool(expired))
        for pin_id in expired:
            del self.pins[pin_id]
        return True

    def give_up(self, which: int) -> bool:
        """Give up a pin for the sake of what a stashed hit would use, or for nothing in particular."""
        spared: list[Node] = []
        if self.stashed and which % 2:
            spared = [node for node in self.stashed[which // 2 % len(self.stashed)].hit.nodes if node.attached]
        return self._give_up(spared)

    # Operations of a runner and of what comes after.

    def run(self, batched_copies: int) -> bool:
        """Run the step that was planned: copies first, then rows in order, each writing before it reads."""
        if self.in_flight:
            return False
        self._take_copies()
        self._copy(batched=bool(batched_copies % 2))
        for row in self.plan:
            self._write(row)
            self._read(row)
        for row in self.plan:  # no later row wrote over an earlier one
            self._read(row)
        self.in_flight = True
        return True

    def apply(self, order: int) -> bool:
        """Commit the step that ran, in plan order."""
        if not self.in_flight:
            return False
        self.in_flight = False
        copies, self.copies = self.copies, []
        if order % 2:
            self._moved(copies)
        for row in self.plan:
            row.sequence.num_computed = row.end
            if row.promise is not None:
                self._commit(row, row.promise)
        if not order % 2:
            self._moved(copies)
        self.plan = []
        return True

    def _moved(self, copies: list[CopyOp]) -> None:
        self.core.moves.copies_done(copies)
        self.core.moves.host_done(self.host_ops)
        self.host_ops = NO_HOST_OPS

    def _not_moved(self, copies: list[CopyOp], order: int) -> None:
        self.core.moves.copies_failed(copies)
        damaged = (
            frozenset(load.host_id for load in self.host_ops.loads[:: 1 + order // 8 % 2]) if order // 4 % 2 else ()
        )
        self._saw("damaged block", bool(damaged))
        self._saw("lost store", bool(self.host_ops.stores))
        self.core.moves.host_failed(self.host_ops, frozenset(damaged))
        self.host_ops = NO_HOST_OPS

    def fail(self, how_far: int, order: int) -> bool:
        """Fail the step: before its copies, or after them and some of its rows, or when all had run."""
        if not self.plan:
            return False
        if not self.in_flight:
            self._take_copies()
            if how_far % 3:
                self._copy(batched=bool(how_far % 2))
                for row in self.plan[: how_far % (len(self.plan) + 1)]:
                    self._write(row)
        self.in_flight = False
        copies, self.copies = self.copies, []
        self._saw("failed step with copies", bool(copies))
        if order % 2:
            self._not_moved(copies, order)
        for row in reversed(self.plan):
            self._abandon(row)
        plan, self.plan = self.plan, []
        for row in plan if order // 2 % 2 else reversed(plan):
            if row.admitted:
                self._release(row.sequence)
                self.waiting = [*self.waiting[1 - MAX_WAITING :], row.sequence]
        if not order % 2:
            self._not_moved(copies, order)
        return True

    # What must hold.

    def check(self) -> None:
        """Check everything, after every operation."""
        core = self.core
        audit(core)
        for block_id in core.pool.free_ids:
            self._poison(block_id)
        tree = {prefix: (node.blocks[0].block_id, node.committed) for prefix, node in self._tree()}
        model = {prefix: (known.block_id, known.committed) for prefix, known in self.model.known.items()}
        assert tree == model, "the tree is not what was published, less what was evicted"
        written = {digest_of(node) for _, node in self._tree() if node.committed}
        assert self.told == written, "events tell of other paths than are cached"
        for known in self.model.known.values():
            if known.committed:
                assert self._bytes(known.block_id) == known.cells, f"published block {known.block_id} has wrong bytes"
        self._check_pins()
        self._check_sequences()
        if core.host.is_on:
            self._check_host(core.host)

    def _check_host(self, host: HostTier) -> None:
        unwritten = {store.host_id for store in host.pending.stores}
        for held in host.blocks.all():
            if held.host_id not in unwritten:
                assert self.arena[held.host_id] == self.evicted[held.name.digest], (
                    f"host block {held.host_id} holds wrong bytes"
                )

    def _check_pins(self) -> None:
        prefix_of = {node: prefix for prefix, node in self._tree()}
        pins = {pin.pin_id: (prefix_of[pin.tail], pin.expires_at_s) for pin in self.core.pins}
        assert pins == {pin.pin_id: (pin.prefix, pin.expires_at) for pin in self.pins.values()}
        assert self.core.pins.num_blocks == len(self._pinned()) <= self.max_pinned
        for prefix in self._pinned():
            assert self.model.known[prefix].committed, "what is pinned went"
        cached = {known.block_id for known in self.model.known.values()} - self._held()
        pinned = {self.model.known[prefix].block_id for prefix in self._pinned()}
        assert self.core.num_available == self.core.pool.num_free + len(cached - pinned)

    def _check_sequences(self) -> None:
        pending = {copy.dst: copy for copy in self.core.moves.pending_copies}
        loading = {load.block_id for load in self.core.host.pending.loads}
        planned = {row.sequence: row for row in self.plan}
        promised = {block_id for row in self.plan for block_id in row.promised_ids}
        for sequence in self.running:
            cache = sequence.cache
            assert cache is not None
            assert cache.num_published == sequence.num_published
            assert (cache.tail is not None) == sequence.publishes
            leans = sequence in planned and planned[sequence].admitted and not self.in_flight
            for start in range(0, sequence.num_computed, BLOCK_SIZE):
                block_id = cache.only_table.block_ids[start // BLOCK_SIZE]
                wanted = sequence.cells[start : min(start + BLOCK_SIZE, sequence.num_computed)]
                if leans and block_id in promised:
                    continue  # an earlier row of this step is going to write it
                if block_id in loading:
                    continue
                if block_id in pending:
                    assert pending[block_id].num_tokens == len(wanted)
                    block_id = pending[block_id].src
                assert self._bytes(block_id)[: len(wanted)] == wanted, f"position {start}: wrong bytes in {block_id}"

    def drain(self) -> None:
        """End everything: nothing may be left behind."""
        if self.in_flight:
            self.apply(1)
        else:
            self.fail(1, 1)
        for sequence in list(self.running):
            self._release(sequence)
        self.core.moves.copies_done(self.core.moves.take_copies())
        self.core.moves.host_failed(self.core.moves.take_host_ops())
        self.check()
        pool = self.core.pool
        assert pool.num_free + pool.num_cached == pool.num_blocks
        assert self.core.num_available == pool.num_blocks - self.core.pins.num_blocks
        while self.pins:
            assert self._give_up([]), "nobody holds a block, so every pin can be given up"
        assert pool.num_blocks == self.core.num_available
        self.core.blocks.reclaim(pool.num_blocks)
        assert pool.num_free == pool.num_blocks
        assert not self.core.tree.roots
        self.check()
        if self.core.host.is_on:
            self.core.moves.host_failed(self.core.moves.take_host_ops())
            self.core.forgetting.reset()
            assert len(self.core.host.blocks.free_ids()) == self.core.host.blocks.num_blocks

    # Inside: planning.

    def _match(self, namespace: int, tokens: list[int]) -> PrefixHit:
        hit = self.core.match(NAMESPACES[namespace], pack(tokens), len(tokens) - 1)
        longest = self.model.longest(namespace, tokens, len(tokens) - 1)
        assert len(hit.held) == self._num_held(namespace, tokens[: len(tokens) - 1], longest.num_blocks)
        if hit.held:
            longest = longest._replace(num_partial_tokens=0)
        assert (len(hit.nodes), hit.num_partial_tokens) == longest
        assert (hit.partial is not None) == bool(hit.num_partial_tokens)
        return hit

    def _num_held(self, namespace: int, tokens: list[int], first: int) -> int:
        """Count the whole blocks of ``tokens`` from block ``first`` on that the host tier holds in a row."""
        if not self.core.host.is_on:
            return 0
        held = {held.name.digest for held in self.core.host.blocks.all()} & self.offered
        index = first
        while (index + 1) * BLOCK_SIZE <= len(tokens) and digest(namespace, tokens[: (index + 1) * BLOCK_SIZE]) in held:
            index += 1
        return index - first

    def _admit(self, sequence: Sequence, hit: PrefixHit, chunk: int, victim: int) -> bool:
        attached = [node for node in hit.nodes if node.attached]
        takes_partial = hit.partial is not None and hit.partial.attached and len(attached) == len(hit.nodes)
        self._saw("stale hit", len(attached) < len(hit.nodes))
        self._saw("lean on a promise", any(not node.committed for node in attached))
        still = list(takewhile(lambda held: held.host_id >= 0, hit.held)) if len(attached) == len(hit.nodes) else []
        self._saw("stale held block", len(still) < len(hit.held))
        cache, num_tokens = self.core.acquire(hit)
        num_loaded = len(cache.only_table.block_ids) - len(attached) if hit.held else 0
        if num_loaded != len(still):
            self._saw("no block for a held one")
            assert num_loaded < len(still)
            assert self._num_obtainable() == 0
        for block_id in cache.only_table.block_ids[len(attached) :] if hit.held else ():
            self._saw("loaded block")
            self._poison(block_id)
        num_whole = (len(attached) + num_loaded) * BLOCK_SIZE
        if takes_partial and num_tokens == num_whole:
            self._saw("no block for a partial match")
            assert self._num_obtainable(pinned=hit.partial) == 0
        else:
            assert num_tokens == num_whole + (hit.num_partial_tokens if takes_partial else 0)
            if takes_partial:
                self._saw("partial match")
                self._poison(cache.only_table.block_ids[-1])
        sequence.cache = cache
        sequence.num_computed = num_tokens
        sequence.num_published = len(attached)
        sequence.publishes = self.publishes
        self.running.append(sequence)
        left = len(sequence.tokens) - num_tokens
        end = len(sequence.tokens) if chunk % 2 else num_tokens + 1 + chunk // 2 % left
        if self._plan_row(sequence, end, victim, admitted=True):
            return True
        if sequence in self.running:
            self._release(sequence)
        self.waiting = [*self.waiting[1 - MAX_WAITING :], sequence]
        return False

    def _plan_row(self, sequence: Sequence, end: int, victim: int, *, admitted: bool) -> bool:
        """Extend, preempting others while memory is short; then promise."""
        start = sequence.num_computed
        while not self._extend(sequence, end):
            if victim % 3 and self._give_up([]):
                self._saw("pin given up for memory")
                continue
            others = [other for other in self._releasable() if other is not sequence]
            if not others or not victim % 4:
                return False
            self._saw("preemption")
            preempted = others[victim % len(others)]
            self._release(preempted)
            if len(preempted.tokens) > 1:
                self.waiting = [*self.waiting[1 - MAX_WAITING :], preempted]
        row = Row(sequence, start, end, admitted, first=sequence.num_published)
        self.plan.append(row)
        self._promise(row)
        return True

    def _extend(self, sequence: Sequence, end: int) -> bool:
        cache = sequence.cache
        assert cache is not None
        start = sequence.num_computed
        blocks = self.core.pool.blocks
        before = list(cache.only_table.block_ids)
        shared = [i for i in range(start // BLOCK_SIZE, len(before)) if blocks[before[i]].num_table_refs > 1]
        num_needed = max(0, -(-end // BLOCK_SIZE) - len(before)) + len(shared)
        num_obtainable = self._num_obtainable()
        done = self.core.extend(cache, start, end)
        assert done == (num_needed <= num_obtainable), f"{num_needed} needed, {num_obtainable} to be had, got {done}"
        for index, block_id in enumerate(cache.only_table.block_ids):
            if index >= len(before) or block_id != before[index]:
                assert index >= start // BLOCK_SIZE, "a block below the write was replaced"
                self._poison(block_id)
        if done:
            self._saw("copy-on-write", bool(shared))
            for block_id in cache.only_table.block_ids[start // BLOCK_SIZE : -(-end // BLOCK_SIZE)]:
                block = blocks[block_id]
                assert block.num_table_refs == 1, "a write would reach another sequence"
                assert block.node is None, "a write would reach a published block"
        else:
            self._saw("memory short")
        return done

    def _promise(self, row: Row) -> None:
        sequence = row.sequence
        assert sequence.cache is not None
        row.promise = self.core.publishing.promise(sequence.cache, pack(sequence.tokens), row.end)
        num_blocks = row.end // BLOCK_SIZE
        assert (row.promise is not None) == (sequence.publishes and num_blocks > sequence.num_published)
        if row.promise is None:
            return
        for index in range(sequence.num_published, num_blocks):
            if self.model.has(sequence.namespace, sequence.tokens, index):
                self._saw("duplicate at promise")
                break
            if self._is_shared(sequence, index):
                self._saw("a fork shares a whole block that is not published")
                break
            self._publish(sequence, index, committed=False)
            row.promised.append((sequence.namespace, tuple(sequence.tokens[: (index + 1) * BLOCK_SIZE])))
            row.promised_ids.append(sequence.cache.only_table.block_ids[index])
            sequence.num_published += 1

    def _commit(self, row: Row, promise: Promise) -> None:
        sequence = row.sequence
        assert sequence.cache is not None
        if sequence.publishes:
            for prefix in row.promised:
                self.model.known[prefix].committed = True
            for index in range(sequence.num_published, row.end // BLOCK_SIZE):
                if not self.model.has(sequence.namespace, sequence.tokens, index):
                    if self._is_shared(sequence, index):
                        break
                    self._publish(sequence, index, committed=True)
                elif not self.model.known[
                    sequence.namespace, tuple(sequence.tokens[: (index + 1) * BLOCK_SIZE])
                ].committed:
                    self._saw("duplicate still in flight at commit")
                    break
                else:
                    self._saw("joined at commit")
                sequence.num_published += 1
        self.core.publishing.commit(promise)

    def _abandon(self, row: Row) -> None:
        if row.promise is None:
            return
        self.core.publishing.abandon(row.promise)
        for prefix in row.promised:
            self.model.known.pop(prefix, None)  # a reset may have been faster
        if row.sequence.publishes:
            row.sequence.num_published = row.first

    def _publish(self, sequence: Sequence, index: int, *, committed: bool) -> None:
        assert sequence.cache is not None
        cells = sequence.cells[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
        prefix = (sequence.namespace, tuple(sequence.tokens[: (index + 1) * BLOCK_SIZE]))
        self.model.known[prefix] = Known(sequence.cache.only_table.block_ids[index], cells, committed)

    def _is_shared(self, sequence: Sequence, index: int) -> bool:
        assert sequence.cache is not None
        block_id = sequence.cache.only_table.block_ids[index]
        return (
            sum(other.cache is not None and block_id in other.cache.only_table.block_ids for other in self.running) > 1
        )

    def _release(self, sequence: Sequence) -> None:
        assert sequence.cache is not None
        self.plan = [row for row in self.plan if row.sequence is not sequence]
        self.running.remove(sequence)
        self.core.release(sequence.cache)
        sequence.cache = None
        sequence.num_computed = sequence.num_published = 0

    def _unplanned(self) -> list[Sequence]:
        planned = [row.sequence for row in self.plan]
        return [sequence for sequence in self.running if sequence not in planned]

    def _releasable(self) -> list[Sequence]:
        """Sequences without an open promise, which no step in flight writes."""
        busy = [row.sequence for row in self.plan if self.in_flight or row.promise is not None]
        return [sequence for sequence in self.running if sequence not in busy]

    # Inside: the runner.

    def _take_copies(self) -> None:
        self.copies = self.core.moves.take_copies()
        self.host_ops = self.core.moves.take_host_ops()
        assert not self.core.moves.pending_copies

    def _copy(self, *, batched: bool) -> None:
        """Move between blocks and slots, then make the copies one after another, or all at once: it must not matter."""
        for store in self.host_ops.stores:
            self.arena[store.host_id] = self._bytes(store.block_id)
            assert POISON not in self.arena[store.host_id], "an evicted block was overwritten before it was stored"
            self._saw("stored block")
        for store in self.host_ops.stores:
            self._poison(store.block_id)
        for load in self.host_ops.loads:
            self.slab[load.block_id * BLOCK_SIZE : (load.block_id + 1) * BLOCK_SIZE] = self.arena[load.host_id]
        if batched:
            sources = [self._bytes(copy.src) for copy in self.copies]
            for copy, source in zip(self.copies, sources, strict=True):
                self.slab[copy.dst * BLOCK_SIZE : (copy.dst + 1) * BLOCK_SIZE] = source
        else:
            for copy in self.copies:
                self.slab[copy.dst * BLOCK_SIZE : (copy.dst + 1) * BLOCK_SIZE] = self._bytes(copy.src)

    def _write(self, row: Row) -> None:
        assert row.sequence.cache is not None
        block_ids = row.sequence.cache.only_table.block_ids
        for position in range(row.start, row.end):
            slot = block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            self.slab[slot] = row.sequence.cells[position]

    def _read(self, row: Row) -> None:
        assert row.sequence.cache is not None
        cells = [cell for block_id in row.sequence.cache.only_table.block_ids for cell in self._bytes(block_id)]
        assert cells[: row.end] == row.sequence.cells[: row.end], "a sequence reads bytes that are not its own"

    def _bytes(self, block_id: int) -> list[int]:
        return self.slab[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE]

    def _poison(self, block_id: int) -> None:
        host = self.core.host
        if any(store.block_id == block_id for store in host.pending.stores):
            return  # its bytes are still wanted, until the step that stores them
        self.slab[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE] = POISONED

    # Inside: the slow looks.

    def _num_obtainable(self, pinned: Node | None = None) -> int:
        """Free blocks, and cached ones under which nothing is held, read by a transfer, or ``pinned``."""
        stuck: set[Node] = set()
        nodes = list(self.core.tree.nodes())
        for node in nodes:
            block = node.blocks[0]
            assert block is not None
            if block.state != BlockState.CACHED or block.num_io_refs or block.num_pin_refs or node is pinned:
                above: Node | None = node
                while above is not None and above not in stuck:
                    stuck.add(above)
                    above = above.parent
        return self.core.pool.num_free + sum(node not in stuck for node in nodes)

    def _pinned(self) -> set[Prefix]:
        return {prefix for pin in self.pins.values() for prefix in pin.prefixes()}

    def _held(self) -> set[int]:
        return {
            block_id for sequence in self.running if sequence.cache for block_id in sequence.cache.only_table.block_ids
        }

    def _written(self, sequence: Sequence) -> tuple[int, ...]:
        """Return what of ``sequence`` is published, and committed from the first block on."""
        num_blocks = 0
        while num_blocks < sequence.num_published:
            prefix = (sequence.namespace, tuple(sequence.tokens[: (num_blocks + 1) * BLOCK_SIZE]))
            if not self.model.known[prefix].committed:
                break
            num_blocks += 1
        return tuple(sequence.tokens[: num_blocks * BLOCK_SIZE])

    def _give_up(self, spared: list[Node]) -> bool:
        """Give up a pin, and look at all of them: it must be the least of those that gain something."""
        spared_ids = {node.blocks[0].block_id for node in spared}
        gaining = []
        for pin in self.pins.values():
            kept = set().union(*(other.prefixes() for other in self.pins.values() if other is not pin))
            freed = {self.model.known[prefix].block_id for prefix in pin.prefixes() - kept}
            if freed - self._held() - spared_ids:
                gaining.append(pin)
        least = min(gaining, key=lambda pin: pin.rank(self.now), default=None)
        self._saw("pin that gains nothing", len(gaining) < len(self.pins))
        blocks = [block for node in spared for block in node.blocks if block is not None]
        assert self.core.pins.give_up(self.now, blocks) == (least is not None)
        if least is None:
            return False
        assert self.core.pins.dropped[-1][::2] == (least.pin_id, "memory")
        del self.pins[least.pin_id]
        return True

    def _tree(self) -> Iterator[tuple[Prefix, Node]]:
        """Yield every node with the prefix that its path spells."""
        stack: list[tuple[Prefix, Node]] = [
            ((NAMESPACES.index(key), ()), node) for key, node in self.core.tree.roots.items()
        ]
        while stack:
            (namespace, tokens), node = stack.pop()
            for key, child in node.children.items():
                prefix = (namespace, tokens + tuple(memoryview(key).cast("i")))
                yield prefix, child
                stack.append((prefix, child))

    def _new_sequence(self, prompt: tuple[int, int, int, int]) -> Sequence:
        """Make a prompt: some of a stream, then some tokens of its own."""
        which, length, num_own, own = prompt
        which %= self.variety
        tokens = list(STREAMS[which % len(STREAMS)][: length % 25])
        num_own = num_own % 7 if self.variety > 1 else int(num_own % 8 == 0)
        tokens += [own >> bit & 1 for bit in range(num_own if tokens else num_own + 1)]
        namespace = which // len(STREAMS)
        return Sequence(namespace, tokens, self._cells(namespace, tokens))

    def _cells(self, namespace: int, tokens: list[int]) -> list[int]:
        cells: list[int] = []
        name = namespace
        for token in tokens:
            name = self._name(name, token)
            cells.append(name)
        return cells

    def _name(self, before: int, token: int) -> int:
        """Return the name of the history that goes on from ``before``, or from a namespace's number, with ``token``."""
        return self._names.setdefault((before, token), len(NAMESPACES) + len(self._names))

    def _saw(self, what: str, holds: bool = True) -> None:
        if holds:
            self.seen[what] = self.seen.get(what, 0) + 1

    def _on_event(self, event: Event) -> None:
        if isinstance(event, CacheReset):
            self.told.clear()
        if isinstance(event, BlocksPublished):
            self.told.update(map(digest_of, event.nodes))
        if isinstance(event, BlocksPublished | BlocksReused | CacheReset | HostTransfer | PinDropped):
            return
        assert isinstance(event, BlockEvicted)
        self.told.discard(digest_of(event.node))
        if event.cause != "reset":
            self._saw(event.cause)
            for (namespace, tokens), known in self.model.known.items():
                if known.block_id == event.block_id and self.core.host.is_on:
                    self.evicted[digest(namespace, tokens)] = known.cells
                    self.offered.add(digest(namespace, tokens))
            self.model.evicted(event.block_id)


# Drivers.

MAX_INT = 2**16

OPERATIONS: tuple[tuple[str, int], ...] = (
    ("admit", 20),
    ("readmit", 6),
    ("stash", 4),
    ("admit_stashed", 5),
    ("grow", 24),
    ("fork", 6),
    ("cancel", 6),
    ("reclaim", 3),
    ("run", 12),
    ("apply", 14),
    ("fail", 4),
    ("reset", 1),
    ("pin", 6),
    ("unpin", 1),
    ("pass_time", 3),
    ("give_up", 1),
)


def random_operations(
    seed: int,
    num_operations: int,
    policy: str,
    *,
    variety: int = 0,
    enable_prefix_caching: bool = True,
    num_host_blocks: int = 0,
) -> dict[str, int]:
    """Do ``num_operations`` random operations with everything checked after each. Return how often what happened.

    The same seed does the same operations; a failure names the seed and the operation, and the last ones before it.
    Without a ``variety`` the seed chooses one.
    """
    rng = Random(seed)
    machine = Machine(
        policy,
        num_blocks=rng.choice((13, 18, 24)),
        variety=variety or rng.choice((1, 2, 9)),
        enable_prefix_caching=enable_prefix_caching,
        num_host_blocks=num_host_blocks,
    )
    names = rng.choices([name for name, _ in OPERATIONS], [weight for _, weight in OPERATIONS], k=num_operations)
    log: list[str] = []
    try:
        for name in names:
            arguments = _random_arguments(rng, name)
            log.append(f"{name}{arguments}")
            getattr(machine, name)(*arguments)
            machine.check()
        machine.drain()
    except BaseException as error:
        error.add_note(f"random_operations({seed}, {num_operations}, {policy!r}): operation {len(log)}")
        error.add_note("last operations: " + " ".join(log[-12:]))
        raise
    return machine.seen


def _random_arguments(rng: Random, name: str) -> tuple[object, ...]:
    def some() -> int:
        return rng.randrange(MAX_INT)

    arguments: dict[str, Callable[[], tuple[object, ...]]] = {
        "admit": lambda: ((some(), some(), some(), some()), some(), some()),
        "stash": lambda: ((some(), some(), some(), some()),),
        "readmit": lambda: (some(), some(), some()),
        "admit_stashed": lambda: (some(), some(), some()),
        "grow": lambda: (some(), some(), some(), some()),
        "fail": lambda: (some(), some()),
        "pin": lambda: (some(), some(), some()),
        "reset": tuple,
    }
    return arguments.get(name, lambda: (some(),))()


ints = st.integers(0, MAX_INT - 1)
prompts = st.tuples(ints, ints, ints, ints)


class KVCoreMachine(RuleBasedStateMachine):
    """The same machine, driven by hypothesis, which shrinks what it finds."""

    policy = "lru"

    @initialize(
        num_blocks=st.sampled_from((24, 13, 6)),
        variety=st.sampled_from((1, 2, 9)),
        num_host_blocks=st.sampled_from((0, 3, 30)),
    )
    def start(self, num_blocks: int, variety: int, num_host_blocks: int) -> None:
        """Begin with an empty pool."""
        self.machine = Machine(self.policy, num_blocks=num_blocks, variety=variety, num_host_blocks=num_host_blocks)

    @rule(prompt=prompts, chunk=ints, victim=ints)
    def admit(self, prompt: tuple[int, int, int, int], chunk: int, victim: int) -> None:
        """See Machine."""
        self.machine.admit(prompt, chunk, victim)

    @rule(which=ints, chunk=ints, victim=ints)
    def readmit(self, which: int, chunk: int, victim: int) -> None:
        """See Machine."""
        self.machine.readmit(which, chunk, victim)

    @rule(prompt=prompts)
    def stash(self, prompt: tuple[int, int, int, int]) -> None:
        """See Machine."""
        self.machine.stash(prompt)

    @rule(which=ints, chunk=ints, victim=ints)
    def admit_stashed(self, which: int, chunk: int, victim: int) -> None:
        """See Machine."""
        self.machine.admit_stashed(which, chunk, victim)

    @rule(which=ints, num_new=ints, coin=ints, victim=ints)
    def grow(self, which: int, num_new: int, coin: int, victim: int) -> None:
        """See Machine."""
        self.machine.grow(which, num_new, coin, victim)

    @rule(which=ints)
    def fork(self, which: int) -> None:
        """See Machine."""
        self.machine.fork(which)

    @rule(which=ints)
    def cancel(self, which: int) -> None:
        """See Machine."""
        self.machine.cancel(which)

    @rule(num_blocks=ints)
    def reclaim(self, num_blocks: int) -> None:
        """See Machine."""
        self.machine.reclaim(num_blocks)

    @rule()
    def reset(self) -> None:
        """See Machine."""
        self.machine.reset()

    @rule(which=ints, ttl=ints, priority=ints)
    def pin(self, which: int, ttl: int, priority: int) -> None:
        """See Machine."""
        self.machine.pin(which, ttl, priority)

    @rule(which=ints)
    def unpin(self, which: int) -> None:
        """See Machine."""
        self.machine.unpin(which)

    @rule(seconds=ints)
    def pass_time(self, seconds: int) -> None:
        """See Machine."""
        self.machine.pass_time(seconds)

    @rule(which=ints)
    def give_up(self, which: int) -> None:
        """See Machine."""
        self.machine.give_up(which)

    @rule(batched_copies=ints)
    def run(self, batched_copies: int) -> None:
        """See Machine."""
        self.machine.run(batched_copies)

    @rule(batched_copies=ints)
    def run_and_apply(self, batched_copies: int) -> None:
        """See Machine."""
        self.machine.run(batched_copies)
        self.machine.check()
        self.machine.apply(batched_copies)

    @rule(order=ints)
    def apply(self, order: int) -> None:
        """See Machine."""
        self.machine.apply(order)

    @rule(how_far=ints, order=ints)
    def fail(self, how_far: int, order: int) -> None:
        """See Machine."""
        self.machine.fail(how_far, order)

    @invariant()
    def everything_holds(self) -> None:
        """See Machine.check."""
        if hasattr(self, "machine"):
            self.machine.check()

    def teardown(self) -> None:
        """End everything, and look for what is left behind."""
        if hasattr(self, "machine"):
            self.machine.drain()


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("policy", POLICIES)
def test_hypothesis_finds_nothing(policy: str) -> None:
    """About 2,000 operations a policy, found and shrunk by hypothesis."""
    machine = type(f"KVCoreMachine_{policy}", (KVCoreMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=40, stateful_step_count=50, suppress_health_check=list(HealthCheck)),
    )


@pytest.mark.quick(every=11)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", [*POLICIES, "picky"])
def test_random_operations(policy: str, seed: int) -> None:
    """7,200 operations over all policies."""
    random_operations(seed, 900, policy)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("num_host_blocks", [1, 4, 9, 40])
def test_random_operations_with_a_host_tier(num_host_blocks: int) -> None:
    """3,600 operations: what is evicted is kept, comes back, is damaged, and is lost for want of room."""
    random_operations(num_host_blocks, 900, "lru", num_host_blocks=num_host_blocks)


def test_random_operations_without_caching() -> None:
    """With caching off nothing is ever shared, and nothing is cached."""
    seen = random_operations(0, 900, "lru", enable_prefix_caching=False)
    assert "lean on a promise" not in seen
    assert "partial match" not in seen
    assert "allocation" not in seen


WORTH_TESTING = (
    "allocation",
    "beyond the quota",
    "copy-on-write",
    "damaged block",
    "duplicate at promise",
    "duplicate still in flight at commit",
    "expired pin",
    "failed step with copies",
    "joined at commit",
    "lean on a promise",
    "loaded block",
    "lost store",
    "memory short",
    "no block for a held one",
    "nothing to pin",
    "partial match",
    "pin given up for memory",
    "pin that gains nothing",
    "preemption",
    "renewed pin",
    "reset with open promises",
    "reset with pins",
    "stale held block",
    "stale hit",
    "stored block",
)


@pytest.mark.long
@IN_FULL
def test_what_is_worth_testing_happens(in_full: bool) -> None:
    """A control: the driver reaches the corners that it exists for."""
    seen: Counter[str] = Counter()
    for seed in until_seen(range(8), seen, WORTH_TESTING, in_full=in_full):
        seen.update(random_operations(seed, 1500, "lru", variety=1))
        seen.update(random_operations(seed, 900, "lru", num_host_blocks=(4, 9, 40)[seed % 3]))
    for what in WORTH_TESTING:
        assert seen[what] > 0, f"{what} never happened: {seen}"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo"])
def test_very_many_random_operations(policy: str) -> None:
    """400,000 operations over the three policies, 16 seeds each."""
    for seed in range(16):
        random_operations(1000 + seed, 8400, policy)
