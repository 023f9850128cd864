"""Detokenizer: its pieces are the text of all tokens, each as soon as its last character is whole, never half of one.

The slow twin decodes everything at every step and lets out what is new, unless the text ends within a character. What
is incomplete at the end is left out.
"""

from __future__ import annotations

import codecs

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagefold.tokenizer import Detokenizer

REPLACEMENT = "\ufffd"
VOCAB_SIZE = 49152
TEXTS = {
    "plain": "The quick brown fox; 12345 jumps\n\n\tover   the lazy dog.  ",
    "combining marks": "Z\u0351\u036b\u0343a\u030al\u0327g\u0308o\u0300 n\u0303 e\u0301\u0323 क्षि นี้",
    "CJK": "漢字かな交じり文、한국어 글자, 中文標點「符號」。𠮷野家 𪚥",
    "Arabic": "السَّلَامُ عَلَيْكُمْ ١٢٣ لا إله \u200f(نص)\u200e",
    "emoji": "🙂🙃🥹 ☕️ 1️⃣ 🇨🇭🇯🇵 👍🏽",
    "joined emoji": "👩\u200d👩\u200d👧\u200d👦 🧑🏿\u200d🚀 🏳️\u200d🌈 ❤️\u200d🔥",
    "many scripts": "Ångström Ελληνικά עִבְרִית हिन्दी ไทย ქართული 🜚 𐐷𐍈𓂀 \u2028 \u00a0 \x00 \x7f",
}
IDS = st.integers(0, VOCAB_SIZE - 1)
SOME_BYTES = st.integers(0, 300)  # specials, and the tokens of single bytes
SEQUENCES = st.lists(st.one_of(IDS, SOME_BYTES), max_size=30)
NO_TOKEN = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}
"""Bytes that this model has no token for: never seen in training, or never in UTF-8."""
SPEAKABLE = st.characters(codec="utf-8").filter(lambda character: NO_TOKEN.isdisjoint(character.encode()))
PROMPTS = st.lists(st.one_of(IDS, SOME_BYTES), max_size=9)


def pieces_of(detokenizer, token_ids):
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def pieces_of_twin(tokenizer, token_ids):
    decode = tokenizer.decode
    pieces, out = [], ""
    for at in range(len(token_ids)):
        text = decode(token_ids[: at + 1])
        piece = "" if text.endswith(REPLACEMENT) else text[len(out) :]
        pieces.append(piece)
        out += piece
    return [*pieces, whole_text(tokenizer, token_ids)[len(out) :]]


def whole_text(tokenizer, token_ids):
    """Return the text of tokens, without the sign for a character that their bytes leave incomplete."""
    data = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids if tokenizer.decode([token_id]))
    text = tokenizer.decode(token_ids)
    return text if whole_characters(data) == data.decode(errors="replace") else text[:-1]


def whole_characters(data):
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


# The real tokenizer.


@pytest.mark.parametrize("prompt", ["", "Hello", "Bonjour, « ça va »\n", "🙂"])
@pytest.mark.parametrize("kind", TEXTS)
def test_the_pieces_of_a_text_are_whole_characters_and_make_the_text(tokenizer, kind, prompt):
    token_ids = tokenizer.encode(TEXTS[kind])
    pieces = pieces_of(tokenizer.detokenizer(tokenizer.encode(prompt)), token_ids)
    assert "".join(pieces) == tokenizer.decode(token_ids) == TEXTS[kind]
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert pieces == pieces_of_twin(tokenizer, token_ids)


def test_some_of_these_texts_have_characters_of_several_tokens(tokenizer):
    """Without any, the test above would tell nothing."""
    for kind in ("CJK", "emoji", "many scripts"):
        assert "" in pieces_of(tokenizer.detokenizer([]), tokenizer.encode(TEXTS[kind]))[:-1]


@given(st.text(SPEAKABLE, max_size=40), st.text(max_size=5))
def test_any_text_comes_out_as_it_went_in(tokenizer, text, prompt):
    pieces = pieces_of(tokenizer.detokenizer(tokenizer.encode(prompt)), tokenizer.encode(text))
    assert "".join(pieces) == text
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)


@given(PROMPTS, SEQUENCES)
def test_any_tokens_come_out_as_they_are_decoded_together(tokenizer, prompt, token_ids):
    """Most of these are no valid UTF-8: what is broken is U+FFFD, as often as in the whole, or incomplete."""
    pieces = pieces_of(tokenizer.detokenizer(prompt), token_ids)
    assert "".join(pieces) == whole_text(tokenizer, token_ids)


@given(PROMPTS, SEQUENCES)
def test_every_piece_comes_with_the_token_that_completes_it(tokenizer, prompt, token_ids):
    assert pieces_of(tokenizer.detokenizer(prompt), token_ids) == pieces_of_twin(tokenizer, token_ids)


@given(PROMPTS, st.lists(st.integers(0, 255).filter(lambda byte: byte not in NO_TOKEN), max_size=12))
@example([], [0xF0, 0x9F, 0x99])
@example([], [0xC3, 0x28, 0xE2, 0x82])
def test_any_bytes_come_out_as_python_decodes_them(tokenizer, prompt, data):
    """One token a byte, through the alphabet of byte-level tokenizers."""
    token_ids = [token_of_byte(tokenizer, byte) for byte in data]
    pieces = pieces_of(tokenizer.detokenizer(prompt), token_ids)
    assert "".join(pieces) == whole_characters(bytes(data))


def token_of_byte(tokenizer, byte):
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [other for other in range(256) if other not in printable]
    letter = chr(byte) if byte in printable else chr(0x100 + others.index(byte))
    return tokenizer._backend.token_to_id(letter)


def test_a_character_waits_for_its_last_byte(tokenizer):
    detokenizer = tokenizer.detokenizer([])
    first, *middle, last = (token_of_byte(tokenizer, byte) for byte in "🙂".encode())
    assert [detokenizer.push(token_id) for token_id in (first, *middle)] == ["", "", ""]
    assert detokenizer.push(last) == "🙂"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(
    ("data", "left"),
    [
        (b"\xf0\x9f\x99", ""),
        (b"\xf0", ""),
        (b"\xe2\x82", ""),
        (b"a\xf0\x9f\xc3", REPLACEMENT),  # the one is broken, the next incomplete
        (b"\x9f", REPLACEMENT),  # no character begins so
        (b"\xf0\x9f\x99\x99\x99", REPLACEMENT),
        (REPLACEMENT.encode(), REPLACEMENT),  # a character like all others
    ],
)
def test_a_flush_leaves_out_what_is_incomplete_and_nothing_else(tokenizer, marks, data, left):
    detokenizer = tokenizer.detokenizer([])
    pieces = [detokenizer.push(token_of_byte(tokenizer, byte)) for byte in data]
    assert detokenizer.flush() == left
    assert detokenizer.flush() == ""
    assert "".join(pieces) + left == whole_characters(data)
    fallback = "".join(pieces_of(Detokenizer(marks, []), data))
    assert fallback.rstrip(REPLACEMENT) == whole_characters(data).rstrip(REPLACEMENT)
    assert (REPLACEMENT in fallback) == (REPLACEMENT in whole_characters(data))


def test_special_tokens_are_text_where_they_are_asked_for(tokenizer):
    words = tokenizer.encode("one")
    shown = pieces_of(tokenizer.detokenizer([], skip_special_tokens=False), [1, *words, 2])
    assert "".join(shown) == "<|im_start|>one<|im_end|>"
    byte = token_of_byte(tokenizer, 0xE2)
    for skips, text in ((True, ""), (False, REPLACEMENT + "<|im_end|>")):  # a token of its own breaks the character
        detokenizer = tokenizer.detokenizer([], skip_special_tokens=skips)
        assert "".join(pieces_of(detokenizer, [byte, 2])) == text


def test_a_flush_after_whole_characters_gives_nothing(tokenizer):
    detokenizer = tokenizer.detokenizer([])
    assert detokenizer.flush() == ""
    assert "".join(detokenizer.push(token_id) for token_id in tokenizer.encode("done 🙂")) == "done 🙂"
    assert detokenizer.flush() == ""


def test_special_tokens_are_no_text_wherever_they_stand(tokenizer):
    words = tokenizer.encode("one two 🙂")
    for at in range(len(words) + 1):
        token_ids = [*words[:at], 0, 2, 1, *words[at:]]
        assert "".join(pieces_of(tokenizer.detokenizer([1, 2]), token_ids)) == "one two 🙂"


def test_a_prompt_that_ends_within_a_character_keeps_its_half(tokenizer):
    """The output is the text of its own tokens: the half that it brings is U+FFFD."""
    *start, last = (token_of_byte(tokenizer, byte) for byte in "é".encode())
    assert pieces_of(tokenizer.detokenizer(start), [last, *tokenizer.encode("a")]) == ["", REPLACEMENT + "a", ""]


# A tokenizer with marks for spaces and bytes as a fallback.

THE, CAT, S, BANG, SPACE = range(256, 261)
BOS = 262
WORDS = st.sampled_from([THE, CAT, S, BANG, SPACE])
CHARACTERS = st.one_of(
    WORDS.map(lambda word: [word]),
    st.characters(codec="utf-8", exclude_characters=REPLACEMENT).map(lambda character: list(character.encode())),
)


def test_a_first_word_has_no_space_and_a_later_one_has(marks):
    assert pieces_of(Detokenizer(marks, []), [THE, CAT, S, BANG]) == ["the", " cat", "s", "!", ""]
    assert pieces_of(Detokenizer(marks, [THE]), [CAT, S]) == [" cat", "s", ""]
    assert pieces_of(Detokenizer(marks, [BOS]), [THE, CAT]) == ["the", " cat", ""]
    assert pieces_of(Detokenizer(marks, [BANG] * 100), [CAT]) == [" cat", ""]


@given(st.lists(CHARACTERS, max_size=9), st.lists(CHARACTERS, max_size=12))
@example([list("🙂".encode())] * 2, [[THE]])  # the prompt's last six tokens begin within a character
def test_a_text_is_what_it_adds_to_the_prompts(marks, prompt, output):
    prompt, output = ([token_id for each in many for token_id in each] for many in (prompt, output))
    pieces = pieces_of(Detokenizer(marks, prompt), output)
    assert "".join(pieces) == marks.decode(prompt + output)[len(marks.decode(prompt)) :]
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_of_fallback_bytes_waits_for_its_last(marks):
    assert pieces_of(Detokenizer(marks, [BOS]), [THE, *"é🙂".encode(), S]) == [
        "the",
        "",
        "é",
        "",
        "",
        "",
        "🙂",
        "s",
        "",
    ]


def test_a_broken_byte_does_not_take_back_what_is_out(marks):
    """Decoded together, é would be broken too: it is judged with the run of bytes it stands in. But it is out."""
    output = [*"é".encode(), 0xFF, THE, CAT]
    assert marks.decode(output).startswith(REPLACEMENT * 3)
    assert "".join(pieces_of(Detokenizer(marks, [BANG]), output)) == f"é{REPLACEMENT} the cat"


@given(st.lists(st.one_of(WORDS, st.integers(0, 255), st.just(BOS)), max_size=20))
def test_broken_bytes_never_stop_a_stream_or_swallow_a_word(marks, output):
    text = "".join(pieces_of(Detokenizer(marks, [BANG]), output))
    words = {THE: "the", CAT: "cat", S: "s", BANG: "!"}
    at = 0
    for token_id in output:
        if token_id in words:
            at = text.find(words[token_id], at) + len(words[token_id])
            assert at >= len(words[token_id]), "a word is missing"
