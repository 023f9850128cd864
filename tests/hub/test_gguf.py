"""Reading GGUF: every number against a slow twin, every damage a typed error."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagefold.gguf.dequantize import DEQUANTIZE
from pagefold.gguf.file import GgufFile
from pagefold.gguf.header import GgufError, GgufFormatError, GgufTypeError
from pagefold.gguf.kinds import TENSOR_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pagefold.gguf.kinds import TensorKind


TYPES = ("F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")  # of which there is a slow twin
KINDS = [kind.name for kind in TENSOR_KINDS.values()]


def bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array, np.float32).view(np.uint32)


@pytest.mark.parametrize("type_name", TYPES)
def test_numbers_equal_the_slow_twin_in_bits(tools: Any, tmp_path: Path, type_name: str) -> None:
    stored = tools.Stored.random(np.random.default_rng(1), (5, 768), getattr(tools, type_name))
    path = tmp_path / "one.gguf"
    path.write_bytes(tools.encode_gguf({}, {"t": stored}))
    with GgufFile(path) as gguf:
        found = gguf.read("t")
        runs = list(gguf.read_rows("t", 2))
    assert found.shape == (5, 768)
    assert [run.shape for run in runs] == [(2, 768), (2, 768), (1, 768)]
    assert np.concatenate(runs).tobytes() == found.tobytes()
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    np.testing.assert_array_equal(bits(found).ravel(), bits(np.array(tools.slow_numbers(stored))))


SCALES = {"Q6_K": (208,)} | dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
EXTREME = (0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0, np.inf, -np.inf, np.nan, 1.0)


@pytest.mark.parametrize("kind", TENSOR_KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("scales", ["any", "extreme"])
def test_numbers_equal_those_of_ggmls_own_reader_in_bits(kind: TensorKind, scales: str) -> None:
    """Any bytes at all, scales that are infinite or not numbers among them; and every pair of extreme scales."""
    ggml = pytest.importorskip("gguf")
    blocks = np.random.default_rng(5).integers(0, 256, (4000, kind.block_bytes), dtype=np.uint8)
    if scales == "extreme" and kind.is_quantized:
        for number, place in enumerate(SCALES.get(kind.name, (0,))):
            which = np.arange(len(blocks)) // len(EXTREME) ** number % len(EXTREME)
            blocks[:, place : place + 2] = np.array(EXTREME, "<f2")[which][:, None].view(np.uint8)
    elif scales == "extreme":
        blocks = np.array(EXTREME, "<f4").view(np.uint8).reshape(-1, kind.block_bytes)
    with np.errstate(all="ignore"):
        ours = DEQUANTIZE[kind.name](blocks)
        theirs = ggml.dequantize(blocks, ggml.GGMLQuantizationType(kind.type_id)).reshape(ours.shape)
    assert ours.dtype == np.float32
    assert ours.shape == (len(blocks), kind.block_size)
    is_number = ~np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), ~is_number)
    np.testing.assert_array_equal(bits(ours[is_number]), bits(theirs[is_number]))


def test_a_quantized_vector_is_read_whole(tools: Any, tmp_path: Path) -> None:
    stored = tools.Stored.random(np.random.default_rng(6), (96,), tools.Q8_0)
    path = tmp_path / "vector.gguf"
    path.write_bytes(tools.encode_gguf({}, {"t": stored}))
    with GgufFile(path) as gguf:
        (rows,) = gguf.read_rows("t", 1)
    np.testing.assert_array_equal(bits(rows), bits(np.array(tools.slow_numbers(stored))))


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.0.attn_k.weight", "blk.29.attn_v.weight"])
def test_the_real_files_numbers_equal_the_slow_twin(tools: Any, real_gguf: Path, name: str) -> None:
    with GgufFile(real_gguf) as gguf:
        info, found = gguf.tensors[name], gguf.read(name)
    data = real_gguf.read_bytes()[info.offset_bytes : info.offset_bytes + info.num_bytes]
    slow = tools.slow_numbers(tools.Stored(info.shape, info.kind.type_id, data))
    np.testing.assert_array_equal(bits(found).ravel(), bits(np.array(slow)))


def test_the_real_embedding_equals_the_slow_twin_at_both_ends(tools: Any, real_gguf: Path) -> None:
    with GgufFile(real_gguf) as gguf:
        info, found = gguf.tensors["token_embd.weight"], gguf.read("token_embd.weight")
    row_bytes = info.num_bytes // info.shape[0]
    assert info.kind.name == "Q8_0"
    with real_gguf.open("rb") as file:
        for row in (0, 1, 2, info.shape[0] - 1):
            file.seek(info.offset_bytes + row * row_bytes)
            slow = tools.slow_numbers(tools.Stored((info.shape[1],), tools.Q8_0, file.read(row_bytes)))
            np.testing.assert_array_equal(bits(found[row]), bits(np.array(slow)))


def test_tensors_lie_at_the_files_own_alignment(tools: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    tensors = {name: tools.Stored.random(rng, (3,), tools.F32) for name in "abc"}
    path = tmp_path / "aligned.gguf"
    path.write_bytes(tools.encode_gguf({"general.alignment": 8}, tensors, version=2, alignment=8))
    with GgufFile(path) as gguf:
        assert list(gguf.tensors) == ["a", "b", "c"]
        for name, stored in tensors.items():
            assert gguf.read(name).tobytes() == stored.data


def test_metadata_of_every_type(tools: Any, tmp_path: Path) -> None:
    numbers = {0: ("B", 200), 1: ("b", -3), 2: ("H", 60000), 3: ("h", -300), 4: ("I", 1 << 31), 5: ("i", -(1 << 31))}
    numbers |= {10: ("Q", 1 << 63), 11: ("q", -(1 << 62))}
    metadata: dict[str, Any] = {f"number.{type_id}": (type_id, *number) for type_id, number in numbers.items()}
    metadata |= {"double": (12, "d", 0.1), "text": "Grüße\n", "yes": True, "list": ["a", "", "é"], "ids": [1, -1]}
    path = tmp_path / "metadata.gguf"
    path.write_bytes(tools.encode_gguf(metadata, {}))
    with GgufFile(path) as gguf:
        for type_id, (_, number) in numbers.items():
            assert gguf.value(f"number.{type_id}", int) == number
        assert gguf.value("double", float) == 0.1
        assert gguf.value("number.0", float) == 200.0
        assert gguf.value("text", str) == "Grüße\n"
        assert gguf.value("yes", bool) is True
        assert gguf.values("list", str) == ["a", "", "é"]
        assert gguf.values("ids", int) == [1, -1]
        assert gguf.value("absent", int, 5) == 5
        for key, kind in [("absent", int), ("yes", int), ("text", int), ("list", str), ("double", int)]:
            with pytest.raises(GgufFormatError, match=key):
                gguf.value(key, kind)
        for key, kind in [("absent", int), ("ids", str), ("text", str)]:
            with pytest.raises(GgufFormatError, match=key):
                gguf.values(key, kind)


@pytest.mark.parametrize("content", [b"", b"GG", b"GGML" + bytes(40), b"PK\x03\x04", b"FUGG" + bytes(40)])
def test_a_file_that_is_not_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufFormatError, match="not a GGUF file"):
        GgufFile(path)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="cannot be read: No such file"):
        GgufFile(tmp_path / "absent.gguf")
    with pytest.raises(GgufError, match="cannot be read"):
        GgufFile(tmp_path)


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_an_unknown_version(tools: Any, tmp_path: Path, version: int) -> None:
    path = tmp_path / "version.gguf"
    path.write_bytes(tools.encode_gguf({}, {}, version=version))
    with pytest.raises(GgufFormatError, match="version"):
        GgufFile(path)


def test_a_file_cut_short_anywhere(tools: Any, tmp_path: Path) -> None:
    metadata = {"name": "tiny", "list": ["ab", "cd"], "ids": [1, 2, 3], "real": 0.5}
    tensors = {"t": tools.Stored.random(np.random.default_rng(3), (2, 32), tools.Q4_1)}
    whole = tools.encode_gguf(metadata, tensors)
    path = tmp_path / "short.gguf"
    for length in range(4, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(GgufFormatError, match="damaged: it ends at byte"):
            GgufFile(path)
    path.write_bytes(whole)
    GgufFile(path).close()


def test_a_tensor_of_an_unknown_type_is_named(tools: Any, tmp_path: Path) -> None:
    path = tmp_path / "type.gguf"
    for type_id, said in [(11, "Q3_K"), (999, "999")]:
        path.write_bytes(tools.encode_gguf({}, {"blk.0.w": tools.Stored((32,), type_id, bytes(32))}))
        with pytest.raises(GgufTypeError, match=rf"blk\.0\.w is of type {said}.*Q4_0, Q4_1, Q5_0, Q5_1, Q8_0"):
            GgufFile(path)


@pytest.mark.parametrize(
    ("shape", "said"),
    [((0, 32), "empty"), ((1, 1, 1, 1, 32), "5 dimensions"), ((), "0 dimensions"), ((32, 33), "whole blocks")],
)
def test_a_tensor_of_an_impossible_shape(tools: Any, tmp_path: Path, shape: tuple[int, ...], said: str) -> None:
    path = tmp_path / "shape.gguf"
    path.write_bytes(tools.encode_gguf({}, {"t": tools.Stored(shape, tools.Q8_0, bytes(34))}))
    with pytest.raises(GgufFormatError, match=said):
        GgufFile(path)


def test_absurd_counts_are_refused_before_memory_is_taken(tools: Any, tmp_path: Path) -> None:
    path = tmp_path / "counts.gguf"
    huge = (1 << 64) - 1
    texts = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, huge)
    ints = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 4, huge)
    nested = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1)
    key = b"GGUF" + struct.pack("<IQQ", 3, 0, huge) + struct.pack("<Q", huge)
    tensor = tools.encode_gguf({}, {"t": tools.Stored((1 << 40, 1 << 40), tools.F32, bytes(64))})
    for content in (texts, ints, nested, key, tensor):
        path.write_bytes(content)
        with pytest.raises(GgufFormatError):
            GgufFile(path)


def test_a_file_that_contradicts_itself(tools: Any, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    stored = tools.Stored((1,), tools.F32, bytes(4))
    twice = tools.encode_gguf({}, {"ab": stored, "ac": stored}).replace(
        b"\x02" + bytes(7) + b"ac", b"\x02" + bytes(7) + b"ab"
    )
    bad_text = tools.encode_gguf({"k": "é"}, {}).replace("é".encode(), b"\xff\xff")
    bad_alignment = tools.encode_gguf({"general.alignment": 0}, {})
    for content, said in [(twice, "two tensors"), (bad_text, "UTF-8"), (bad_alignment, "alignment")]:
        path.write_bytes(content)
        with pytest.raises(GgufFormatError, match=said):
            GgufFile(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(data=st.data())
def test_any_damage_is_a_typed_error_or_harmless(tools: Any, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(tools.encode_gguf({"a": ["x", "y"], "b": 1, "c": [1, 2]}, tools_tensors(tools)))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(content)
    try:
        with GgufFile(path) as gguf:
            for name, info in gguf.tensors.items():
                assert gguf.read(name).shape == info.shape
    except GgufError:
        pass


def tools_tensors(tools: Any) -> dict[str, Any]:
    return {"t": tools.Stored((2, 32), tools.Q4_0, bytes(36)), "u": tools.Stored((3,), tools.F32, bytes(12))}


def test_arrays_outlive_the_file(tiny_gguf: Callable[..., Path]) -> None:
    with GgufFile(tiny_gguf()) as gguf:
        arrays = [gguf.read(name) for name in gguf.tensors]
    assert all(np.isfinite(array).all() for array in arrays)
