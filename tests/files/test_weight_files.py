"""Which files of a folder are weights; what their headers say is tested where it is used."""

import json

import pytest

from pagefold.errors import ModelNotFoundError
from pagefold.files.weights import find_weight_files


def touch(folder, *names):
    for name in names:
        (folder / name).write_text("x")


def test_one_file_is_taken_before_parts_and_safetensors_before_pickles(tmp_path):
    assert find_weight_files(tmp_path) == []
    touch(tmp_path, "pytorch_model.bin", "consolidated.safetensors", "adapter_model.safetensors")
    assert find_weight_files(tmp_path) == [tmp_path / "pytorch_model.bin"]
    touch(tmp_path, "b.safetensors", "a.safetensors")
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_weight_files(tmp_path) == [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    touch(tmp_path, "model.safetensors")
    assert find_weight_files(tmp_path) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "pytorch_model.bin.index.json").write_text(text)
    with pytest.raises(ModelNotFoundError, match="does not say which tensors are in which file"):
        find_weight_files(tmp_path)


def test_a_part_that_is_not_there_is_named(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ModelNotFoundError, match=r"lacks 1 of its weight files, such as gone\.safetensors"):
        find_weight_files(tmp_path)
