"""Namespace: equal fields share, any other field separates, and no two namespaces have one key."""

from __future__ import annotations

from array import array
from dataclasses import fields, replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagefold.kv import KVCore, Namespace

FIELDS = [field.name for field in fields(Namespace)]
BASE = Namespace(model="smol", layout="plain-16", dtype="float32", adapter="lora-1", tenant="acme", cache_salt="pepper")
TOKENS = array("i", range(12)).tobytes()

texts = st.text(alphabet=st.characters(codec=None), max_size=5)
namespaces = st.builds(Namespace, texts, texts, texts, texts, texts, texts)


def num_hit_tokens(written: Namespace, asked: Namespace) -> int:
    """Publish 12 tokens under one namespace, and match them under another."""
    core = KVCore(8, block_size=4)
    cache, _ = core.acquire(core.match(written.key(), TOKENS, 11))
    assert core.extend(cache, 0, 12)
    promise = core.publishing.promise(cache, TOKENS, 12)
    assert promise is not None
    core.publishing.commit(promise)
    core.release(cache)
    hit = core.match(asked.key(), TOKENS, 12)
    return len(hit.nodes) * 4 + hit.num_partial_tokens


def test_fields_are_those_that_are_tested() -> None:
    assert FIELDS == ["model", "layout", "dtype", "adapter", "tenant", "cache_salt"]


def test_equal_fields_share() -> None:
    assert num_hit_tokens(BASE, replace(BASE)) == 12


@pytest.mark.parametrize("value", ["", "other", "x" * 300])
@pytest.mark.parametrize("field", FIELDS)
def test_each_field_separates(field: str, value: str) -> None:
    other = replace(BASE, **{field: value})
    assert num_hit_tokens(BASE, other) == 0
    assert num_hit_tokens(other, BASE) == 0


@pytest.mark.parametrize("second", range(1, 6))
@pytest.mark.parametrize("first", range(5))
def test_where_a_field_ends_matters(first: int, second: int) -> None:
    if first >= second:
        return
    one = replace(BASE, **{FIELDS[first]: "ab", FIELDS[second]: "c"})
    other = replace(BASE, **{FIELDS[first]: "a", FIELDS[second]: "bc"})
    swapped = replace(BASE, **{FIELDS[first]: "c", FIELDS[second]: "ab"})
    assert len({one.key(), other.key(), swapped.key()}) == 3
    assert num_hit_tokens(one, other) == 0


def test_a_value_that_looks_like_the_encoding_does_not_collide() -> None:
    inner = Namespace(tenant="b").key().decode("latin-1")
    keys = {Namespace(model=inner).key(), Namespace(layout=inner).key(), Namespace(tenant="b").key()}
    assert len(keys) == 3


@given(namespaces, namespaces)
@example(Namespace(model="\ud83d\ude00"), Namespace(model="\U0001f600"))
@example(Namespace(model="\x00"), Namespace())
@example(Namespace(model="a", layout=""), Namespace(model="", layout="a"))
def test_keys_are_equal_only_if_namespaces_are(one: Namespace, other: Namespace) -> None:
    assert (one.key() == other.key()) == (one == other)


@given(st.lists(texts, min_size=6, max_size=6), st.data())
def test_moving_a_boundary_changes_the_key(values: list[str], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, 4))
    joined = values[index] + values[index + 1]
    cut = data.draw(st.integers(0, len(joined)))
    moved = [*values[:index], joined[:cut], joined[cut:], *values[index + 2 :]]
    assert (Namespace(*values).key() == Namespace(*moved).key()) == (values == moved)
