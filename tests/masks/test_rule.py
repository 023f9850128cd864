"""The rule against its own words, chunk by chunk and token by token."""

from __future__ import annotations

import pytest

from pagefold.masks.rule import CHUNK, NUM_SINKS, concerned_from, first_whole, num_older, older, sees

_PLACES = sorted({0, 1, 3, 4, 5} | {c * CHUNK + d for c in (1, 2, 3, 4, 7) for d in (-1, 0, 1, 100)})


def _sees_whole(position: int, key: int) -> bool:
    chunks = [range(c * CHUNK, (c + 1) * CHUNK) for c in range(position // CHUNK + 1)]
    return key <= position and (key < 4 or any(key in chunk for chunk in chunks[-2:]))


@pytest.mark.parametrize("position", _PLACES)
def test_what_is_seen_whole_is_two_chunks_and_the_sinks(position: int) -> None:
    for key in _PLACES:
        assert sees(position, key, is_kept=False) == _sees_whole(position, key)
        assert sees(position, key, is_kept=True) == (key <= position)


@pytest.mark.parametrize("position", _PLACES)
def test_older_is_what_is_seen_if_it_is_kept(position: int) -> None:
    found = [key for key in range(position + 1) if not _sees_whole(position, key)]
    assert [*older(position)] == found
    assert num_older(position) == len(found)
    assert all(key >= first_whole(position) for key in range(position + 1) if key >= 4 and key not in older(position))


@pytest.mark.parametrize("key", [place for place in _PLACES if place >= NUM_SINKS])
def test_a_key_is_older_from_some_position_on(key: int) -> None:
    first = concerned_from(key)
    assert not sees(first, key, is_kept=False)
    assert all(sees(position, key, is_kept=False) for position in range(key, first))
    assert not any(sees(position, key, is_kept=False) for position in range(first, first + 3 * CHUNK))


def test_queries_of_a_chunk_have_the_same_older_tokens() -> None:
    for chunk in range(6):
        assert len({older(position) for position in range(chunk * CHUNK, (chunk + 1) * CHUNK)}) == 1
