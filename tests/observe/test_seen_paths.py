"""SeenPaths against a dict: what is found, what goes when there is no room, what a reset makes of all."""

from __future__ import annotations

from random import Random

import pytest

from pagefold.observe.seen_paths import BYTES_PER_PATH, Mark, SeenPaths, State, key_of


def test_a_key_is_the_beginning_of_a_digest() -> None:
    assert key_of(bytes(range(32))) == key_of(bytes(range(8)) + bytes(24)) != key_of(bytes(32))


@pytest.mark.parametrize("capacity", [1, 2, 7, 64])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_remembered_is_right(capacity: int, seed: int) -> None:
    """Every path that is found has what was noted of it last; keys collide in the index all the time."""
    random = Random(seed)
    paths = SeenPaths(capacity)
    twin: dict[int, tuple[State, float, int]] = {}
    for turn in range(600):
        key = random.randrange(3 * capacity) * (2 * capacity + 1) + random.randrange(3)
        if random.random() < 0.5:
            entry = paths.enter(key)
            state = random.choice((State.CACHED, State.CACHED, State.DISTRUSTED))
            paths.put(entry, state, float(turn))
            paths.expect(entry, turn + 1)
            twin[key] = (state, float(turn), turn + 1)
        elif key in twin and (entry := paths.find(key)) >= 0:
            paths.evict(entry, float(turn), causer=7, score=0.5)
            twin[key] = (State.EVICTED, float(turn), 0)
        if random.random() < 0.01:
            paths.reset(float(turn))
            kept = {key: one for key, one in twin.items() if one[0] is not State.CACHED}
            twin = {key: kept.get(key, (State.RESET, -1.0, one[2])) for key, one in twin.items()}
        found = {key: entry for key in twin if (entry := paths.find(key)) >= 0}
        assert len(found) == min(len(twin), paths.num_paths) or capacity < len(twin)
        assert len(found) == paths.num_paths <= capacity
        for known, entry in found.items():
            state, when_s, owner = twin[known]
            assert (paths.state(entry), paths.owner(entry)) == (state, owner)
            assert state is State.RESET or paths.when_s(entry) == when_s
        for known in set(twin) - set(found):
            del twin[known]  # forgotten for want of room


def test_what_is_cached_stays_as_long_as_anything_else_can_go() -> None:
    paths = SeenPaths(100)
    for key in range(20):
        paths.put(paths.enter(key), State.CACHED, 0.0)
    for key in range(1000, 2000):
        entry = paths.enter(key)
        paths.put(entry, State.CACHED, float(key))
        paths.evict(entry, float(key), causer=0, score=None)
    assert all(paths.find(key) >= 0 for key in range(20))
    assert paths.num_paths == 100
    assert paths.lost_until_s is not None
    assert paths.lost_until_s < 1999


def test_nobody_waits_for_the_hand() -> None:
    """All entries were used when the first one makes room: it looks at a few of them, and not at all."""
    paths = SeenPaths(100_000)
    for key in range(100_000):
        entry = paths.enter(key)
        paths.put(entry, State.CACHED, 0.0)
        if key % 5:
            paths.evict(entry, 1.0, causer=0, score=None)
    looked_at = 0
    state = paths.state

    def counted(entry: int) -> State:
        nonlocal looked_at
        looked_at += 1
        return state(entry)

    paths.state = counted  # type: ignore[method-assign]
    for key in range(100_000, 100_100):
        looked_at = 0
        paths.put(paths.enter(key), State.CACHED, 2.0)
        assert looked_at < 100
    assert sum(paths.find(key) >= 0 for key in range(0, 100_000, 5)) == 20_000, "what is cached stays"


def test_it_tells_what_was_forgotten_last() -> None:
    paths = SeenPaths(2)
    for key in (1, 2):
        paths.put(paths.enter(key), State.DISTRUSTED, float(key))
    assert paths.lost_until_s is None
    paths.put(paths.enter(3), State.CACHED, 3.0)
    assert paths.lost_until_s in (1.0, 2.0)


def test_all_eras_may_pass() -> None:
    """An era is a byte: after 256 resets nothing may rise from the dead."""
    paths = SeenPaths(8)
    paths.put(paths.enter(1), State.CACHED, 0.0)
    for turn in range(1, 700):
        paths.reset(float(turn))
        assert paths.state(paths.find(1)) is State.RESET
        paths.put(paths.enter(2), State.CACHED, turn + 0.5)
        assert paths.state(paths.find(2)) is State.CACHED


def test_marks() -> None:
    paths = SeenPaths(2)
    entry = paths.enter(5)
    paths.put(entry, State.CACHED, 0.0)
    paths.mark(entry, Mark.PIN_EXPIRED)
    paths.blame(entry, 9)
    assert paths.has(entry, Mark.PART_GONE)
    assert paths.causer(entry) == 9
    paths.evict(entry, 1.0, causer=3, score=-2.5)
    assert paths.has(entry, Mark.PIN_EXPIRED), "why it was not kept is known behind its end too"
    assert not paths.has(entry, Mark.PART_GONE)
    assert (paths.causer(entry), paths.score(entry)) == (3, -2.5)
    paths.put(entry, State.CACHED, 2.0)
    assert not paths.has(entry, Mark.PIN_EXPIRED)
    paths.evict(entry, 3.0, causer=0, score=None)
    assert paths.score(entry) is None
    paths.evict(entry, 3.0, causer=0, score=float("inf"))
    assert paths.score(entry) is None, "no JSON can say it"


def test_an_entry_takes_what_it_says() -> None:
    paths = SeenPaths(10_000)
    assert paths.num_bytes / paths.capacity == pytest.approx(BYTES_PER_PATH, rel=0.01)
