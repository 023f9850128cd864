"""Restrictions: which tokens may come, equal to a twin that looks at the whole output each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.errors import InvalidRequestError
from pagefold.structured.params import FIELD
from pagefold.structured.restriction import Restriction, sequences_of

VOCAB = 11
TOKENS = st.integers(0, VOCAB - 1)
FEW = st.integers(0, 2)  # so that sequences come again


def tokens_of(mask):
    return {token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1}


def allowed_by_twin(output, allowed, bad_words):
    left = set(range(VOCAB)) if allowed is None else set(allowed)
    for *before, last in bad_words:
        if output[len(output) - len(before) :] == before:
            left.discard(last)
    return left


class Inner:
    """A matcher that lets tokens of one parity come, in turn, and ends with token 10."""

    field = FIELD
    error = None

    def __init__(self):
        self.num = 0
        self.is_complete = False

    def mask(self, banned=()):
        bits = sum(1 << token for token in range(VOCAB) if token % 2 == self.num % 2 or token == 10)
        return bits.to_bytes(4, "little")

    def accept(self, token_id):
        self.num += 1
        self.is_complete = token_id == 10


@given(
    st.one_of(st.none(), st.sets(TOKENS, min_size=1)),
    st.lists(st.lists(FEW, min_size=1, max_size=4), max_size=6),
    st.sets(TOKENS, max_size=3),
    st.booleans(),
    st.data(),
)
def test_masks_are_the_twin_s(allowed, bad_words, banned, has_inner, data):
    inner = Inner() if has_inner else None
    output: list[int] = []

    def expected():
        left = allowed_by_twin(output, allowed, bad_words)
        return left & tokens_of(Inner.mask(inner)) if has_inner else left

    restriction = Restriction(VOCAB, allowed, bad_words)
    if not expected():
        with pytest.raises(InvalidRequestError) as refused:
            restriction.matcher(inner)
        assert refused.value.param == ("bad_words" if allowed is None else "allowed_token_ids")
        return
    matcher = restriction.matcher(inner)
    for _ in range(12):
        left = expected()
        if not left:
            assert "no token" in matcher.error
            assert matcher.field in ("bad_words", "allowed_token_ids")
            return
        assert matcher.error is None
        assert tokens_of(matcher.mask()) == left
        assert tokens_of(matcher.mask(banned)) == (left - banned or left)
        token = data.draw(st.sampled_from(sorted(left)))
        output.append(token)
        matcher.accept(token)
        assert matcher.is_complete == (has_inner and token == 10)
        if matcher.is_complete:
            return


def test_bad_words_are_told_with_and_without_a_space(smollm2):
    from pagefold.tokenizer import Tokenizer

    tokenizer = Tokenizer(smollm2)
    found = sequences_of(["  cat", "antidisestablishment"], tokenizer.encode_parts)
    texts = [tokenizer.decode(sequence) for sequence in found]
    assert texts == ["cat", " cat", "antidisestablishment", " antidisestablishment"]
    assert len(found[2]) > 1


def test_of_two_sequences_with_one_end_the_shorter_is_enough():
    """As where a space is a token of its own: what bans the word bans it behind a space too."""
    encode = {"x": [7], " x": [3, 7]}
    assert sequences_of(["x"], lambda texts: [encode[text] for text in texts]) == [[7]]


def test_a_text_without_tokens_bans_nothing():
    encode = {"x": [], " x": [3]}
    assert sequences_of(["x"], lambda texts: [encode[text] for text in texts]) == [[3]]


def test_the_longest_sequence_decides_how_much_is_remembered():
    matcher = Restriction(VOCAB, None, [[1, 2, 3], [4, 5]]).matcher()
    for token in (1, 2):
        matcher.accept(token)
    assert tokens_of(matcher.mask()) == set(range(VOCAB)) - {3}


def test_a_mask_may_be_shorter_than_what_is_banned():
    """What is beyond its end is not in it."""
    inner = Inner()
    inner.mask = lambda: b"\x0f"
    matcher = Restriction(VOCAB, {1, 2, 9}).matcher(inner)
    assert tokens_of(matcher.mask({2, 10})) == {1}


@pytest.mark.parametrize("how", ["complete", "stuck"])
def test_the_end_of_the_other_matcher_is_the_end(how):
    """What it would let come then means nothing."""
    inner = Inner()
    matcher = Restriction(VOCAB, {1, 2}).matcher(inner)
    inner.accept = lambda _: setattr(inner, *(("is_complete", True) if how == "complete" else ("error", "too deep")))
    inner.mask = lambda: b""
    matcher.accept(2)
    assert matcher.is_complete == (how == "complete")
    assert matcher.error == (None if how == "complete" else "too deep")
    assert matcher.field == FIELD


@pytest.mark.parametrize(
    ("allowed", "bad_words", "field"),
    [([4], [[4]], "allowed_token_ids"), (None, [[t] for t in range(VOCAB)], "bad_words")],
)
def test_what_leaves_nothing_is_refused(allowed, bad_words, field):
    with pytest.raises(InvalidRequestError, match="no token") as refused:
        Restriction(VOCAB, allowed, bad_words).matcher()
    assert refused.value.param == field
