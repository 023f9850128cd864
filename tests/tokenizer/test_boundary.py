"""Firm cuts: the tokens that are kept are those of every longer text. Slow twin: make it longer, and look.

With the built-in model's tokenizer, and with small ones that are built like those of other families: their expressions,
normalizers and added tokens, trained on a few sentences so that vocabularies hold what crosses words where it can.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from pagefold.tokenizer import Tokenizer
from pagefold.tokenizer.boundary import Boundary, Encoded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CORPUS = [
    "You are a helpful assistant. Don't say that you're one; it's enough that they'll see it.",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n\n# 12345 and 1,234,567.89\n",
    "HTTPServer listens on http://127.0.0.1:8000/v1/models, doesn't it? I'd've known -- we'll see...",
    "naïve café über Ångström; 日本語。漢字です、ね！ 你好，世界。 Привет, мир! مرحبا",  # noqa: RUF001
    "  two  spaces   three    four \n \n  mixed \t tabs;\n\nand semicolons;\n}\n",
] * 3

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RIGHT_TO_LEFT_DIGITS = r"\d{1,3}(?=(?:\d{3})*\b)| ?[^\s\d]+|\s+(?!\S)|\s+"


def byte_level(expression: str | None, *, normalizer: Any = None) -> Backend:
    """A byte-level BPE; GPT-2's expression if none is given."""
    backend = Backend(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    if expression is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(expression), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def one_word(backend: Backend) -> Backend:
    """As Llama 2: spaces are letters, and a text is one word, so that merges could reach anywhere."""
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, special_tokens=["<unk>"])
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def unigram() -> Backend:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=500, show_progress=False, special_tokens=["<unk>"], unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def with_added(backend: Backend) -> Backend:
    """Added tokens of every kind, some of which contain others."""
    backend.add_special_tokens(
        [
            AddedToken("<s>", special=True),
            AddedToken("</s>", special=True),
            AddedToken("<|im|>", special=True),
            AddedToken("<|im|>end", special=True),
            AddedToken("<mask>", special=True, lstrip=True),
            AddedToken("<eat>", special=True, rstrip=True),
            AddedToken("==end", special=True),
        ]
    )
    backend.add_tokens([AddedToken("whole", single_word=True), AddedToken("norm=", normalized=True), "    ", "ful as"])
    backend.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", None, [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    )
    return backend


BACKENDS: dict[str, Callable[[], Backend]] = {
    "gpt2": lambda: byte_level(None),
    "cl100k": lambda: byte_level(CL100K),
    "o200k": lambda: byte_level(O200K),
    "right-to-left digits": lambda: byte_level(RIGHT_TO_LEFT_DIGITS),
    "nfc": lambda: byte_level(CL100K, normalizer=normalizers.NFC()),
    "lines": lambda: byte_level(r"\n|[^\n]+"),  # a word is a line: merges cross spaces
    "one word": lambda: one_word(Backend(models.BPE(unk_token="<unk>", fuse_unk=True))),
    "unigram": unigram,
}


@cache
def backend_of(name: str, *, added: bool) -> Backend:
    return with_added(BACKENDS[name]()) if added else BACKENDS[name]()


@cache
def boundary_of(name: str, *, added: bool) -> Boundary:
    return Boundary(backend_of(name, added=added))


FRAGMENTS = (
    *("a", "s", "e", "ve", "help", "ful", "assistant", "HTTP", "Server", "don't", "'", "'l", "'ve", "’s", "é", "ü"),  # noqa: RUF001
    *(" ", "  ", "    ", "\n", "\n\n", "\t", " \n ", "\r\n", "\u00a0", "\u3000", "\x1c", "\u200b", "\u0301", "\u0338"),
    *("1", "12", "345", "6789", ".", ",", ";", ":", "!", "?", ")", "/", "-", "--", "_", "=", "<", ">", "#"),
    *("日本", "語", "。", "，", "、", "🙂", "👩‍🚀", "Привет", "مرحبا", "ǅ", "ª", "²"),  # noqa: RUF001
    *("<|im|>", "<|im", "|>", "end", "<mask>", "<ma", "sk>", "<eat>", "whole", "norm=", "ful as", "<s>", "</s>"),
    *("<|im_start|>", "<|im_st", "art|>", "<|im_end|>", "user\n", "system\n"),
)
texts = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.tuples(st.sampled_from(CORPUS), st.integers(0, 90)).map(lambda pair: pair[0][: pair[1]]),
)


def encoder(backend: Backend) -> Callable[[str], Encoded]:
    def encode(text: str) -> Encoded:
        found = backend.encode(text)
        return Encoded(found.ids, found.offsets)

    return encode


@pytest.mark.quick(every=16)
@pytest.mark.parametrize("added", [False, True], ids=["plain", "added tokens"])
@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_kept_is_the_beginning_of_every_longer_text(name: str, added: bool) -> None:
    backend, boundary = backend_of(name, added=added), boundary_of(name, added=added)
    encode = encoder(backend)

    @settings(max_examples=250)
    @example("    ", "<mask>")
    @example("norm=", "=end")
    @given(texts, texts)
    def check(text: str, more: str) -> None:
        kept = boundary.stable_prefix(text, encode).token_ids
        assert encode(text + more).token_ids[: len(kept)] == kept

    check()


@settings(max_examples=400)
@given(texts, texts)
def test_with_the_real_tokenizer(tokenizer: Tokenizer, text: str, more: str) -> None:
    kept = tokenizer.encode_prefix(text).token_ids
    assert tokenizer.encode(text + more)[: len(kept)] == kept


roles = st.sampled_from(["user", "assistant", "system"])
messages = st.lists(st.fixed_dictionaries({"role": roles, "content": texts}), max_size=3)


@settings(max_examples=200)
@given(messages.filter(bool), messages.filter(bool))
def test_what_is_kept_of_a_chat_is_the_beginning_of_every_longer_chat(
    tokenizer: Tokenizer, said: list[dict[str, str]], more: list[dict[str, str]]
) -> None:
    kept = tokenizer.encode_rendered_prefix(tokenizer.render_chat_prefix(said)).token_ids
    whole = tokenizer.encode_chat([*said, *more])
    assert whole[: len(kept)] == kept
    # All that was said is in it, unless a message spells a special token: that may go on after it.
    assert kept[-2:] == [*tokenizer.encode("\n"), 1] or any("<" in message["content"] for message in said)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("You are a helpful assistant. Answer in one word.", "You are a helpful assistant. Answer in one word"),
        ("You are a helpful assistant.\n\n", "You are a helpful assistant"),
        ("You are a help", "You are a"),
        ("one two   ", "one"),
        ("system\nBe brief.<|im_end|>", "system\nBe brief.<|im_end|>"),
        ("system\nBe brief.<|im_en", "system\nBe brief"),
        ("it'", ""),
        ("日本語。", "日本語"),
        ("x" * 500, ""),
        ("", ""),
    ],
)
def test_little_is_cut(tokenizer: Tokenizer, text: str, kept: str) -> None:
    assert tokenizer.decode(tokenizer.encode_prefix(text).token_ids, skip_special_tokens=False) == kept


def test_merges_that_cross_words_forbid_a_cut_there() -> None:
    """``a b`` is three tokens, and ``a bc`` is one: nothing in the shorter text shows it but the vocabulary."""
    vocab = {piece: at for at, piece in enumerate(["a", " ", "b", "c", "bc", " bc", "a bc"])}
    backend = Backend(models.BPE(vocab, [("b", "c"), (" ", "bc"), ("a", " bc")]))
    encode = encoder(backend)
    assert encode("a b").token_ids == [0, 1, 2]
    assert encode("a bc").token_ids == [6]
    assert Boundary(backend).stable_prefix("a b", encode) == ([], 3)
    assert Boundary(backend).stable_prefix("a c b", encode).token_ids == [
        0,
        1,
        3,
    ]  # up to the second space: no entry holds `c `


@pytest.mark.parametrize(
    ("name", "text", "more"),
    [
        ("gpt2", "it is <|im|>", "end"),
        ("gpt2", "it is whole", "some"),
        ("nfc", "it is norm=", "\u0338"),
        ("gpt2", "it is helpful", " as"),
        ("gpt2", "it is  ", "<mask>"),
        ("cl100k", "it is\n   ", "\n"),
        ("right-to-left digits", "1234567", "8"),
    ],
)
def test_what_comes_may_change_what_was_there(name: str, text: str, more: str) -> None:
    """Each is a case where all the text's tokens, or all but one, are not those of the longer text."""
    backend, boundary = backend_of(name, added=True), boundary_of(name, added=True)
    encode = encoder(backend)
    before, after = encode(text).token_ids[:-1], encode(text + more).token_ids  # without </s>
    assert after[: len(before)] != before
    kept = boundary.stable_prefix(text, encode).token_ids
    assert kept == after[: len(kept)]


def test_a_template_that_lets_only_some_roles_follow(smollm2: Path, tmp_path: Path) -> None:
    """As Llama 2's: the system prompt is part of the first question, and roles alternate."""
    from test_tokenizer import copy_with

    template = (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
        "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
        "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% if message['role'] == 'user' %}[INST] {% if loop.first %}<<SYS>> {{ system }} <</SYS>> {% endif %}"
        "{{ message['content'] }} [/INST]{% else %} {{ message['content'] }} {% endif %}{% endfor %}"
    )
    tokenizer = Tokenizer(copy_with(smollm2, tmp_path, chat_template=template))
    system = [{"role": "system", "content": "Be brief and kind."}]
    kept = tokenizer.encode_rendered_prefix(tokenizer.render_chat_prefix(system)).token_ids
    assert "Be brief and kind" in tokenizer.decode(kept)
    whole = tokenizer.encode_chat([*system, {"role": "user", "content": "Why?"}])
    assert whole[: len(kept)] == kept
