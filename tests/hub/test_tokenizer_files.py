"""The real tokenizer: texts come back, and tokens equal those of a slow, independent BPE."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [
    "",
    " ",
    "   ",
    "\n\n\n",
    " \t\r\n mixed \u00a0 \u2003 whitespace\t",
    "Hello, world!",
    "a  12\n\n 3    456",
    "1234567890",
    "$1,234.50 on 2026-11-21 at 09:05",
    "½ ² ① Ⅷ ٣ ९ 三",
    "I don't think they'll say 'S or we'd 'VE",
    "naïve café, e\u0301 with a combining accent",
    "日本語のテキスト 한국어 العربية עברית",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 \U0001f9ff",
    "\u0000\u0001\u007f\ufeff\uffff",
    "def f(x):\n    return x**2  # squares\n\n\n\tif True:\n\t\tpass\n",
    "<html>&amp;</html> {{ jinja }} \\n \\x00",
    "x" * 300,
    "<|im_start|>user\nhi<|im_end|>\n<repo_name><|endoftext|>",
    "<|im_start|> <|im_start <|im_end|>x<file_sep>",
]


@pytest.fixture(scope="module")
def tokenizer(real_folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(real_folder)


class SlowBpe:
    """From the description of byte-level BPE with single digits; nothing of ours or of `tokenizers` in it."""

    def __init__(self, folder: Path) -> None:
        self.regex = pytest.importorskip("regex")
        content = json.loads((folder / "tokenizer.json").read_bytes())
        self.vocab = content["model"]["vocab"]
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(content["model"]["merges"])}
        self.added = {token["content"]: token["id"] for token in content["added_tokens"]}
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in plain]
        self.letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        special = "|".join(self.regex.escape(token) for token in sorted(self.added, key=len, reverse=True))
        ids: list[int] = []
        for part in self.regex.split(f"({special})", text):
            ids += [self.added[part]] if part in self.added else self.encode_plain(part)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        pieces = [piece for piece in self.regex.split(r"(\p{N})", text) if piece]
        found = [word for piece in pieces for word in self.regex.findall(words, piece)]
        return [self.vocab[token] for word in found for token in self.merge([self.letters[b] for b in word.encode()])]

    def merge(self, tokens: list[str]) -> list[str]:
        while True:
            pairs = enumerate(itertools.pairwise(tokens))
            known = [(self.ranks[pair], i) for i, pair in pairs if pair in self.ranks]
            if not known:
                return tokens
            _, i = min(known)
            tokens = [*tokens[:i], tokens[i] + tokens[i + 1], *tokens[i + 2 :]]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("text", TEXTS)
def test_tokens_equal_the_slow_twins(tokenizer: Any, real_folder: Path, text: str) -> None:
    assert tokenizer(text)["input_ids"] == SlowBpe(real_folder).encode(text)


def test_which_bytes_the_vocabulary_lacks(tokenizer: Any, real_folder: Path) -> None:
    """The model's own gap, not the converter's: these bytes vanish when a text is encoded.

    Six control characters, and the first byte of characters that Unicode has not assigned; the rest of the bytes that
    lack a token never occur in UTF-8.
    """
    slow = SlowBpe(real_folder)
    missing = {byte for byte, letter in slow.letters.items() if letter not in slow.vocab}
    never_in_utf8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
    assert missing - never_in_utf8 == {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
    assert tokenizer.decode(tokenizer("a\x04b")["input_ids"]) == "ab"


def test_every_digit_stands_alone(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer(" 2026")["input_ids"]) == ["Ġ", "2", "0", "2", "6"]


def test_special_tokens(tokenizer: Any) -> None:
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.unk_token, tokenizer.unk_token_id) == ("<|endoftext|>", 0)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|im_end|>", 2)
    assert tokenizer.model_max_length == 8192
    assert tokenizer.decode([1, 3, 9690, 2, 16], skip_special_tokens=True) == "system"
    assert (
        tokenizer("hi", add_special_tokens=True)["input_ids"] == tokenizer("hi", add_special_tokens=False)["input_ids"]
    )


def test_the_chat_template_puts_a_system_prompt_before_a_chat_without_one(tokenizer: Any) -> None:
    user = {"role": "user", "content": "Hi 42"}
    text = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    turns = [f"system\n{system}", "user\nHi 42"]
    assert text == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"
    own = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, user], tokenize=False)
    assert own == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 42<|im_end|>\n"
