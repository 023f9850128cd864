"""Gemma's tokenizer: tokens equal those of a slow, independent reading of SentencePiece's rules; texts come back."""

from __future__ import annotations

import itertools
import random
import re
from typing import TYPE_CHECKING, Any

import pytest
import tiny_gemma
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.hub.convert import convert

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TEXTS = [
    "",
    " ",
    "the",
    "there and  then",
    "   the\n\n\n\nend",
    "x" + " " * 9 + "the",
    "</b> > </ <b>and</b>",
    "日本 é ü \U0001f9ff",
    "▁▁ ▁the",
    "<eos> <start_of_turn>the<end_of_turn>\n<bos",
    "<0x41> \x00 \t\r\n",
]


class SlowPieces:
    """From the description of SentencePiece's BPE; nothing of ours or of `tokenizers` in it.

    Control tokens are cut out of the text. In the rest spaces become ``▁``; the longest user-defined token at each
    place is one piece and stays so; every other character is one. Then the two neighbours whose union has the best
    score become one, the leftmost of equals, until there are none. A piece that is no token becomes its bytes.
    """

    def __init__(self, tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> None:
        self.ids = {token.replace(" ", "▁"): token_id for token_id, token in enumerate(tokens)}
        self.control = {token for token, type_ in zip(tokens, types, strict=True) if type_ == 3}
        self.fixed = {token.replace(" ", "▁") for token, type_ in zip(tokens, types, strict=True) if type_ == 4}
        self.longest = max(map(len, self.fixed))
        normal = zip(tokens, types, scores, strict=True)
        self.scores = {token: score for token, type_, score in normal if type_ == 1}

    def encode(self, text: str) -> list[int]:
        cut = "|".join(re.escape(token) for token in sorted(self.control, key=len, reverse=True))
        ids = [self.ids["<bos>"]]
        for part in re.split(f"({cut})", text):
            ids += [self.ids[part]] if part in self.control else self.encode_plain(part.replace(" ", "▁"))
        return ids

    def encode_plain(self, text: str) -> list[int]:
        pieces: list[tuple[str, bool]] = []
        while text:
            lengths = range(min(self.longest, len(text)), 0, -1)
            fixed = next((text[:length] for length in lengths if text[:length] in self.fixed), "")
            pieces.append((fixed or text[0], bool(fixed)))
            text = text[len(fixed or text[0]) :]
        while True:
            unions = [
                (-self.scores[left + right], i)
                for i, ((left, is_fixed), (right, is_too)) in enumerate(itertools.pairwise(pieces))
                if left + right in self.scores and not is_fixed and not is_too
            ]
            if not unions:
                break
            _, i = min(unions)
            pieces[i : i + 2] = [(pieces[i][0] + pieces[i + 1][0], False)]
        return [token_id for piece, _ in pieces for token_id in self.ids_of(piece)]

    def ids_of(self, piece: str) -> list[int]:
        return [self.ids[piece]] if piece in self.ids else [self.ids[f"<0x{byte:02X}>"] for byte in piece.encode()]


@pytest.fixture(scope="module")
def folder(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gemma")
    return convert(tiny_gemma.write(tools, place / "tiny.gguf"), place / "model")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def slow() -> SlowPieces:
    return SlowPieces(*zip(*tiny_gemma.pieces(), strict=True))


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_equal_the_slow_twins(tokenizer: Any, slow: SlowPieces, text: str) -> None:
    assert tokenizer(text)["input_ids"] == slow.encode(text)


PARTS = ["t", "h", "e", "the", " ", "  ", "\n", "an", "d", "<b>", "> </", "</", "é", "日", "語", "<eos>", "▁", "r"]


@settings(max_examples=500)
@given(st.lists(st.sampled_from(PARTS), max_size=24).map("".join))
def test_tokens_of_any_text_equal_the_slow_twins(tokenizer: Any, slow: SlowPieces, text: str) -> None:
    assert tokenizer(text)["input_ids"] == slow.encode(text)


@pytest.mark.parametrize("text", [text for text in TEXTS if "▁" not in text])  # which reads as a space
def test_texts_come_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == "<bos>" + text


def test_special_tokens(tokenizer: Any) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 1, 0)
    assert tokenizer("the", add_special_tokens=False)["input_ids"] == tokenizer("the")["input_ids"][1:]
    assert tokenizer("the", "an")["input_ids"].count(2) == 2
    assert tokenizer.decode(tokenizer("<eos>the")["input_ids"], skip_special_tokens=True) == "the"
    assert tokenizer.model_max_length == 256


def test_real_tokens_equal_the_slow_twins(real_gemma: Path) -> None:
    """The folder has no scores any more. In the file they fall from token to token, so the order of the ids will do."""
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer.from_file(str(real_gemma / "tokenizer.json"))
    vocab = backend.get_vocab()
    added = {token_id: token.special for token_id, token in backend.get_added_tokens_decoder().items()}
    tokens = sorted(vocab, key=vocab.__getitem__)
    is_byte = re.compile("<0x[0-9A-F]{2}>").fullmatch
    types = [(3 if added[i] else 4) if i in added else 6 if is_byte(token) else 1 for i, token in enumerate(tokens)]
    slow = SlowPieces(tokens, types, [-float(i) for i in range(len(tokens))])
    draw = random.Random(0)
    words = [
        *TEXTS,
        "naïve café",
        "def f(x):\n\treturn x",
        "한국어",
        "👩‍👩‍👧",
        "12345",
        " " * 70,
        "\n" * 40,
        "<table><td>",
    ]
    texts = [*words, *("".join(draw.choice(words) + " " * draw.randrange(40) for _ in range(6)) for _ in range(100))]
    assert [backend.encode(text).ids for text in texts] == [slow.encode(text) for text in texts]
