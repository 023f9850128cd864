"""Synthetic GGUF files, small enough to check by hand, and the real one."""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pagefold.config import cache_dir
from pagefold.hub.catalog import CATALOG, resolve

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

F32, F16, Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q6_K = 0, 1, 2, 3, 6, 8, 12, 14
BLOCK_FORMS = {F32: (1, 4), F16: (1, 2), Q4_0: (32, 18), Q4_1: (32, 20), Q5_0: (32, 22), Q8_0: (32, 34)}
BLOCK_FORMS |= {Q4_K: (256, 144), Q6_K: (256, 210)}


@dataclasses.dataclass
class Stored:
    """A tensor as a file holds it: numpy's shape, GGML's type number, the bytes."""

    shape: tuple[int, ...]
    type_id: int
    data: bytes

    @classmethod
    def random(cls, rng: np.random.Generator, shape: tuple[int, ...], type_id: int) -> Stored:
        """Any bytes for the numbers, finite scales."""
        size = int(np.prod(shape))
        block_size, _ = BLOCK_FORMS[type_id]
        if type_id in (F32, F16):
            numbers = rng.normal(size=size).astype("<f4" if type_id == F32 else "<f2")
            return cls(shape, type_id, numbers.tobytes())
        num_scales = 2 if type_id in (Q4_1, Q4_K) else 1
        num_bytes = BLOCK_FORMS[type_id][1] - 2 * num_scales
        width = 0.002 if type_id in (Q4_K, Q6_K) else 0.1  # those have factors of their scales besides
        blocks = []
        for _ in range(size // block_size):
            parts = [rng.normal(scale=width, size=num_scales).astype("<f2").tobytes(), rng.bytes(num_bytes)]
            blocks += parts[::-1] if type_id == Q6_K else parts
        return cls(shape, type_id, b"".join(blocks))


def encode_text(content: str) -> bytes:
    """A string as GGUF stores it, without a type number."""
    return struct.pack("<Q", len(content.encode())) + content.encode()


def encode_value(value: Any) -> bytes:
    """A metadata value with its type number in front; (number, struct code, value) for the rest."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<Ii", 5, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + encode_text(value)
        case (int() as type_id, str() as code, number):
            return struct.pack(f"<I{code}", type_id, number)
    return encode_list(value)


def encode_list(items: list[Any]) -> bytes:
    """A metadata list, of texts, floats or ints, with its type numbers in front."""
    if isinstance(items[0], str):
        return struct.pack("<IIQ", 9, 8, len(items)) + b"".join(encode_text(item) for item in items)
    type_id, code = (6, "f") if isinstance(items[0], float) else (5, "i")
    return struct.pack(f"<IIQ{len(items)}{code}", 9, type_id, len(items), *items)


def encode_gguf(
    metadata: dict[str, Any], tensors: dict[str, Stored], *, version: int = 3, alignment: int = 32
) -> bytes:
    """A whole file."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        header += encode_text(key) + encode_value(value)
    data = b""
    for name, stored in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        dims = tuple(reversed(stored.shape))
        header += encode_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, stored.type_id, len(data))
        data += stored.data
    return header + b"\0" * (-len(header) % alignment) + data


HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in the order of its vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + position) for position in range(len(others))]


def tiny_metadata() -> dict[str, Any]:
    """The header of a llama of two layers with a byte-level vocabulary."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), *(m.replace(" ", "") for m in merges)]
    return {
        "general.architecture": "llama",
        "llama.block_count": LAYERS,
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 100000.0,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}",
    }


def tiny_tensors() -> dict[str, Stored]:
    """The tensors of that llama, of every type that can be read."""
    rng = np.random.default_rng(7)
    num_tokens = len(tiny_metadata()["tokenizer.ggml.tokens"])
    shapes: dict[str, tuple[tuple[int, ...], int]] = {"token_embd.weight": ((num_tokens, HIDDEN), Q8_0)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": ((HIDDEN,), F32),
            f"blk.{layer}.attn_q.weight": ((HEADS * HEAD_DIM, HIDDEN), Q4_1),
            f"blk.{layer}.attn_k.weight": ((KV_HEADS * HEAD_DIM, HIDDEN), Q4_1),
            f"blk.{layer}.attn_v.weight": ((KV_HEADS * HEAD_DIM, HIDDEN), Q4_0),
            f"blk.{layer}.attn_output.weight": ((HIDDEN, HEADS * HEAD_DIM), F16),
            f"blk.{layer}.ffn_norm.weight": ((HIDDEN,), F32),
            f"blk.{layer}.ffn_gate.weight": ((INNER, HIDDEN), Q4_1),
            f"blk.{layer}.ffn_up.weight": ((INNER, HIDDEN), Q4_0),
            f"blk.{layer}.ffn_down.weight": ((HIDDEN, INNER), Q8_0),
        }
    shapes["output_norm.weight"] = ((HIDDEN,), F32)
    return {name: Stored.random(rng, shape, type_id) for name, (shape, type_id) in shapes.items()}


def slow_numbers(stored: Stored) -> list[float]:
    """The slow twin: one number at a time, from the description of the formats, each step rounded to float32."""
    block_size, block_bytes = BLOCK_FORMS[stored.type_id]
    numbers: list[float] = []
    for start in range(0, len(stored.data), block_bytes):
        block = stored.data[start : start + block_bytes]
        if stored.type_id == F32:
            numbers += struct.unpack("<f", block)
            continue
        if stored.type_id in (Q4_K, Q6_K):
            numbers += (slow_q4_k if stored.type_id == Q4_K else slow_q6_k)(block)
            continue
        scale = np.float32(struct.unpack_from("<e", block)[0])
        if stored.type_id == F16:
            numbers.append(float(scale))
            continue
        for i in range(block_size):
            if stored.type_id == Q8_0:
                number = scale * np.float32(struct.unpack_from("<b", block, 2 + i)[0])
            elif stored.type_id == Q5_0:
                packed = block[6 + i % 16]
                nibble = packed % 16 if i < 16 else packed // 16
                fifth = block[2 + i // 8] >> i % 8 & 1
                number = scale * np.float32(nibble + 16 * fifth - 16)
            else:
                packed = block[(4 if stored.type_id == Q4_1 else 2) + i % 16]
                nibble = packed % 16 if i < 16 else packed // 16
                if stored.type_id == Q4_0:
                    number = scale * np.float32(nibble - 8)
                else:
                    number = scale * np.float32(nibble) + np.float32(struct.unpack_from("<e", block, 2)[0])
            numbers.append(float(number))
    return numbers


def slow_q4_k(block: bytes) -> list[float]:
    """A block of Q4_K: eight runs of 32 numbers, each with 6 bit for its scale and 6 for its minimum."""
    scale, minimum = (np.float32(number) for number in struct.unpack_from("<ee", block))
    packed = block[4:16]
    numbers = []
    for i in range(256):
        run = i // 32
        if run < 4:
            scale_factor, minimum_factor = packed[run] % 64, packed[run + 4] % 64
        else:
            scale_factor = packed[run + 4] % 16 + 16 * (packed[run - 4] // 64)
            minimum_factor = packed[run + 4] // 16 + 16 * (packed[run] // 64)
        byte = block[16 + 32 * (run // 2) + i % 32]
        nibble = byte // 16 if run % 2 else byte % 16
        number = scale * np.float32(scale_factor) * np.float32(nibble)
        numbers.append(float(number - minimum * np.float32(minimum_factor)))
    return numbers


def slow_q6_k(block: bytes) -> list[float]:
    """A block of Q6_K: 4 low bits, 2 high bits, and a signed factor of the scale for each 16 numbers."""
    scale = np.float32(struct.unpack_from("<e", block, 208)[0])
    numbers = []
    for i in range(256):
        half, j = i // 128, i % 128
        byte = block[64 * half + j % 64]
        low = byte % 16 if j < 64 else byte // 16
        high = block[128 + 32 * half + j % 32] >> 2 * (j // 32) & 3
        factor = struct.unpack_from("<b", block, 192 + i // 16)[0]
        numbers.append(float(scale * np.float32(factor) * np.float32(low + 16 * high - 32)))
    return numbers


class Tools:
    """What the tests of this room share."""

    F32, F16, Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q6_K = F32, F16, Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q6_K
    BLOCK_FORMS = BLOCK_FORMS
    Stored = Stored
    encode_gguf = staticmethod(encode_gguf)
    tiny_metadata = staticmethod(tiny_metadata)
    tiny_tensors = staticmethod(tiny_tensors)
    slow_numbers = staticmethod(slow_numbers)


@pytest.fixture(scope="session")
def tools() -> type[Tools]:
    """Writing GGUF files, and reading their numbers slowly."""
    return Tools


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write the tiny llama, with some of its metadata or tensors replaced (None: left out), and return the file."""

    def write(*, metadata: dict[str, Any] | None = None, tensors: dict[str, Stored | None] | None = None) -> Path:
        keys = tiny_metadata() | (metadata or {})
        stored = tiny_tensors() | (tensors or {})
        content = encode_gguf(
            {key: value for key, value in keys.items() if value is not None},
            {name: value for name, value in stored.items() if value is not None},
        )
        path = tmp_path / "tiny.gguf"
        path.write_bytes(content)
        return path

    return write


@pytest.fixture(scope="session")
def real_gemma() -> Path:
    """Gemma 3 270M, converted; for people who have accepted its terms and fetched it: nothing is downloaded here."""
    model = CATALOG["gemma-3-270m"]
    if not model.is_here(cache_dir()):
        pytest.skip("Gemma 3 270M is not in the cache: pagefold models get gemma-3-270m --accept-license")
    return model.folder(cache_dir())


@pytest.fixture(scope="session")
def real_folder() -> Path:
    """The built-in model, converted; shared with whoever else uses the cache, so only to be read."""
    return resolve("smollm2-135m", cache_dir())


@pytest.fixture(scope="session")
def real_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model's GGUF file."""
    return CATALOG["smollm2-135m"].source.find(tmp_path_factory.mktemp("wheel"))
