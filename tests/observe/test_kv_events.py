"""What KV events say is what the tree has, whatever happens to it: the machines of kv, and an index that hears."""

from __future__ import annotations

from functools import partial

import pytest
from index.tree_truth import holds_of, known_of
from kv import test_groups_machine, test_machine
from observe.ledger_house import House

from pagefold.index import ExtraKeys, PrefixIndex, block_hashes, tenant_salt
from pagefold.index.wire import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch, encode_batch
from pagefold.kv import KEEP_ALL, KeepRule, KVCore, Namespace
from pagefold.observe.kv_event_batch import BatchMaker
from pagefold.observe.kv_events import KVEvents

SIZE = 4
GroupsMachine = test_groups_machine.Machine


class Heard:
    """Notes, batches as they would be sent, and an index that is told of them."""

    def __init__(self, block_size: int = SIZE, rules=(KEEP_ALL,), max_queue_size: int = 100_000) -> None:
        self.noted = KVEvents(max_queue_size, lambda: 7.0)
        self.maker = BatchMaker(block_size, rules)
        self.index = PrefixIndex()
        self.batches = []

    def __call__(self, event) -> None:
        self.noted(event)

    def hear(self) -> None:
        while (noted := self.noted.take()) is not None:
            batch = decode_batch(encode_batch(self.maker.make(noted)))
            self.batches.append(batch)
            self.index.apply("a", batch)

    def check(self, core: KVCore) -> None:
        self.hear()
        assert not self.noted.has_failed
        assert self.index.holds("a") == holds_of(core)

    def events(self, kind: type) -> list:
        return [event for batch in self.batches for event in batch.events if isinstance(event, kind)]


def in_groups(monkeypatch, name: str, seed: int, num_operations: int, **how) -> int:
    """Do what the machine of groups does; return how many paths were looked at."""
    rules = test_groups_machine.RULES[name]
    heard = Heard(test_groups_machine.SIZE, rules)
    has_sinks = any(rule.num_sinks for rule in rules)
    seen = []

    class Machine(GroupsMachine):
        def check(self) -> None:
            super().check()
            heard.check(self.core)
            for known in known_of(self.core):
                nodes = known.path()
                if known.node.children or not all(node.committed for node in nodes):
                    continue
                num_whole = self.core.rules.num_whole(nodes)
                seen.append(num_whole)
                if not has_sinks:  # of which events cannot tell
                    assert heard.index.match(known.hashes).get("a", 0) == num_whole

    monkeypatch.setattr(test_groups_machine, "KVCore", partial(KVCore, emit=heard))
    monkeypatch.setattr(test_groups_machine, "Machine", Machine)
    test_groups_machine.random_operations(seed, name, num_operations, **how)
    return len(seen)


@pytest.mark.quick(every=7)
@pytest.mark.parametrize("name", [name for name, rules in test_groups_machine.RULES.items() if not rules[0].packs])
def test_of_several_groups_it_is_what_each_has(monkeypatch, name):
    assert in_groups(monkeypatch, name, 1, 80, has_host=True)
    assert in_groups(monkeypatch, name, 2, 50)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", [name for name, rules in test_groups_machine.RULES.items() if not rules[0].packs])
def test_of_several_groups_for_long(monkeypatch, name, seed):
    assert in_groups(monkeypatch, name, seed, 600, has_host=bool(seed % 2), policy=("lru", "s3-fifo", "2q")[seed % 3])


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("seed", range(8))
def test_of_one_group_it_is_the_tree(monkeypatch, seed):
    heard = Heard(test_machine.BLOCK_SIZE)

    class Machine(test_machine.Machine):
        def _on_event(self, event) -> None:
            heard(event)
            super()._on_event(event)

        def check(self) -> None:
            super().check()
            heard.check(self.core)

    monkeypatch.setattr(test_machine, "Machine", Machine)
    seen = test_machine.random_operations(seed, 400, "lru", num_host_blocks=(0, 30)[seed % 2])
    assert seen["allocation"]
    assert heard.events(BlockRemoved)


def test_a_path_is_told_in_one_event_and_as_vllm_tells_it():
    heard = Heard()
    house = House(listen=heard)
    tokens = list(range(100, 111))
    house.send(tokens)
    house.run()
    heard.check(house.core)
    hashes = [int.from_bytes(one[-8:], "big") for one in block_hashes(tokens, SIZE)]
    assert heard.batches[0].events == [AllBlocksCleared()]
    (told,) = heard.events(BlockStored)
    assert told == BlockStored(hashes, None, tokens[:8], SIZE, None, "GPU", None, extra_keys=[None, None], group_idx=0)
    house.send([*tokens[:8], *range(8)])
    house.run()
    later = heard.hear() or heard.events(BlockStored)[1]
    assert (later.parent_block_hash, later.token_ids) == (hashes[1], list(range(8)))


def test_tenants_and_salts_are_told_apart_and_by_digests():
    heard = Heard()
    house = House(listen=heard)
    tokens = list(range(9))
    names = [Namespace(model="m", tenant=tenant, cache_salt=salt) for tenant in ("", "acme") for salt in ("", "s")]
    for namespace in names:
        house.send(tokens, namespace.key())
    house.run()
    heard.check(house.core)
    assert len(house.core.tree.roots) == len({event.block_hashes[0] for event in heard.events(BlockStored)}) == 4
    for namespace in names:
        keys = ExtraKeys(tenant_salt(namespace.tenant, namespace.cache_salt))
        assert heard.index.match(block_hashes(tokens, SIZE, keys)) == {"a": 2}
    assert not any(b"acme" in encode_batch(batch) for batch in heard.batches)
    salts = [event.extra_keys[0] for event in heard.events(BlockStored)]
    assert None in salts
    assert ("s",) in salts


def test_a_window_is_told_with_its_size():
    heard = Heard(rules=(KEEP_ALL, KeepRule(8)))
    house = House(listen=heard, rules=(KEEP_ALL, KeepRule(8)))
    house.send(list(range(40)))
    house.run()
    heard.check(house.core)
    told = {(event.group_idx, event.kv_cache_spec_kind) for event in heard.events(BlockStored)}
    assert told == {(0, "full_attention"), (1, "sliding_window")}
    assert {event.kv_cache_spec_sliding_window for event in heard.events(BlockStored)} == {None, 8}


def test_what_is_dropped_leaves_a_gap_and_is_made_good():
    heard = Heard(max_queue_size=3)
    house = House(listen=heard)
    for first in range(6):
        house.send([first] * 9)
        house.run()
    numbers = []
    while (noted := heard.noted.take()) is not None:
        numbers.append(noted.number)
    assert numbers == [0, 1, 2]
    assert heard.noted.num_dropped
    heard.noted.tell_all()
    noted = heard.noted.take()
    assert noted.number == 3 + heard.noted.num_dropped
    heard.index.apply("a", heard.maker.make(noted))
    assert heard.index.holds("a") == holds_of(house.core)


def test_after_a_bug_of_ours_nothing_is_found(caplog):
    heard = Heard()
    house = House(listen=heard)
    house.send(list(range(9)))
    house.run()
    heard.check(house.core)
    heard.noted._places = None
    house.send(list(range(20, 29)))
    house.run()
    assert "KV events have failed at BlocksPublished" in caplog.text
    heard.noted._places = {}
    heard.noted.give_up()
    house.send(list(range(9)))
    house.run()
    heard.hear()
    assert not heard.index.holds("a")
    assert house.core.pool.num_cached


def test_after_a_reset_nothing_is_found():
    heard = Heard()
    house = House(listen=heard)
    house.send(list(range(9)))
    house.run()
    heard.check(house.core)
    assert heard.index.holds("a")
    house.core.forgetting.reset()
    heard.check(house.core)
    assert not heard.index.holds("a")
    house.send(list(range(9)))
    house.run()
    heard.check(house.core)
    assert heard.index.holds("a")
