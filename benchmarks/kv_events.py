"""KV events: an index of them beside the trees of the replicas that sent them.

Four replicas, each the real cache (:class:`~pagefold.kv.KVCore`) under conversations of two tenants that do not all
fit; their events as they are sent, encoded and decoded; a wire that drops batches, some beyond what is kept for those
who ask, and repeats others; a replica that is reset, and one whose publisher begins anew. Compared are all blocks of
all replicas, and the longest prefixes of conversations.

    python benchmarks/kv_events.py [--num-events N] [--seed N] [--json FILE]
"""

from __future__ import annotations

import time
from array import array
from random import Random
from typing import NamedTuple

from report import Row, machine, parser, print_report

from pagefold.index import ExtraKeys, PrefixIndex, block_hashes, tenant_salt
from pagefold.index.order import EventOrder, Numbered
from pagefold.index.wire import encode_batch
from pagefold.kv import KEEP_ALL, KVCore, Namespace, make_policy
from pagefold.observe.kv_event_batch import BatchMaker
from pagefold.observe.kv_events import KVEvents

BLOCK_SIZE = 16
NUM_BLOCKS = 4_000
NUM_REPLICAS = 4
NUM_CONVERSATIONS = 400
TENANTS = ("", "acme")
NUM_KEPT = 64
DROPPED, REPEATED, LOST = 0.02, 0.02, 0.0005
"""Of all batches: that are dropped alone, that come once more, and behind which more are dropped than are kept."""


# The index.


class Replica:
    """A cache, what it publishes, and the wire to the index.

    Args:
        name: of the replica.
        index: what hears it.
        rng: of prompts, and of what the wire does.
    """

    def __init__(self, name: str, index: PrefixIndex, rng: Random) -> None:
        self.name = name
        self.rng = rng
        self.num_events = self.num_dropped = self.num_repeated = self.num_replaced = 0
        self._begin()
        self.order = EventOrder(index, name, self._ask)
        self._turns: dict[int, array[int]] = {}
        self._num_unheard = 0
        self._is_lossy = True

    def _begin(self) -> None:
        """Begin with nothing cached, and a publisher that counts from 0."""
        self.noted = KVEvents()
        self._maker = BatchMaker(BLOCK_SIZE, (KEEP_ALL,))
        self._kept: list[Numbered] = []
        self.core = KVCore(NUM_BLOCKS, block_size=BLOCK_SIZE, policy=make_policy("lru"), emit=self.noted)

    def turn(self) -> None:
        """Let one of the conversations go on; and send what that did to blocks."""
        which = self.rng.randrange(NUM_CONVERSATIONS)
        tokens = self._turns.get(which)
        if tokens is None or len(tokens) > 100 * BLOCK_SIZE:
            own = Random(f"{which % 20} system")
            tokens = self._turns[which] = array("i", (own.randrange(50_000) for _ in range(20 * BLOCK_SIZE)))
        tokens.extend(self.rng.randrange(50_000) for _ in range(self.rng.randrange(1, 20 * BLOCK_SIZE)))
        self._compute(namespace_of(which), tokens)
        self._send()

    def reset(self) -> None:
        """Forget all that is cached."""
        self.core.forgetting.reset()
        self._send()

    def restart(self) -> None:
        """Let another publisher, with an empty cache, take the place of this one."""
        self.num_replaced += 1
        self._begin()
        self._send()

    def heal(self) -> None:
        """Let all arrive that was sent, and what is told anew."""
        self._num_unheard, self._is_lossy = 0, False
        self.order.check()
        self._send()

    def _compute(self, namespace: Namespace, tokens: array[int]) -> None:
        core, packed = self.core, tokens.tobytes()
        hit = core.match(namespace.key(), packed, len(tokens) - 1)._replace(partial=None, num_partial_tokens=0)
        cache, num_found = core.acquire(hit)
        assert core.extend(cache, num_found, len(tokens)), "there is room for any one prompt"
        promise = core.publishing.promise(cache, packed, len(tokens))
        if promise is not None:
            core.publishing.commit(promise)
        core.release(cache)

    def _send(self) -> None:
        while (noted := self.noted.take()) is not None:
            for change in noted.changes:
                self.num_events += (change.stored | change.removed).bit_count() or 1
            batch = Numbered(noted.number, encode_batch(self._maker.make(noted)))
            self._kept = [*self._kept[1 - NUM_KEPT :], batch]
            self._carry(batch)

    def _carry(self, batch: Numbered) -> None:
        """Carry a batch to the index, or lose it, or let it come after it was asked for."""
        draw = self.rng.random() if self._is_lossy else 1.0
        if draw < LOST:
            self._num_unheard = NUM_KEPT + 10
        if self._num_unheard or draw < LOST + DROPPED:
            self._num_unheard = max(0, self._num_unheard - 1)
            self.num_dropped += 1
            return
        if draw < LOST + DROPPED + REPEATED:  # it is asked for before it comes
            self.num_repeated += 1
            self.order.check()
        self.order.take(batch)

    def _ask(self, first: int) -> list[Numbered]:
        if self._kept and first < self._kept[0].number:
            self.noted.tell_all()
        return [batch for batch in self._kept if batch.number >= first]


def namespace_of(which: int) -> Namespace:
    """Return whose a conversation is."""
    return Namespace(tenant=TENANTS[which % len(TENANTS)])


class Compared(NamedTuple):
    """Blocks of trees and of the index, and prefixes that were looked up."""

    num_blocks: int
    num_differing: int
    num_prefixes: int
    num_other_prefixes: int


def compare(index: PrefixIndex, replicas: list[Replica]) -> Compared:
    """Compare what an index has with the trees, walked."""
    num_blocks = num_differing = num_prefixes = num_others = 0
    for replica in replicas:
        maker, told = BatchMaker(BLOCK_SIZE, (KEEP_ALL,)), KVEvents()
        truth = PrefixIndex()
        told._on_nodes(Walked(tuple(replica.core.tree.nodes())))  # noqa: SLF001 - in no step
        while (noted := told.take()) is not None:
            truth.apply(replica.name, maker.make(noted))
        held, right = index.holds(replica.name), truth.holds(replica.name)
        assert len(right) == sum(node.committed for node in replica.core.tree.nodes()), "the walk has all nodes"
        num_blocks += len(right)
        num_differing += sum(held.get(key) != right.get(key) for key in held.keys() | right.keys())
        for which, tokens in replica._turns.items():  # noqa: SLF001 - its own prompts
            namespace = namespace_of(which)
            keys = ExtraKeys(tenant_salt(namespace.tenant))
            found = index.match(block_hashes(tokens, BLOCK_SIZE, keys)).get(replica.name, 0)
            hit = replica.core.match(namespace.key(), tokens.tobytes(), len(tokens))
            num_prefixes += 1
            num_others += found != len(hit.nodes)
    return Compared(num_blocks, num_differing, num_prefixes, num_others)


class Walked(NamedTuple):
    """All nodes of a tree, as if they were published now."""

    nodes: tuple[object, ...]


def measure_index(num_events: int, seed: int) -> list[Row]:
    """Compare an index with its replicas after so many events."""
    rng = Random(seed)
    index = PrefixIndex()
    replicas = [Replica(f"replica-{number}", index, Random(f"{seed} {number}")) for number in range(NUM_REPLICAS)]
    begin_s = time.perf_counter()
    while sum(replica.num_events for replica in replicas) < num_events:
        replica = rng.choice(replicas)
        draw = rng.random()
        if draw < 0.0005:
            replica.reset()
        elif draw < 0.001:
            replica.restart()
        else:
            replica.turn()
    for replica in replicas:
        replica.heal()
    seconds = time.perf_counter() - begin_s
    compared = compare(index, replicas)
    are_known = all(state.is_known for state in index.replicas().values())
    counts = [replica.order.counts for replica in replicas]
    values: dict[str, object] = {
        "num_events": sum(replica.num_events for replica in replicas),
        "num_dropped_batches": sum(replica.num_dropped for replica in replicas),
        "num_late_batches": sum(replica.num_repeated for replica in replicas),
        "num_restarts": sum(replica.num_replaced for replica in replicas),
        **{f"heard_{name}": sum(getattr(one, name) for one in counts) for name in counts[0]._fields},
        **compared._asdict(),
        "seconds": round(seconds, 1),
    }
    what = f"index against {NUM_REPLICAS} replicas' trees after {values['num_events']:,} events"
    differing = f"{compared.num_differing} of {compared.num_blocks:,} blocks differ"
    others = f"{compared.num_other_prefixes} of {compared.num_prefixes:,}"
    lost = sum(one.num_lost for one in counts)
    return [
        Row(what, "equal", differing, are_known and not compared.num_differing, values),
        Row("its longest prefixes of conversations that are others", "0", others, not compared.num_other_prefixes),
        Row("batches dropped, late, and losses that were made good", "", f"{values['num_dropped_batches']:,}, "
            f"{values['num_late_batches']:,}, {lost:,}"),
    ]  # fmt: skip


def main() -> None:
    """Measure, and report."""
    options = parser(__doc__)
    options.add_argument("--num-events", type=int, default=1_000_000, help="of blocks")
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    print_report("kv_events", measure_index(chosen.num_events, chosen.seed), machine(), chosen.json)


if __name__ == "__main__":
    main()
