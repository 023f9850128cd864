"""A search for the culprit, choice by choice: corners that requests with a scheduler around them seldom come to."""

from __future__ import annotations

from pagefold.scheduler.suspicion import MAX_FAILED_ALONE, MAX_FAILED_IN_COMPANY, Suspicion


class Search:
    """A suspicion about requests that all run; names will do for them."""

    def __init__(self, names: str) -> None:
        self.running = list(names)
        self.suspicion = Suspicion()

    def chosen(self) -> str:
        found = self.suspicion.choose(self.running, [])
        return "nobody" if found is None else "".join(sorted(found))

    def ran(self, names: str) -> None:
        """These are chosen next, and their step runs."""
        assert self.chosen() == names
        self.suspicion.ran(list(names))

    def failed(self, names: str, planned: str = "") -> set[str]:
        """These are chosen next, and the step fails with those of them that could be planned."""
        assert self.chosen() == names
        return set(self.suspicion.failed(list(planned or names), []))

    def begin(self) -> None:
        self.suspicion.failed(self.running, [])


def fail_in_company(search: Search) -> None:
    """``a`` runs alone, ``b`` does, and both together do not."""
    search.ran("a")
    search.ran("b")
    assert search.failed("ab") == set()


def test_what_failed_alone_is_forgotten_when_it_runs_alone():
    search = Search("ab")
    search.begin()
    assert search.failed("a") == set()
    search.ran("b")
    for _ in range(MAX_FAILED_ALONE - 2):
        assert search.failed("a") == set()
    fail_in_company(search)
    for _ in range(MAX_FAILED_ALONE - 1):
        assert search.failed("a") == set()
    assert search.failed("a") == {"a"}


def test_who_runs_alone_is_tried_with_the_others_after_these_have_run_again():
    search = Search("abc")
    search.begin()
    assert search.failed("ab") == set()
    search.ran("a")
    assert search.chosen() == "b", "nobody is clear beside it"
    search.suspicion.ran(["b"])
    search.ran("a")
    search.ran("ab")
    search.ran("c")
    search.ran("ab")
    search.ran("abc")
    assert search.chosen() == "nobody"


def test_where_only_clear_ones_could_be_planned_with_who_joins_they_are_suspected():
    search = Search("abcd")
    search.begin()
    search.ran("ab")
    assert search.failed("abcd") == set()
    search.ran("c")
    search.ran("ab")
    assert search.failed("abc", planned="ab") == set()
    assert search.chosen() == "a"


def test_where_nobody_of_a_lot_could_be_planned_those_who_were_are_suspected():
    search = Search("abcd")
    search.begin()
    search.ran("ab")
    assert search.failed("abcd", planned="ab") == set()
    assert search.chosen() == "a"
    search.suspicion.ran(["a"])
    assert search.chosen() == "cd", "who could not be planned is suspected no more"


def test_who_is_chosen_and_cannot_be_planned_is_suspected_no_more():
    search = Search("abcd")
    search.begin()
    assert search.chosen() == "ab"
    assert search.chosen() == "abcd", "the other half, with those who are clear now"
    assert search.chosen() == "nobody"


def test_who_is_to_join_and_cannot_be_planned_is_suspected_no_more():
    search = Search("ab")
    search.begin()
    search.ran("a")
    search.ran("b")
    search.ran("a")
    assert search.chosen() == "ab"
    assert search.chosen() == "nobody"


def test_who_is_gone_does_not_join():
    search = Search("ab")
    search.begin()
    search.ran("a")
    search.ran("b")
    search.running.remove("b")
    assert search.chosen() == "nobody"


def test_what_failed_in_company_is_forgotten_when_it_joins():
    search = Search("abc")
    search.begin()
    assert search.failed("ab") == set()
    search.ran("a")
    search.ran("b")
    search.ran("a")
    assert search.failed("ab") == set()
    assert search.failed("c") == set()
    search.ran("b")
    search.ran("a")
    search.ran("ab")
    search.ran("c")
    assert search.failed("ab") == set(), "the clear ones, who are suspected in their turn"
    search.ran("a")
    search.ran("c")
    search.ran("ac")
    for count in range(1, MAX_FAILED_IN_COMPANY + 1):
        search.ran("b")
        search.ran("ac")
        assert search.failed("abc") == ({"b"} if count == MAX_FAILED_IN_COMPANY else set())


def test_nothing_counts_against_anybody_when_a_search_is_over():
    search = Search("ab")
    search.begin()
    assert search.failed("a") == set()
    search.ran("b")
    fail_in_company(search)
    assert search.suspicion.num_counted == 1
    assert search.failed("a") == set()
    search.running.remove("a")
    assert search.chosen() == "nobody"
    assert search.suspicion.num_counted == 0


def test_a_device_is_blamed_anew():
    search = Search("abcdefghijkl")
    ended = {}
    while not ended:
        chosen = search.suspicion.choose(search.running, []) if search.suspicion.is_on else search.running
        ended = search.suspicion.failed(list(chosen), [])
    assert "in a row" in ended["a"]
    assert search.suspicion.failed(["x", "y"], []) == {}
