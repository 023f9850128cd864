"""Where the messages of a prompt end, as the engine tells the scheduler."""

import pytest

from pagefold.engine.limits import ModelLimits
from pagefold.kv import Namespace

END = 7


@pytest.fixture
def limits():
    return ModelLimits(100, (2,), Namespace(), frozenset({END, 2}))


def test_messages_end_behind_their_last_tokens(limits):
    assert limits.message_ends([1, 3, END, 4, 2, 5]) == (3, 5)


def test_a_prompt_without_messages_ends_where_it_ends(limits):
    assert limits.message_ends([1, 3, 4]) == (3,)


def test_text_behind_the_last_message_that_opens_no_answer_counts_too(limits):
    few, more = [1, END, *[4] * 32], [1, END, *[4] * 33]
    assert limits.message_ends(few) == (2,)
    assert limits.message_ends(more) == (2, 35)


def test_of_very_many_the_first_and_the_last_count(limits):
    assert limits.message_ends([END] * 16) == tuple(range(1, 17))
    assert limits.message_ends([END] * 5000) == (1, 2, 3, 4, *range(4989, 5001))
