"""Of which places windows stay cached: where conversations go on, and where they part."""

import pytest
from landmark_driver import RULES, SIZE, WINDOW, a_core_with_landmarks, packed, run, text

from pagefold.kv import KEEP_ALL, HostTier, KeepRule, KVCore, audit, make_policy


def press(core, num_left):
    """Let somebody need all memory but what ``num_left`` cached blocks take."""
    num = core.pool.num_cached - num_left
    assert num >= 0
    core.blocks.reclaim(num)
    audit(core)


def needed_behind(core, num_tokens):
    """How many blocks of all groups whoever goes on behind so many tokens needs, or inside the last block of them."""
    end = num_tokens // SIZE
    return sum(len({*rule.places(end, SIZE), *rule.places(end - 1, SIZE), end - 1}) for rule in core.rules)


def test_a_divergence_whose_window_is_gone_is_computed_once_and_kept_from_then_on():
    core = KVCore(200, block_size=SIZE, rules=RULES)
    shared = text("S", 40)
    assert run(core, shared + text("A", 24)) == 0
    while core.blocks.windows.stale_block() is not None:  # what A left behind goes
        core.blocks.reclaim(1)
    hit = core.match(b"", packed(shared + text("B", 24)), 63)
    assert (hit.num_blocks, hit.num_lost) == (0, 10)
    assert run(core, shared + text("B", 24)) == 0
    while core.blocks.windows.stale_block() is not None:
        core.blocks.reclaim(1)
    assert run(core, shared + text("C", 24)) == 40


@pytest.mark.parametrize(
    "rules",
    [
        RULES,
        (KeepRule(WINDOW),),
        (KeepRule(WINDOW, is_chunked=True), KEEP_ALL),
        (KeepRule(WINDOW, num_sinks=1), KEEP_ALL),
        (KeepRule(WINDOW, num_sinks=SIZE),),
        (KeepRule(WINDOW, num_sinks=SIZE + 1), KeepRule(WINDOW)),
    ],
)
def test_the_third_to_diverge_hits_though_each_presses_the_others_out(rules):
    core = KVCore(60, block_size=SIZE, rules=rules)
    shared = text("S", 40)
    found = [run(core, shared + text(name, 24)) for name in "AB"]
    found += [run(core, shared + text(name, 24)) for name in "CDE"]
    assert found[2:] == [40, 40, 40]


def test_windows_at_ends_of_messages_stay_while_memory_is_to_spare_and_go_before_ends_of_paths():
    core = KVCore(200, block_size=SIZE, rules=RULES)
    tokens = text("S", 30) + text("A", 34)
    run(core, tokens, message_ends=(30, 64))
    assert core.match(b"", packed(text("S", 30) + text("B", 20)), 49).num_blocks == 30 // SIZE
    while core.blocks.windows.stale_block() is not None:
        core.blocks.reclaim(1)
    assert core.match(b"", packed(text("S", 30) + text("B", 20)), 49).num_blocks == 30 // SIZE
    assert core.match(b"", packed(text("S", 32)), 24).num_blocks < 24 // SIZE, "where nothing ends nothing is kept"
    press(core, needed_behind(core, 64))
    assert core.match(b"", packed([*tokens, 0]), 64).num_blocks == 16
    assert core.match(b"", packed(text("S", 30) + text("B", 20)), 49).num_blocks == 0


def test_where_the_last_message_of_a_prompt_ends_stays_like_the_end_of_a_path():
    core = KVCore(200, block_size=SIZE, rules=RULES)
    prompt = text("S", 30) + text("U", 18)
    run(core, prompt + text("A", 40), message_ends=(30, 48))
    assert core.blocks.windows.stale_block() is not None
    while core.blocks.windows.stale_block() is not None:
        core.blocks.reclaim(1)
    assert run(core, prompt + text("B", 40), message_ends=(30, 48)) == 48, "another answer begins behind the prompt"


def test_a_conversation_that_goes_on_lets_go_of_where_it_asked():
    core = KVCore(300, block_size=SIZE, rules=RULES)
    first = text("S", 30) + text("U", 18)
    said = first + text("A", 40)
    run(core, said, message_ends=(48,))
    assert any(landmark.is_firm for landmark in core.blocks.windows.landmarks)
    assert run(core, said + text("B", 40), message_ends=(48, 88)) == 88
    at = {(landmark.node.depth + 1) * SIZE: landmark.is_firm for landmark in core.blocks.windows.landmarks}
    assert at == {48: False, 88: False}


def test_a_firm_place_goes_with_its_path():
    core = KVCore(300, block_size=SIZE, rules=RULES)
    for name in "ABC":
        run(core, text("S", 40) + text(name, 24))
    press(core, needed_behind(core, 40))
    assert core.match(b"", packed(text("S", 40) + text("U", 9)), 48).num_blocks == 10, "all behind it went first"
    press(core, needed_behind(core, 40) - 4)
    assert core.match(b"", packed(text("S", 40) + text("U", 9)), 48).num_blocks == 0
    core.blocks.reclaim(core.pool.num_cached)
    assert len(core.blocks.windows.landmarks) == 0


def test_a_path_that_lost_its_end_goes_before_others_lose_theirs():
    core = KVCore(300, block_size=SIZE, rules=RULES, policy=make_policy("lru"))
    texts = [text(name, 60) for name in "ABCD"]
    for one in texts:
        run(core, one, message_ends=(1,))
    press(core, sum(needed_behind(core, len(one)) for one in texts) - 1)
    while any(core.blocks.windows.landmarks):
        core.blocks.windows.kept_block() or core.blocks.windows.firm_block()
    found = []
    for _ in range(30):
        core.blocks.reclaim(1)
        found.append([core.match(b"", packed([*one, 0]), 60).num_blocks for one in texts])
        audit(core)
    partly = [sum(0 < each < 15 for each in one) for one in found]
    assert max(partly) == 0, "what is left of a path that is cut can be gone on from nowhere"
    whole = [sum(each == 15 for each in one) for one in found]
    assert whole == sorted(whole, reverse=True)
    assert whole[14] == 3, "the first has gone as a whole before the second was touched"


def test_a_firm_place_that_is_used_outlives_ends_that_are_not():
    core = KVCore(90, block_size=SIZE, rules=RULES)
    for name in "AB":
        run(core, text("S", 40) + text(name, 24))
    for number in range(20):
        fresh = [50_000 + 100 * number + at for at in range(24)]
        assert run(core, text("S", 40) + fresh) == 40


def test_nothing_is_marked_where_all_groups_keep_all():
    core = KVCore(100, block_size=SIZE)
    run(core, text("S", 40), message_ends=(10, 20))
    run(core, text("S", 40) + text("A", 8), message_ends=(10, 20))
    assert len(core.blocks.windows.landmarks) == 0


def test_a_reset_leaves_no_landmark():
    core = KVCore(100, block_size=SIZE, rules=RULES)
    for name in "AB":
        run(core, text("S", 40) + text(name, 24), message_ends=(20, 40))
    assert len(core.blocks.windows.landmarks) > 0
    core.forgetting.reset()
    audit(core)
    assert len(core.blocks.windows.landmarks) == 0


def test_transfers_and_pins_change_nothing_of_what_was_left_behind():
    core = a_core_with_landmarks()
    windows = core.blocks.windows
    before = (len(windows._stale), len(windows._kept), len(windows._firm), len(windows._idle))
    assert min(before) > 0
    for block in windows.all():
        core.pool.pin_io(block)
        core.blocks.update_evictable(block.node)
    assert windows.all() == []
    core.blocks.unpin_io([block.block_id for block in core.pool.blocks if block.num_io_refs])
    audit(core)
    assert (len(windows._stale), len(windows._kept), len(windows._firm), len(windows._idle)) == before


def test_another_answer_may_be_asked_for_more_than_once():
    for num_tokens in range(46, 51):  # the prompt ends on the edge of a block, and off it
        core = KVCore(300, block_size=SIZE, rules=RULES)
        prompt = text("S", 30) + text("U", num_tokens - 30)
        for name in "ABCD":
            while core.blocks.windows.stale_block() is not None:
                core.blocks.reclaim(1)
            found = run(core, prompt + text(name, 40), message_ends=(30, num_tokens))
            assert name == "A" or found >= num_tokens // SIZE * SIZE


def test_who_comes_back_says_nothing_of_others():
    core = KVCore(300, block_size=SIZE, rules=RULES)
    tokens = text("S", 64)
    run(core, tokens, message_ends=(40,))
    for _ in range(3):
        run(core, [*tokens, 0], message_ends=(40,), is_return=True)
    (landmark,) = core.blocks.windows.landmarks
    assert landmark.ends_prompt
    assert landmark.num_partings == 0


def test_the_window_of_a_firm_place_goes_to_the_host_with_its_path():
    core = KVCore(300, block_size=SIZE, rules=RULES, host=HostTier(300))
    for name in "ABC":
        run(core, text("S", 40) + text(name, 24))
    core.blocks.reclaim(core.pool.num_cached)
    ops = core.moves.take_host_ops()
    core.moves.host_done(ops)
    assert core.pool.num_cached == 0
    assert core.match(b"", packed(text("S", 40) + text("U", 9)), 48).num_blocks == 10
    assert core.match(b"", packed(text("S", 40) + text("A", 24) + [0]), 64).num_blocks == 16
    assert core.match(b"", packed(text("S", 32)), 31).num_blocks < 7, "what was left behind, and nobody wanted, did not"


def test_who_goes_on_lets_go_of_where_it_asked_though_others_began_between():
    core = KVCore(300, block_size=SIZE, rules=RULES)
    first = text("S", 8)
    said = first + text("A", 56)
    run(core, said, message_ends=(8,))
    run(core, said[:40] + text("B", 20))  # parts behind that
    run(core, said + text("C", 20), message_ends=(8, 84))
    at = {(landmark.node.depth + 1) * SIZE: landmark.ends_prompt for landmark in core.blocks.windows.landmarks}
    assert not at[8]
    assert not at[64]


def test_who_ends_where_others_went_on_makes_no_window_last_for_ever():
    core = KVCore(300, block_size=SIZE, rules=RULES)
    tokens = text("S", 64)
    run(core, tokens, message_ends=(1,))
    cache, start = core.acquire(core.match(b"", packed(tokens), 32))  # and is cancelled
    assert start == 32
    core.release(cache)
    run(core, tokens[:40], message_ends=(1,))
    audit(core)
    idle = [block.node.depth for block in core.blocks.windows._idle]
    assert idle
    assert min(idle) >= 64 // SIZE - 3, "the window of the end alone"


@pytest.mark.parametrize("num_sinks", [1, SIZE, SIZE + 1])
def test_sinks_stay_as_long_as_anything_of_their_path_does(num_sinks):
    core = KVCore(200, block_size=SIZE, rules=(KeepRule(WINDOW, num_sinks=num_sinks),))
    num_sink_blocks = -(-num_sinks // SIZE)
    for name in "AB":
        run(core, text("S", 40) + text(name, 24), message_ends=(20, 40, 64))
    paths = [text("S", 40) + text(name, 24) + [0] for name in "AB"]
    while core.pool.num_cached > num_sink_blocks:
        num_cached = core.pool.num_cached
        assert core.blocks.reclaim(1) >= 1
        audit(core)
        assert core.pool.num_cached < num_cached
        nodes = core.tree.match(b"", packed(paths[0]), 64).nodes
        assert all(node.blocks[0] is not None for node in nodes[:num_sink_blocks])
    assert [core.match(b"", packed(path), 64).num_blocks for path in paths] == [num_sink_blocks] * 2


def test_a_place_that_is_kept_is_found_with_its_sinks():
    rules = (KeepRule(WINDOW, num_sinks=SIZE + 1), KEEP_ALL)
    core = KVCore(200, block_size=SIZE, rules=rules)
    run(core, text("S", 40) + text("A", 24), message_ends=(40, 64))
    while core.blocks.windows.stale_block() is not None:
        core.blocks.reclaim(1)
    assert run(core, text("S", 40) + text("B", 24)) == 40
    cache, _ = core.acquire(core.match(b"", packed([*text("S", 40), 0]), 40))
    table = cache.tables[0]
    assert (len(table.sink_ids), table.num_trimmed) == (2, 40 // SIZE - 2)
    assert table.first_ids(2) == table.sink_ids
    assert [table.at(at) is not None for at in range(10)] == [True] * 2 + [False] * 6 + [True] * 2
    core.release(cache)
    audit(core)
