"""Tokenizer: the model's own, chats in its own template; what cannot be used is refused with a remedy."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pagefold.errors import InvalidRequestError, UnsupportedModelError
from pagefold.memory.native import allocated_bytes
from pagefold.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

CHAT = [{"role": "user", "content": "Grüezi 🙂"}]


def copy_with(smollm2: Path, folder: Path, **settings: object) -> Path:
    """Copy the tokenizer's files, with other settings in ``tokenizer_config.json``; None takes one away."""
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"):
        shutil.copy(smollm2 / name, folder)
    file = folder / "tokenizer_config.json"
    written = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({name: value for name, value in written.items() if value is not None}))
    return folder


def test_what_is_encoded_is_decoded(tokenizer: Tokenizer) -> None:
    text = "Zürich liegt am See 🏔️, 湖.\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == []


def test_special_tokens_are_not_decoded(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([1, *tokenizer.encode("hello"), 2]) == "hello"


def test_a_chat_is_in_the_models_template_and_ends_where_the_answer_begins(tokenizer: Tokenizer) -> None:
    assert tokenizer.has_chat_template
    token_ids = tokenizer.encode_chat([{"role": "system", "content": "Be brief."}, *CHAT])
    im_start, im_end, newline = 1, 2, tokenizer.encode("\n")
    assert token_ids == [
        *[im_start, *tokenizer.encode("system\nBe brief."), im_end, *newline],
        *[im_start, *tokenizer.encode("user\nGrüezi 🙂"), im_end, *newline],
        *[im_start, *tokenizer.encode("assistant\n")],
    ]


def test_a_prompt_gets_the_models_first_token_and_a_chat_only_what_its_template_says(
    smollm2: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    import tokenizers

    folder = copy_with(smollm2, tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    strict = Tokenizer(folder)
    assert strict.encode("hello") == [1, *tokenizer.encode("hello")]
    assert strict.encode_chat(CHAT) == tokenizer.encode_chat(CHAT)


def test_a_chat_without_a_template_is_refused(smollm2: Path, tmp_path: Path) -> None:
    bare = Tokenizer(copy_with(smollm2, tmp_path, chat_template=None))
    assert not bare.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template") as refused:
        bare.encode_chat(CHAT)
    assert (refused.value.param, bool(refused.value.remedy)) == ("messages", True)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "refused these messages"),
        ("{{ 1 // 0 }}", "refused these messages"),
        ("{% if %}", "refused these messages"),
    ],
)
def test_a_template_that_fails_refuses_the_messages(smollm2: Path, tmp_path: Path, template: str, message: str) -> None:
    picky = Tokenizer(copy_with(smollm2, tmp_path, chat_template=template))
    with pytest.raises(InvalidRequestError, match=message) as refused:
        picky.encode_chat(CHAT)
    assert (refused.value.param, bool(refused.value.remedy)) == ("messages", True)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {}}', '{"version": "1.0", "model": {"type": "None"}}'])
def test_a_tokenizer_that_cannot_be_loaded_is_refused_with_its_folder(
    smollm2: Path, tmp_path: Path, content: str
) -> None:
    folder = copy_with(smollm2, tmp_path)
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(UnsupportedModelError) as refused:
        Tokenizer(folder)
    assert str(folder) in refused.value.message
    assert "tokenizer.json" in refused.value.remedy


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        Tokenizer(tmp_path)
    assert str(tmp_path) in refused.value.message


def test_a_machine_that_fails_is_no_fault_of_the_messages(tokenizer: Tokenizer, monkeypatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(tokenizer._tokenizer, "apply_chat_template", fails)
    with pytest.raises(OSError, match="Too many open files"):
        tokenizer.render_chat(CHAT)


GROWS = """
import gc, random, sys
from pathlib import Path

from pagefold.memory.native import allocated_bytes
from pagefold.tokenizer import Tokenizer

tokenizer = Tokenizer(Path(sys.argv[1]))
rng = random.Random(0)


def grown_by(num_words):
    gc.collect()
    before = allocated_bytes()
    for _ in range(num_words // 64):
        tokenizer.encode(" ".join("".join(rng.choices("bcdfghjklmnpqrstvwxz", k=250)) for _ in range(64)))
    gc.collect()
    return allocated_bytes() - before


print(grown_by(4096), grown_by(4096), tokenizer.cache_size().max_bytes)
"""
"""What a process of its own has grown by, in which nobody else gives memory back."""


@pytest.mark.skipif(allocated_bytes() is None, reason="only glibc tells")
def test_what_is_remembered_of_words_has_a_bound_and_reaches_it(smollm2: Path) -> None:
    """The longest words that the library remembers, twice as many as it may: then it remembers no more."""
    told = subprocess.run([sys.executable, "-c", GROWS, smollm2], capture_output=True, text=True, check=True).stdout
    first, second, max_bytes = map(int, told.split())
    assert 0.7 * max_bytes < first < max_bytes
    assert second < 0.05 * max_bytes
