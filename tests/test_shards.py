"""Every long test is in exactly one shard, and the shards are about as long as each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shards import BOUND_S, TOGETHER_S, UNKNOWN_S, WHOLE, Deck, parse_shard, seconds_of_functions

TESTS = Path(__file__).parent
CASES = st.lists(
    st.builds("tests/{}.py::test_{}[{}]".format, st.sampled_from("ab"), st.sampled_from("cdef"), st.integers(0, 30)),
    unique=True,
)
SECONDS = st.dictionaries(
    st.sampled_from(["tests/a.py::test_c", "tests/a.py::test_d", "tests/b.py::test_c"]), st.floats(0, 999)
)


@given(CASES, SECONDS, st.integers(1, 9))
def test_every_case_is_in_exactly_one_shard(cases, seconds, num_shards):
    deck = Deck(cases, seconds)
    shards = deck.deal(num_shards)
    assert len(shards) == num_shards
    for case in cases:
        assert sum(deck.unit_of(case) in shard for shard in shards) == 1
    assert sum(deck.seconds.values()) == pytest.approx(
        sum(seconds.get(case.partition("[")[0], UNKNOWN_S) for case in cases)
    )


@given(CASES, SECONDS, st.integers(1, 9))
def test_no_shard_is_longer_than_another_by_more_than_a_unit(cases, seconds, num_shards):
    deck = Deck(cases, seconds)
    loads = [sum(deck.seconds[unit] for unit in shard) for shard in deck.deal(num_shards)]
    assert max(loads) - min(loads) <= max(deck.seconds.values(), default=0.0) + 1e-6


def test_all_see_the_same_deal():
    """However the tests are ordered, as they are by a seed of their own in each run."""
    cases = [f"tests/a.py::test_{name}[{number}]" for name in "abc" for number in range(7)]
    seconds = {"tests/a.py::test_a": 100.0, "tests/a.py::test_b": 1.0}
    assert Deck(cases, seconds).deal(3) == Deck(reversed(cases), seconds).deal(3)


def test_cases_stay_together_unless_that_takes_too_long():
    cases = [f"tests/a.py::test_{name}[{number}]" for name in "ab" for number in range(4)]
    deck = Deck(cases, {"tests/a.py::test_a": TOGETHER_S / 4, "tests/a.py::test_b": TOGETHER_S / 4 + 1})
    assert [deck.unit_of(case) for case in cases] == ["tests/a.py::test_a"] * 4 + cases[4:]


def test_two_workers_share_a_shard():
    deck = Deck(["a::x", "a::y", "a::z"], {"a::x": 10.0, "a::y": 6.0, "a::z": 5.0})
    assert deck.time_of(deck.seconds) == 11.0


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "x/2", "1/0"])
def test_there_is_no_such_shard(text):
    with pytest.raises(ValueError, match=r"there is no shard|invalid literal"):
        parse_shard(text)
    assert parse_shard("3/3") == (3, 3)


@pytest.mark.long
def test_pytest_deals_what_there_is():
    """As `make test-long` does, of folders that are quick to read."""
    folders = [str(TESTS / name) for name in ("kv", "scheduler")]
    whole, *shards = (_collected(*folders, *more) for more in (["-m", "long"], ["--shard=1/2"], ["--shard=2/2"]))
    assert len(whole) > 5
    assert sorted([*shards[0], *shards[1]]) == sorted(whole)
    assert all(shards)


def _collected(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "pytest_timeout", "-p", "xdist.plugin"]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # those take seconds to load
    done = subprocess.run(
        [*command, *arguments], env=alone, cwd=TESTS.parent, capture_output=True, text=True, check=True
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_the_table_knows_tests_that_there_are():
    for function, seconds in seconds_of_functions().items():
        file, name = function.split("::")
        assert re.search(rf"^def {name}\(", (TESTS.parent / file).read_text(encoding="utf-8"), re.MULTILINE), function
        assert 0 < seconds < BOUND_S, f"{function}: cut it (parametrize)"


def test_what_a_file_makes_for_all_its_cases_is_made_in_one_shard():
    file = WHOLE[0]
    cases = [f"{file}::test_a[{number}]" for number in range(9)] + [f"{file}::test_b", "tests/b.py::test_c"]
    deck = Deck(cases, {f"{file}::test_a": TOGETHER_S})
    assert {deck.unit_of(case) for case in cases} == {file, "tests/b.py::test_c"}
    assert (Path(__file__).parent.parent / file).is_file()


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("place", [0, pytest.param(-1, marks=pytest.mark.long), 1, 2, 3])
def test_of_cases_that_are_marked_quick_each_so_manieth_is(place, request):
    assert bool(request.node.get_closest_marker("long")) == (place % 3 != 0)
