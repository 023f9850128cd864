"""HostTier: what is kept, in which order it goes, and what pins, failures and resets do to it."""

from __future__ import annotations

from array import array
from random import Random
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from pagefold.events import HostTransfer
from pagefold.kv import Arbiter, HostTier, KVCore, LinkModel, LoadOp, Namespace, StoreOp, audit
from pagefold.kv.block import BlockId
from pagefold.kv.names import digest_of, names_behind, path_digest, root_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.events import Event
    from pagefold.kv import SequenceCache

NS = Namespace(tenant="t").key()


def pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


class Core(KVCore):
    """A core of blocks of 4, whose steps are one call."""

    def __init__(self, num_blocks: int = 3, num_held: int = 4) -> None:
        self.tier = HostTier(num_held)
        self.told: list[Event] = []
        super().__init__(num_blocks, block_size=4, host=self.tier, emit=self.told.append)

    def step(self, tokens: Sequence[int]) -> tuple[SequenceCache, int]:
        """Compute all tokens; return their table and how many were there before."""
        cache, num_found = self.acquire(self.match(NS, pack(tokens), len(tokens) - 1))
        assert self.extend(cache, num_found, len(tokens))
        promise = self.publishing.promise(cache, pack(tokens), len(tokens))
        ops = self.moves.take_host_ops()
        if promise is not None:
            self.publishing.commit(promise)
        self.moves.host_done(ops)
        audit(self)
        return cache, num_found

    def serve(self, tokens: Sequence[int]) -> int:
        """Compute all tokens and end; return how many were there before."""
        cache, num_found = self.step(tokens)
        self.release(cache)
        audit(self)
        return num_found


def held_keys(tier: HostTier) -> set[tuple[int, ...]]:
    return {tuple(memoryview(held.name.key).cast("i")) for held in tier.blocks.all()}


A, B, C = (list(range(start, start + 9)) for start in (0, 100, 200))


def test_what_was_evicted_is_loaded_and_published_again():
    core = Core()
    assert [core.serve(A), core.serve(B), core.serve(A)] == [0, 0, 8]
    assert (core.tier.num_stored, core.tier.num_loaded) == (4, 2)
    assert len(core.match(NS, pack(A), 8).nodes) == 2
    assert core.match(NS, pack(A), 8).held == ()


def test_what_is_sooner_computed_than_restored_is_left_on_the_host():
    core = Core()
    core.serve(A)
    core.serve(B)
    hit = core.match(NS, pack(A), 8)
    assert len(hit.held) == 2
    assert core.worth(hit) is hit, "nobody weighs"
    core.arbiter = Arbiter(1000, 4, compute_s_per_token=1e-3)
    core.arbiter.links["host"] = LinkModel(0.0, 1e6)
    assert core.worth(hit) is hit, "a block in 1 ms, and computed in 4"
    core.arbiter.links["host"] = LinkModel(0.0, 2e5)
    left = core.worth(hit)
    assert (left.held, left.nodes) == ((), hit.nodes)
    assert core.match(NS, pack(A), 8).held, "it is still there"


def test_the_device_is_looked_at_first_and_goes_on_on_the_host():
    core = Core(num_blocks=5)
    core.serve(A)
    core.blocks.reclaim(1)  # the tail
    core.moves.host_done(core.moves.take_host_ops())
    hit = core.match(NS, pack(A), 8)
    assert (len(hit.nodes), len(hit.held), hit.partial) == (1, 1, None)
    cache, num_found = core.acquire(hit)
    assert (num_found, cache.num_published, len(cache.only_table.block_ids)) == (8, 1, 2)
    assert core.tier.pending.loads == [LoadOp(hit.held[0].host_id, cache.only_table.block_ids[1])]


def test_what_came_back_is_not_stored_again():
    core = Core()
    for tokens in (A, B, A, B, A, B):
        core.serve(tokens)
    assert core.tier.num_stored == 4
    assert core.tier.blocks.num_held == 4
    assert core.tier.blocks.num_dropped == 0


def test_used_longest_ago_goes_first_and_tails_before_heads():
    core = Core(num_held=3)
    core.serve(A)
    core.serve(B)
    assert held_keys(core.tier) == {tuple(A[:4]), tuple(A[4:8])}
    core.serve(C)  # B's two blocks come, and there is room for three: A's tail goes
    assert held_keys(core.tier) == {tuple(A[:4]), tuple(B[:4]), tuple(B[4:8])}
    assert core.serve([*A[:4], 7]) == 4  # A's head is used again: now B's tail goes
    core.serve([*range(300, 305)])
    assert tuple(A[:4]) in held_keys(core.tier)
    assert tuple(B[4:8]) not in held_keys(core.tier)


def test_host_blocks_of_the_step_are_nobody_elses():
    """What a load reads is not given to what the same step evicts for it."""
    core = Core(num_held=2)
    core.serve(A)
    core.serve(B)  # A takes both places
    cache, num_found = core.step(A)  # loads both, and evicts both blocks of B, for which there is no place
    assert num_found == 8
    assert core.tier.blocks.num_dropped == 2
    core.release(cache)


def test_a_step_stores_and_another_of_its_requests_loads_the_same():
    core = Core(num_blocks=6)
    core.serve(A)
    big, _ = core.acquire(core.match(NS, pack(range(500, 520)), 19))
    assert core.extend(big, 0, 20)  # five blocks: A's tail is evicted
    assert core.tier.pending.stores
    cache, num_found = core.acquire(core.match(NS, pack(A), 8))
    assert num_found == 4, "there is no block to load into"
    core.release(big)
    core.release(cache)
    cache, num_found = core.acquire(core.match(NS, pack(A), 8))
    assert num_found == 8
    ops = core.moves.take_host_ops()
    assert [store.host_id for store in ops.stores] == [load.host_id for load in ops.loads]
    core.moves.host_done(ops)
    core.release(cache)
    audit(core)


def test_a_failed_step_loses_what_it_was_to_store_and_nothing_else():
    core = Core()
    core.serve(A)
    core.serve(B)  # A is on the host
    cache, _ = core.acquire(core.match(NS, pack(A), 8))
    ops = core.moves.take_host_ops()
    assert (len(ops.stores), len(ops.loads)) == (1, 2)
    core.moves.host_failed(ops)
    core.release(cache)
    audit(core)
    assert held_keys(core.tier) == {tuple(A[:4]), tuple(A[4:8])}


def test_a_damaged_block_is_forgotten_and_the_rest_of_its_path_is_not_found():
    core = Core()
    core.serve(A)
    core.serve(B)
    cache, _ = core.acquire(core.match(NS, pack(A), 8))
    ops = core.moves.take_host_ops()
    core.moves.host_failed(ops, frozenset({ops.loads[0].host_id}))
    core.release(cache)
    audit(core)
    assert core.match(NS, pack(A), 8).held == ()
    assert held_keys(core.tier) == {tuple(A[4:8])}


def test_a_table_that_goes_before_the_step_takes_its_loads_with_it():
    core = Core()
    core.serve(A)
    core.serve(B)
    cache, _ = core.acquire(core.match(NS, pack(A), 8))
    assert core.tier.pending.loads
    core.release(cache)
    assert not core.tier.pending.loads
    assert core.pool.num_free == 2, "and one block of B is still there"
    audit(core)


def test_a_reset_forgets_also_what_a_step_in_flight_uses():
    core = Core()
    core.serve(A)
    core.serve(B)
    cache, _ = core.acquire(core.match(NS, pack(A), 8))
    ops = core.moves.take_host_ops()
    core.forgetting.reset()
    audit(core)
    assert core.tier.blocks.num_held == 0
    assert core.match(NS, pack(A), 8).held == ()
    core.moves.host_done(ops)
    core.release(cache)
    audit(core)
    assert core.tier.blocks.free_ids()
    assert sorted(core.tier.blocks.free_ids()) == [0, 1, 2, 3]


def test_a_hit_that_is_stale_loads_only_what_is_still_there():
    core = Core(num_held=2)
    core.serve(A)
    core.serve(B)
    hit = core.match(NS, pack(A), 8)
    assert len(hit.held) == 2
    core.serve(C)  # B takes the places
    cache, num_found = core.acquire(hit)
    assert num_found == 0
    core.release(cache)
    audit(core)


def test_namespaces_do_not_meet():
    core = Core()
    core.serve(A)
    core.serve(B)
    other = Namespace(tenant="u").key()
    assert core.match(NS, pack(A), 8).held
    assert not core.match(other, pack(A), 8).held
    assert root_digest(NS) != root_digest(other)


def test_with_caching_off_nothing_is_kept():
    core = KVCore(4, block_size=4, enable_prefix_caching=False, host=HostTier(4))
    cache, _ = core.acquire(core.match(NS, pack(A), 8))
    core.extend(cache, 0, 9)
    core.release(cache)
    core.blocks.reclaim(4)
    assert core.moves.take_host_ops() == ([], [], [])


def test_a_path_is_named_by_all_its_tokens():
    """The digest of a node is that of its tokens, folded from the root: the slow twin."""
    core = Core(num_blocks=64)
    rng = Random(3)
    tokens = [rng.randrange(1000) for _ in range(160)]
    cache, _ = core.step(tokens)
    digest = root_digest(NS)
    for index in range(40):
        digest = path_digest(digest, pack(tokens[4 * index : 4 * index + 4]))
        node = core.pool.blocks[cache.only_table.block_ids[index]].node
        assert node is not None
        assert digest_of(node) == digest
    core.release(cache)


def test_a_digest_is_not_enough():
    """What is held is compared by its tokens too."""
    core = Core()
    core.serve(A)
    core.serve(B)
    held = core.match(NS, pack(A), 8).held[0]
    held.name = held.name._replace(key=pack([9, 9, 9, 9]))
    assert core.match(NS, pack(A), 8).held == ()


def test_stores_and_loads_are_told_apart():
    assert StoreOp(block_id=1, host_id=2) == (1, 2, False)
    assert LoadOp(host_id=2, block_id=1) == (2, 1)


def test_a_transfer_is_told_that_only_stores_or_only_loads():
    core = Core()
    core.serve(A)
    assert not [event for event in core.told if isinstance(event, HostTransfer)]
    core.serve(B)  # A leaves
    core.blocks.reclaim(9)
    core.serve([300])  # B leaves
    core.serve(A)
    told = [event for event in core.told if isinstance(event, HostTransfer)]
    assert told == [HostTransfer(2, 0), HostTransfer(2, 0), HostTransfer(0, 2)]


def test_what_is_ready_ends_with_the_first_that_no_slower_tier_was_given() -> None:
    tier = HostTier(4, notes_unsaved=True)
    root = root_digest(NS)
    names = names_behind(root, root, pack(range(16)), 16)
    for index, name in enumerate(names[:3]):
        assert tier.keep(name, BlockId(index))
        tier.done(tier.take())
    assert tier.blocks.num_ready(9) == 1, "the free one; all that is idle is unsaved"
    for name in names[:2]:
        del tier.blocks.unsaved[name.digest]
    assert tier.blocks.num_ready(9) == 3
    assert tier.blocks.num_ready(2) == 2
    tier.blocks.unsaved[names[0].digest] = tier.blocks.get(names[0].digest)
    assert tier.blocks.num_ready(9) == 1, "that one goes first"


OWNER, OTHER = object(), object()


def arena_of(paths: Sequence[tuple[int, ...]], owners: Sequence[object], *, num_blocks: int = 64) -> HostTier:
    """An arena that holds all nodes of some paths of blocks of one token; each is claimed by who has used it."""
    tier = HostTier(num_blocks, notes_unsaved=True)
    root = root_digest(NS)
    for path, owner in zip(paths, owners, strict=True):
        for name in reversed(names_behind(root, root, pack(path), 4)):
            tier.keep(name, BlockId(0), claim=owner)
        tier.done(tier.take())
    return tier


@given(
    paths=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=1, max_size=7),
    owners=st.lists(st.sampled_from([OWNER, OTHER]), min_size=7, max_size=7),
    dropped=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=2),
    begins=st.lists(st.integers(0, 2), max_size=2).map(tuple),
    rest=st.lists(st.integers(0, 2), max_size=4).map(tuple),
)
def test_what_one_session_alone_has_used_behind_a_path_makes_room_first(paths, owners, dropped, begins, rest):
    """A slow twin asks of every node whether all nodes from where the prompt parts down to it are the owner's."""
    tier = arena_of(paths, owners[: len(paths)])
    root = root_digest(NS)

    def digest(path: tuple[int, ...]) -> bytes:
        return names_behind(root, root, pack(path), 4)[-1].digest if path else root

    users: dict[tuple[int, ...], set[object]] = {}
    for path, owner in zip(paths, owners, strict=False):
        for end in range(1, len(path) + 1):
            users.setdefault(path[:end], set()).add(owner)
    for path in dropped:
        held = tier.blocks.get(digest(path))
        if held is not None:
            tier.blocks.forget(held)
            del users[path]
    gone = set()
    for path in users:
        if path[: len(begins)] != begins or len(path) == len(begins):
            continue
        shared = len(begins)
        while shared < len(path) and path[len(begins) : shared + 1] == rest[: shared + 1 - len(begins)]:
            shared += 1
        between = [path[:end] for end in range(len(begins) + 1, shared + 1)]
        below = [path[:end] for end in range(shared + 1, len(path) + 1)]
        if below and all(each in users for each in between) and all(users.get(each) == {OWNER} for each in below):
            gone.add(digest(path))
    num_gone = tier.supersede_behind(digest(begins), pack(rest), OWNER)
    assert {held.name.digest for held in tier.blocks.found() if held.is_superseded} == gone
    assert num_gone == len(gone)
    assert not gone & tier.blocks.unsaved.keys(), "no slower tier is given it"
    in_order = [held.name.digest for held in tier.blocks.idle()]
    assert set(in_order[: len(gone)]) == gone
    deep = [held.name for held in tier.blocks.idle()][: len(gone)]
    places = {name.path: place for place, name in enumerate(deep)}
    assert all(places[name.path] < places[name.parent] for name in deep if name.parent in places), "tails go first"
    assert tier.supersede_behind(digest(begins), pack(rest), OWNER) == 0


def test_what_is_superseded_makes_room_before_what_is_older_until_it_is_used_again() -> None:
    tier = arena_of([(1, 2), (5, 6)], [OTHER, OWNER], num_blocks=4)
    root = root_digest(NS)
    assert tier.supersede_behind(root, b"", OWNER) == 2
    (held,) = tier.match(root, pack((5,)), 4)
    tier.blocks.unpin(tier.blocks.pin([held]))  # somebody has gone on from it
    new = names_behind(root, root, pack((7, 8)), 4)
    assert tier.keep(new[0], BlockId(0))
    assert held_keys(tier) == {(1,), (2,), (5,), (7,)}, "(6,) was of no use"
    assert tier.keep(new[1], BlockId(0))
    assert (2,) not in held_keys(tier), "of the others the oldest"


def test_what_is_superseded_while_it_is_moved_makes_room_first_when_that_is_over() -> None:
    tier = arena_of([(1,), (5,)], [OTHER, OWNER], num_blocks=2)
    root = root_digest(NS)
    (held,) = tier.match(root, pack((5,)), 4)
    for pin, unpin in (
        (lambda: tier.blocks.pin([held]), lambda: tier.blocks.unpin([held])),
        (lambda: tier.blocks.pin_to_write(held), lambda: tier.blocks.unpin_written(held)),
    ):
        pin()
        tier.blocks.supersede(held)
        unpin()
        assert next(tier.blocks.idle()) is held
        tier.blocks.touch(held)
        assert not held.is_superseded
