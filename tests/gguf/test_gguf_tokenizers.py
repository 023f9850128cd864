"""Tokenizers out of GGUF metadata against transformers' own, on hostile texts, for vocabularies made here."""

from __future__ import annotations

import functools
import itertools
import json
from typing import TYPE_CHECKING, Any

import gguf
import gguf_models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.errors import UnsupportedModelError
from pagefold.gguf.header import GgufFormatError, GgufHeader
from pagefold.gguf.token_ids import special_token_ids
from pagefold.hub.byte_level import FAMILIES
from pagefold.hub.tokenizer_files import write_tokenizer_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = [
    "",
    " ",
    "   ",
    "\n\n\n",
    " \t\r\n mixed \u00a0 \u2003 whitespace\t",
    "Hello, world!",
    "a  12\n\n 3    456",
    "1234567890 12 123",
    "$1,234.50 on 2026-11-21 at 09:05",
    "½ ² ① Ⅷ ٣ ९ 三",
    "I don't THINK they'll say 'S or we'd 'VE I'M",
    "naïve café, e\u0301 with a combining accent",
    "camelCase HTTPServer iOS ﬁ Ǆungla",
    "日本語のテキスト 한국어 العربية עברית",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 \U0001f9ff",
    "\u0000\u0001\u007f\ufeff\uffff",
    "def f(x):\n    return x**2  # squares\n\n\n\tif True:\n\t\tpass\n//a/b\n/",
    "<html>&amp;</html> {{ jinja }} \\n \\x00",
    "x" * 300,
    "<|start|>user\nhi<|end|>\n<tool>  <|end|> <|end|",
    "</s><s> <unk> a</s>b",
]
PARTS = (
    ["a", "B", "he", "'s", "'LL", " ", "  ", "\n", "\r\n", "\t", "1", "23", "é", "e\u0301", "日", "/", "...", "\uff21"],
    ["😀", "\u200d", "<|end|>", "<tool>", "</s>", "▁", "\u00a0", "Ⅷ", "-"],
)
ANY_TEXT = st.lists(st.sampled_from([*PARTS[0], *PARTS[1]]), max_size=16).map("".join)


@functools.cache
def merges() -> tuple[tuple[str, str], ...]:
    """Learn merges on texts that nothing has cut, so that they reach over the bounds of words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, min_frequency=1, initial_alphabet=gguf_models.byte_alphabet(), show_progress=False
    )
    learner.train_from_iterator([text for text in TEXTS if "<" not in text] * 2, trainer)
    learned = json.loads(learner.to_str())["model"]["merges"]
    return tuple((left, right) for left, right in learned)


def byte_level_keys(family: str) -> dict[str, Any]:
    joined = ["".join(pair) for pair in merges()]
    tokens = ["<|start|>", "<|end|>", "<tool>", *gguf_models.byte_alphabet(), *dict.fromkeys(joined)]
    return {
        "model": "gpt2",
        "pre": family,
        "tokens": tokens,
        "token_type": [CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(tokens) - 3),
        "merges": [" ".join(pair) for pair in merges()],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "add_bos_token": False,
    }


def piece_keys() -> dict[str, Any]:
    words = [
        "▁t",
        "he",
        "in",
        "▁the",
        "re",
        "▁▁",
        "▁▁▁▁",
        "the",
        "an",
        "▁an",
        "and",
        "nd",
        "▁and",
        "▁<",
        "er",
        "▁h",
        "▁a",
    ]
    letters = [*"abcdefghijklmnopqrstuvwxyzHT.,<>/|", "▁", "日"]
    pieces: list[tuple[str, int, float]] = [("<unk>", UNKNOWN, 0.0), ("<s>", CONTROL, 0.0), ("</s>", CONTROL, 0.0)]
    pieces += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    pieces += [(word, NORMAL, -float(rank)) for rank, word in enumerate([*words, *letters])]
    pieces += [("<|end|>", CONTROL, -1e3), ("<tool>", USER_DEFINED, -1e3)]
    tokens, types, scores = (list(column) for column in zip(*pieces, strict=True))
    return {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Any]:
    """Write a header with such a tokenizer, and return what transformers loads of what we make of it."""
    from transformers import AutoTokenizer

    def make(keys: dict[str, Any], architecture: str = "llama", **others: Any) -> Any:
        write_tokenizer_files(header(tmp_path, keys, architecture, **others), tmp_path)
        return AutoTokenizer.from_pretrained(tmp_path)

    return make


def header(where: Path, keys: dict[str, Any], architecture: str = "llama", **others: Any) -> GgufHeader:
    writer = gguf.GGUFWriter(where / "one.gguf", architecture)
    writer.add_context_length(100)
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_string(f"tokenizer.ggml.{key}", value)
    for key, value in others.items():
        (writer.add_array if isinstance(value, list) else writer.add_string)(f"tokenizer.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufHeader(where / "one.gguf")


def transformers_own(keys: dict[str, Any], architecture: str) -> Any:
    """Return the tokenizer that transformers builds of the same metadata, with its own rules."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    told = {names.get(key, key): value for key, value in keys.items()}
    backend, _ = convert_gguf_tokenizer(architecture, told)
    return backend


def qwen2s_own(keys: dict[str, Any]) -> Any:
    """Return Qwen's own, which composes characters before all else."""
    from tokenizers import AddedToken
    from transformers import Qwen2Tokenizer

    vocab = {token: token_id for token_id, token in enumerate(keys["tokens"])}
    pairs = [tuple(merge.split(" ")) for merge in keys["merges"]]
    special = {"unk_token": "<|end|>", "eos_token": "<|end|>", "pad_token": "<|end|>", "bos_token": "<|start|>"}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=pairs, **special)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer.backend_tokenizer


def assert_alike(ours: Any, theirs: Any, texts: Sequence[str]) -> None:
    for text in texts:
        found = ours(text, add_special_tokens=False)["input_ids"]
        assert found == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(found) == theirs.decode(found, skip_special_tokens=False), text


WITHOUT_REGEX = ("smollm", "gpt-2")  # of which transformers has no rule of that name


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITHOUT_REGEX])
def test_byte_level_tokens_are_transformers_own(family: str, build: Any) -> None:
    keys = byte_level_keys(family)
    is_qwens = FAMILIES[family].normalizer is not None
    theirs = qwen2s_own(keys) if is_qwens else transformers_own(keys, "llama")
    tokenizer = build(keys)
    assert_alike(tokenizer, theirs, TEXTS)

    @settings(max_examples=60)
    @given(ANY_TEXT)
    def of_any_text(text: str) -> None:
        assert_alike(tokenizer, theirs, [text])

    of_any_text()


def test_gpt_2s_tokens_are_transformers_own(build: Any) -> None:
    keys = byte_level_keys("gpt-2")
    assert_alike(build(keys), transformers_own(keys, "llama"), TEXTS)


def test_families_cut_texts_differently(build: Any, tmp_path: Path) -> None:
    """Else the tests above would hold for any rule."""
    cuts = {}
    for family in ("smollm", "gpt-2", "llama-bpe", "tekken", "qwen2", "gpt-4o"):
        tokenizer = build(byte_level_keys(family))
        cuts[family] = [tuple(tokenizer(text)["input_ids"]) for text in TEXTS]
    for one, two in itertools.combinations(cuts, 2):
        assert cuts[one] != cuts[two], (one, two)


@pytest.mark.parametrize(("family", "is_whole"), [("llama-bpe", True), ("tekken", True), ("dbrx", False)])
def test_a_piece_that_is_a_token_is_taken_whole_where_the_family_says_so(
    family: str, is_whole: bool, build: Any
) -> None:
    keys = byte_level_keys(family)
    keys |= {"tokens": [*keys["tokens"], "qzxj"], "token_type": [*keys["token_type"], NORMAL]}
    assert (build(keys)("qzxj", add_special_tokens=False)["input_ids"] == [len(keys["tokens"]) - 1]) is is_whole


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_sentence_pieces_are_transformers_own(architecture: str, build: Any) -> None:
    """With the rule that llama's and Phi 3's own files have: a space before each text, and behind special tokens."""
    keys = piece_keys()
    theirs = transformers_own(keys, "phi3")
    tokenizer = build(keys, architecture)
    texts = TEXTS if architecture == "llama" else [text for text in TEXTS if ">" not in text]
    for text in texts:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert found == theirs.encode(text, add_special_tokens=False).ids, text

    @settings(max_examples=150)
    @given(ANY_TEXT.filter(lambda text: architecture == "llama" or ">" not in text))
    def of_any_text(text: str) -> None:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert found == theirs.encode(text, add_special_tokens=False).ids

    of_any_text()


@pytest.mark.parametrize("text", [text for text in TEXTS if "<" not in text])
def test_texts_of_sentence_pieces_come_back(text: str, build: Any) -> None:
    tokenizer = build(piece_keys())
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_spaces_behind_phi_3s_special_tokens_do_not_count(build: Any) -> None:
    pieces = {}
    for architecture in ("llama", "phi3"):
        tokenizer = build(piece_keys(), architecture)
        pieces[architecture] = tokenizer.convert_ids_to_tokens(
            tokenizer("<|end|>\n the", add_special_tokens=False)["input_ids"]
        )
    assert pieces["phi3"] == ["<|end|>", "▁the"]
    assert pieces["llama"] == ["<|end|>", "▁", "<0x0A>", "▁the"]


@pytest.mark.parametrize("kind", ["llama-bpe", "pieces"])
@pytest.mark.parametrize(("begins", "ends"), list(itertools.product([None, True, False], [None, True, False])))
def test_what_is_put_around_texts(kind: str, begins: bool | None, ends: bool | None, build: Any) -> None:
    keys = piece_keys() if kind == "pieces" else byte_level_keys(kind)
    said = {"add_bos_token": begins, "add_eos_token": ends}
    keys = {key: value for key, value in (keys | said).items() if value is not None}
    found = build(keys)("the")["input_ids"]
    assert (found[0] == keys["bos_token_id"]) is (begins is not False)  # both kinds begin so where nothing is said
    assert (found[-1] == keys["eos_token_id"]) is (ends is True)


def test_families_that_begin_with_nothing(build: Any) -> None:
    keys = {key: value for key, value in byte_level_keys("qwen2").items() if key != "add_bos_token"}
    assert build(keys)("the")["input_ids"][0] != keys["bos_token_id"]


def test_chat_templates_by_name(build: Any) -> None:
    templates = {"chat_template": "plain", "chat_templates": ["tool_use"], "chat_template.tool_use": "with {{ tools }}"}
    tokenizer = build(byte_level_keys("qwen2"), **templates)
    chat = [{"role": "user", "content": "the"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "plain"
    assert tokenizer.apply_chat_template(chat, tools=[{"x": 1}], tokenize=False).startswith("with")


@pytest.mark.parametrize(
    ("keys", "chats", "ends"),
    [
        ({}, False, 1),
        ({}, True, [1, 3]),
        ({"eot_token_id": 5}, False, [1, 5]),
        ({"eot_token_id": 5, "eom_token_id": 4}, True, [1, 5, 4, 3]),
        ({"eot_token_id": 1}, False, 1),
        ({"eos_token_id": None}, False, None),
    ],
)
def test_what_ends_a_turn(keys: dict[str, Any], chats: bool, ends: Any, tmp_path: Path) -> None:
    tokens = {"tokens": ["a", "b", "c", "<|im_end|>", "d", "e"], "bos_token_id": 0, "eos_token_id": 1}
    told = {key: value for key, value in (tokens | keys).items() if value is not None}
    others = {"chat_template": "x"} if chats else {}
    ids = special_token_ids(header(tmp_path, told, **others))
    assert ids == {"bos_token_id": 0, "eos_token_id": ends, "pad_token_id": None}


def test_a_tokenizer_that_is_not_known_is_refused_with_those_that_are(tmp_path: Path) -> None:
    for keys in ({"model": "t5"}, {"model": "gpt2", "pre": "viking"}, {"model": "gpt2"}, {"model": "none"}):
        with pytest.raises(UnsupportedModelError, match=r"whose rules are not known here.*llama-bpe.*tekken.*qwen2"):
            write_tokenizer_files(header(tmp_path, keys), tmp_path)


@pytest.mark.parametrize("merge", ["zq x", "a", "", "a  b", "aa"])
def test_merges_that_are_not_of_tokens_are_refused(merge: str, tmp_path: Path) -> None:
    keys = byte_level_keys("qwen2")
    with pytest.raises(GgufFormatError, match="is not of two tokens that make a third"):
        write_tokenizer_files(header(tmp_path, keys | {"merges": [*keys["merges"], merge]}), tmp_path)


def test_ids_that_are_no_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GgufFormatError, match="eot_token_id is 9, and there are 1 tokens"):
        special_token_ids(header(tmp_path, {"tokens": ["a"], "eot_token_id": 9}))
