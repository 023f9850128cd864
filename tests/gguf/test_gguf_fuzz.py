"""Headers that are cut, lie or make no sense: a clear error or a model, in bounded memory, whatever the bytes are."""

from __future__ import annotations

import json
import struct
import tracemalloc
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pagefold.errors import PagefoldError
from pagefold.gguf.architectures import find_architecture
from pagefold.gguf.file import GgufFile
from pagefold.gguf.header import GgufFormatError, GgufHeader
from pagefold.hub.convert import write_all_but_weights

if TYPE_CHECKING:
    from pathlib import Path

NUM_CASES, NUM_QUICK = 10_000, 300
MAX_BYTES = 64 << 20
ODD = (0, 1, 2, 7, 31, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)
CODES = {int: (4, "I"), float: (6, "f"), bool: (7, "?")}
HIDDEN, INNER, TOKENS, HEAD_DIM = 32, 32, 300, 8


class Written:
    """A file, with the places of all counts, lengths, types, sizes and offsets in its header."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.places: list[tuple[int, str]] = []

    def number(self, code: str, value: Any) -> None:
        if code in "IQf":
            self.places.append((len(self.content), code))
        self.content += struct.pack(f"<{code}", value)

    def text(self, text: str) -> None:
        self.number("Q", len(text.encode()))
        self.content += text.encode()

    def value(self, value: Any) -> None:
        if isinstance(value, list):
            self.number("I", 9)
            self.number("I", 8 if isinstance(value[0], str) else 4)
            self.number("Q", len(value))
            for item in value:
                if isinstance(item, str):
                    self.text(item)
                else:
                    self.content += struct.pack("<I", item)
        elif isinstance(value, str):
            self.number("I", 8)
            self.text(value)
        else:
            type_id, code = CODES[type(value)]
            self.number("I", type_id)
            self.number(code, value)


def metadata(name: str) -> dict[str, Any]:
    tokens = [f"t{place}" for place in range(TOKENS - 5)] + ["ab", "<|end|>", "<bos>", "a", "b"]
    return {
        "general.architecture": name,
        f"{name}.block_count": 1,
        f"{name}.context_length": 64,
        f"{name}.embedding_length": HIDDEN,
        f"{name}.feed_forward_length": INNER,
        f"{name}.attention.head_count": 4,
        f"{name}.attention.head_count_kv": 2,
        f"{name}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{name}.attention.sliding_window": 16,
        f"{name}.rope.freq_base": 1e4,
        f"{name}.rope.scaling.type": "none",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (TOKENS - 4) + [3, 3, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": TOKENS - 3,
        "tokenizer.ggml.eos_token_id": TOKENS - 4,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    norms = dict.fromkeys(("attn_norm", "ffn_norm"), (HIDDEN,))
    matrices = {"attn_output": (HIDDEN, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    if name == "phi3":
        matrices |= {"attn_qkv": (64, HIDDEN), "ffn_up": (2 * INNER, HIDDEN)}
    else:
        matrices |= {"attn_q": (HIDDEN, HIDDEN), "attn_k": (16, HIDDEN), "attn_v": (16, HIDDEN)}
        matrices |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
    if name.startswith("gemma"):
        norms |= dict.fromkeys(("post_attention_norm", "post_ffw_norm"), (HIDDEN,))
    if name in ("qwen3", "gemma3"):
        norms |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (HEAD_DIM,))
    found = {f"blk.0.{one}.weight": shape for one, shape in (norms | matrices).items()}
    if name == "qwen2":
        found |= {f"blk.0.attn_{one}.bias": (HIDDEN if one == "q" else 16,) for one in "qkv"}
    if name == "llama":
        found["rope_freqs.weight"] = (HEAD_DIM // 2,)
    if name == "phi3":
        found |= {f"rope_factors_{one}.weight": (HEAD_DIM // 2,) for one in ("long", "short")}
    return found | {"token_embd.weight": (TOKENS, HIDDEN), "output_norm.weight": (HIDDEN,)}


def write(name: str) -> Written:
    """Write a whole file of float32 and Q8_0."""
    keys, tensors = metadata(name), shapes(name)
    if name not in ("gemma2", "gemma3", "phi3"):
        del keys[f"{name}.attention.sliding_window"]
    written = Written()
    written.content += b"GGUF"
    for code, number in (("I", 3), ("Q", len(tensors)), ("Q", len(keys))):
        written.number(code, number)
    for key, value in keys.items():
        written.text(key)
        written.value(value)
    data = b""
    for tensor, shape in tensors.items():
        written.text(tensor)
        written.number("I", len(shape))
        for size in reversed(shape):
            written.number("Q", size)
        written.number("I", 8 if len(shape) > 1 else 0)
        written.number("Q", len(data))
        num_bytes = int(np.prod(shape)) // 32 * 34 if len(shape) > 1 else 4 * shape[0]
        data += (np.ones(shape, "<f4").tobytes() if len(shape) == 1 else bytes(num_bytes)) + bytes(-num_bytes % 32)
    written.content += bytes(-len(written.content) % 32) + data
    return written


NAMES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
FILES = {name: write(name) for name in NAMES}


def damaged(random: Random) -> bytes:
    """Return a file in which some numbers of the header lie, some bytes are others, or something is missing."""
    written = FILES[random.choice(NAMES)]
    content = bytearray(written.content)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        place, code = random.choice(written.places)
        size = struct.calcsize(code)
        value = random.choice((*ODD, random.getrandbits(64), struct.unpack_from("<I", content, place)[0] ^ 1))
        content[place : place + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    header_bytes = written.places[-1][0]
    how = random.random()
    if how < 0.15:
        del content[random.randrange(len(content)) :]
    elif how < 0.3:
        for _ in range(random.randrange(1, 9)):
            content[random.randrange(4, header_bytes)] = random.randrange(256)
    elif how < 0.4:
        start = random.randrange(4, header_bytes)
        del content[start : start + random.randrange(1, 64)]
    return bytes(content)


def read_all(path: Path, folder: Path) -> None:
    """Do everything with a file that is done before weights are multiplied."""
    with GgufFile(path) as gguf:
        for weight in write_all_but_weights(gguf, folder).values():
            assert weight.of_model(gguf.read(weight.gguf_name)).shape == weight.shape
    json.loads((folder / "config.json").read_text(), parse_constant=no_number)
    Tokenizer.from_file(str(folder / "tokenizer.json"))


def no_number(text: str) -> None:
    raise AssertionError(text)


def what_is_wrong(path: Path, folder: Path) -> str:
    try:
        read_all(path, folder)
    except PagefoldError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_not_damaged_are_models(name: str, tmp_path: Path) -> None:
    (tmp_path / "whole.gguf").write_bytes(FILES[name].content)
    read_all(tmp_path / "whole.gguf", tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()


@pytest.mark.parametrize("num_cases", [NUM_QUICK, pytest.param(NUM_CASES, marks=pytest.mark.long)])
def test_any_header_is_a_model_or_a_clear_error_in_bounded_memory(num_cases: int, tmp_path: Path) -> None:
    random, path, errors = Random(num_cases), tmp_path / "fuzz.gguf", 0
    tracemalloc.start()
    try:
        for _ in range(num_cases):
            path.write_bytes(damaged(random))
            said = what_is_wrong(path, tmp_path)
            errors += bool(said)
            assert not said or (str(path) in said and len(said) < 1000 and "\n" not in said), said
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MAX_BYTES
    assert num_cases / 2 < errors < num_cases


def test_a_large_file_does_not_make_a_large_header(tmp_path: Path) -> None:
    """A list of as many bytes as the file has would take 16 times as much memory."""
    path = tmp_path / "large.gguf"
    for item_type, item_bytes in ((0, 1), (4, 4), (8, 8)):
        head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, item_type, 1 << 30)
        with path.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + (item_bytes << 30))  # a hole: it takes no room
        tracemalloc.start()
        try:
            with pytest.raises(GgufFormatError, match=r"more than 4194304 values in its header"):
                GgufHeader(path)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_a_header_of_endless_strings(tmp_path: Path) -> None:
    path = tmp_path / "strings.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIQ", 1, b"k", 8, 1 << 30)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + (1 << 30))
    with pytest.raises(GgufFormatError, match="strings of more than"):
        GgufHeader(path)


def change(name: str, old: bytes, new: bytes, path: Path) -> Path:
    content = bytes(FILES[name].content)
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    return path


def test_tensors_that_lie_on_each_other(tmp_path: Path) -> None:
    content = bytearray(FILES["llama"].content)
    place = content.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8 + 4
    content[place : place + 8] = struct.pack("<Q", 0)
    (tmp_path / "on.gguf").write_bytes(content)
    with pytest.raises(GgufFormatError, match="lies on another one"):
        GgufHeader(tmp_path / "on.gguf")
    content[place : place + 8] = struct.pack("<Q", 3)
    (tmp_path / "on.gguf").write_bytes(content)
    with pytest.raises(GgufFormatError, match="lies at byte 3, which is no multiple of 32"):
        GgufHeader(tmp_path / "on.gguf")


def test_a_key_that_is_there_twice(tmp_path: Path) -> None:
    path = change("llama", b"llama.context_length", b"llama.rope.freq_base", tmp_path / "twice.gguf")
    with pytest.raises(GgufFormatError, match=r"the key llama\.rope\.freq_base twice"):
        GgufHeader(path)


def test_more_positions_than_any_model_has(tmp_path: Path) -> None:
    """Tables of ropes grow with them: half a TiB here."""
    content = bytearray(FILES["llama"].content)
    place = content.index(b"llama.context_length") + len("llama.context_length") + 4
    content[place : place + 4] = struct.pack("<I", 2**31 - 1)
    (tmp_path / "long.gguf").write_bytes(content)
    with GgufFile(tmp_path / "long.gguf") as header, pytest.raises(GgufFormatError, match="no model has more than"):
        find_architecture(header).config(header)
