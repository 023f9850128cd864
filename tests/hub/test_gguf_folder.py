"""A GGUF file as MODEL: a small folder with a link, made once; whatever cannot be one is refused in one line."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.errors import ModelNotFoundError, UnsupportedModelError
from pagefold.files.weights import find_weight_files, num_elements, read_header
from pagefold.gguf.header import GgufFormatError
from pagefold.hub.catalog import CATALOG, resolve
from pagefold.hub.gguf_folder import write_gguf_folder
from pagefold.plan.weights import count_parameters

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FILES = {
    "config.json",
    "generation_config.json",
    "model.gguf",
    "pagefold.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def test_a_file_becomes_a_small_folder_once(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path, cache = tiny_gguf(), tmp_path / "cache"
    folder = resolve(str(path), cache)
    assert folder.parent == cache / "models"
    assert folder.name.startswith("tiny-")
    assert {file.name for file in folder.iterdir()} == FILES
    assert (folder / "model.gguf").readlink() == path
    made = (folder / "config.json").stat().st_mtime_ns
    assert resolve(str(path), cache) == folder
    assert (folder / "config.json").stat().st_mtime_ns == made
    assert [one.name for one in (cache / "models").iterdir() if not one.name.startswith(".")] == [folder.name]


def test_another_file_of_that_name_becomes_another_folder(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path, cache = tiny_gguf(), tmp_path / "cache"
    folders = [resolve(str(path), cache)]
    os.utime(path, ns=(1, 1))
    folders.append(resolve(str(path), cache))
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"im_start", b"im_stars"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    folders.append(resolve(str(path), cache))
    assert len(set(folders)) == 3


def test_a_file_that_went_away_has_no_weights(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_gguf()
    folder = resolve(str(path), tmp_path / "cache")
    path.rename(tmp_path / "elsewhere.gguf")
    assert find_weight_files(folder) == []
    with pytest.raises(ModelNotFoundError, match="holds no weights"):
        resolve(str(folder), tmp_path / "cache")


def test_a_folder_with_one_file_is_that_file(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_gguf()
    assert resolve(str(path.parent), tmp_path / "cache") == resolve(str(path), tmp_path / "cache")
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ModelNotFoundError, match=r"holds 2 GGUF files and no config\.json: other\.gguf, tiny\.gguf"):
        resolve(str(tmp_path), tmp_path / "cache")


def test_a_file_is_known_by_what_it_begins_with(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    blob = tmp_path / "sha256-0123"
    blob.write_bytes(tiny_gguf().read_bytes())
    assert resolve(str(blob), tmp_path / "cache").name.startswith("sha256-0123-")
    (tmp_path / "text").write_text("no model")
    with pytest.raises(ModelNotFoundError, match="is not a folder"):
        resolve(str(tmp_path / "text"), tmp_path / "cache")


@pytest.mark.parametrize("name", ["absent.gguf", "org/absent.gguf", "./absent.gguf"])
def test_a_file_that_is_not_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"neither a built-in name nor a folder or file that exists"):
        resolve(name, tmp_path)


def test_what_its_header_says_is_known_without_its_tensors(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_gguf()
    folder = resolve(str(path), tmp_path / "cache")
    (file,) = find_weight_files(folder)
    assert file == folder / "model.gguf"
    assert num_elements(file) == count_parameters(folder) == sum_of_elements(folder)
    assert path.read_bytes().startswith(read_header(file))
    path.write_bytes(path.read_bytes()[:5000])
    for read in (num_elements, read_header):
        with pytest.raises(ModelNotFoundError, match="damaged"):
            read(file)


def sum_of_elements(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    layer = 2 * hidden * hidden + 2 * kv * hidden + 3 * hidden * inner + 2 * hidden
    return int(config["num_hidden_layers"] * layer + vocab * hidden + hidden)


def test_the_real_file_says_what_its_converted_folder_says(real_gguf: Path, real_folder: Path, tmp_path: Path) -> None:
    folder = resolve(str(real_gguf), tmp_path)
    for name in FILES - {"model.gguf", "pagefold.json"}:
        assert (folder / name).read_bytes() == (real_folder / name).read_bytes(), name
    assert num_elements(folder / "model.gguf") == num_elements(real_folder / "model.safetensors")


def test_a_model_of_the_catalog_can_be_served_as_it_is(
    tiny_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line switches it: ``is_converted=False``."""
    converted = CATALOG["smollm2-135m"]
    model = dataclasses.replace(converted, is_converted=False)
    assert model.folder(tmp_path) != converted.folder(tmp_path)
    monkeypatch.setattr(type(model.source), "find", lambda *_, **__: tiny_gguf())
    folder = model.get(tmp_path / "cache")
    assert (folder / "model.gguf").readlink() == tmp_path / "tiny.gguf"
    assert model.is_here(tmp_path / "cache")


def test_a_file_that_was_fetched_for_it_moves_in(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    path, folder = tiny_gguf(), tmp_path / "folder"
    content = path.read_bytes()
    folder.mkdir()
    write_gguf_folder(path, folder, moves=True)
    assert not path.exists()
    assert not (folder / "model.gguf").is_symlink()
    assert (folder / "model.gguf").read_bytes() == content


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"general.architecture": "mamba"}, "architecture is 'mamba', which is none of llama, qwen2, qwen3, gemma2"),
        ({"tokenizer.ggml.pre": "viking"}, "family 'viking'"),
        ({"llama.block_count": 7}, "is missing"),
    ],
)
def test_the_command_line_refuses_in_one_line(
    tiny_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: dict[str, Any], says: str
) -> None:
    monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path / "cache"))
    result = CliRunner().invoke(app, ["models", "path", str(tiny_gguf(metadata=header))])
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error:")
    assert says in line
    assert not any((tmp_path / "cache" / "models").glob("tiny*"))


def test_a_kind_that_is_not_known_is_refused_in_one_line(
    tools: Any, tiny_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path / "cache"))
    stored = tools.Stored((64, 64), 23, np.zeros(4096, np.uint8).tobytes())
    path = tiny_gguf(tensors={"blk.1.attn_q.weight": stored})
    result = CliRunner().invoke(app, ["models", "path", str(path)])
    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert "blk.1.attn_q.weight is of type IQ4_XS, which cannot be read; these can: F32, F16, Q4_0" in line


def test_parts_of_a_model_are_refused(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="one of 2 parts of a model"):
        resolve(str(tiny_gguf(metadata={"split.count": 2})), tmp_path / "cache")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(GgufFormatError, match="not a GGUF file"):
        resolve(str(tmp_path / "empty.gguf"), tmp_path / "cache")
