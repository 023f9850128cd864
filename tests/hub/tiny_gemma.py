"""A Gemma 3 of seven layers, as a GGUF file would hold it: the sixth sees everything, the others a window of 8."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, WINDOW = 64, 256, 4, 2, 32, 7, 8

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6
_WORDS = ["▁t", "he", "in", "▁the", "re", "▁▁t", "the", "an", "▁an", "and", "nd", "▁and", "▁<", "er", "here", "é"]


def pieces() -> list[tuple[str, int, float]]:
    """The vocabulary: (token, type, score), spaces of user-defined ones spelled as GGUF does."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    user_defined = ["\n", "\n\n", "\n\n\n", "  ", "   ", "    ", "<b>", "> </"]
    letters = [*"abcdefghijklmnopqrstuvwxyz.,<>/", "▁", "日"]
    return [
        *((token, _CONTROL, -1000.0) for token in control),
        *((token, _USER_DEFINED, -1000.0) for token in user_defined),
        *((f"<0x{byte:02X}>", _BYTE, 0.0) for byte in range(256)),
        *((token, _NORMAL, -float(rank)) for rank, token in enumerate([*_WORDS, *letters])),
    ]


def metadata() -> dict[str, Any]:
    """The header."""
    tokens, types, scores = (list(column) for column in zip(*pieces(), strict=True))
    return {
        "general.architecture": "gemma3",
        "gemma3.block_count": LAYERS,
        "gemma3.context_length": 256,
        "gemma3.embedding_length": HIDDEN,
        "gemma3.feed_forward_length": INNER,
        "gemma3.attention.head_count": HEADS,
        "gemma3.attention.head_count_kv": KV_HEADS,
        "gemma3.attention.key_length": HEAD_DIM,
        "gemma3.attention.value_length": HEAD_DIM,
        "gemma3.attention.sliding_window": WINDOW,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.rope.freq_base": 1e6,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }


@functools.cache
def tensors(tools: Any) -> dict[str, Any]:
    """The tensors, of the types that the real file has."""
    rng = np.random.default_rng(8)
    rows, kv_rows = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[tuple[int, ...], int]] = {"token_embd.weight": ((len(pieces()), HIDDEN), tools.Q8_0)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": ((HIDDEN,), tools.F32),
            f"blk.{layer}.attn_q.weight": ((rows, HIDDEN), tools.Q5_0),
            f"blk.{layer}.attn_q_norm.weight": ((HEAD_DIM,), tools.F32),
            f"blk.{layer}.attn_k.weight": ((kv_rows, HIDDEN), tools.Q5_0),
            f"blk.{layer}.attn_k_norm.weight": ((HEAD_DIM,), tools.F32),
            f"blk.{layer}.attn_v.weight": ((kv_rows, HIDDEN), tools.Q8_0),
            f"blk.{layer}.attn_output.weight": ((HIDDEN, rows), tools.Q5_0),
            f"blk.{layer}.post_attention_norm.weight": ((HIDDEN,), tools.F32),
            f"blk.{layer}.ffn_norm.weight": ((HIDDEN,), tools.F32),
            f"blk.{layer}.ffn_gate.weight": ((INNER, HIDDEN), tools.Q5_0),
            f"blk.{layer}.ffn_up.weight": ((INNER, HIDDEN), tools.Q5_0),
            f"blk.{layer}.ffn_down.weight": ((HIDDEN, INNER), tools.Q6_K if layer % 2 else tools.Q4_K),
            f"blk.{layer}.post_ffw_norm.weight": ((HIDDEN,), tools.F32),
        }
    shapes["output_norm.weight"] = ((HIDDEN,), tools.F32)
    return {name: tools.Stored.random(rng, shape, type_id) for name, (shape, type_id) in shapes.items()}


def write(tools: Any, path: Path, *, header: dict[str, Any] | None = None, other: dict[str, Any] | None = None) -> Path:
    """Write the file, with some of its header or tensors replaced (None: left out), and return its path."""
    keys, stored = metadata() | (header or {}), tensors(tools) | (other or {})
    content = tools.encode_gguf(
        {key: value for key, value in keys.items() if value is not None},
        {name: tensor for name, tensor in stored.items() if tensor is not None},
    )
    path.write_bytes(content)
    return path
