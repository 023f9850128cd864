"""A Llama of 1B shape with random weights: a folder, or a GGUF file, for what is timed and not read."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Literal, NamedTuple

from kinds.written import written_like

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LLAMA_1B", "write_llama", "write_stored_llama"]

LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500_000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
"""Its config: the shape of Llama 3.2 1B, with a plain rope."""
_SPREAD = 0.02
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


class _Matrix(NamedTuple):
    """A matrix of a layer: its name in a folder and in a GGUF file, and its shape."""

    in_folder: str
    in_file: str
    rows: int
    columns: int


def _matrices() -> list[_Matrix]:
    """Return the matrices of a layer."""
    hidden, inner = LLAMA_1B["hidden_size"], LLAMA_1B["intermediate_size"]
    num_out, num_kv = (LLAMA_1B[name] * LLAMA_1B["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    return [
        _Matrix("self_attn.q_proj", "attn_q", num_out, hidden),
        _Matrix("self_attn.k_proj", "attn_k", num_kv, hidden),
        _Matrix("self_attn.v_proj", "attn_v", num_kv, hidden),
        _Matrix("self_attn.o_proj", "attn_output", hidden, num_out),
        _Matrix("mlp.gate_proj", "ffn_gate", inner, hidden),
        _Matrix("mlp.up_proj", "ffn_up", inner, hidden),
        _Matrix("mlp.down_proj", "ffn_down", hidden, inner),
    ]


def write_llama(folder: Path, tokenizer_from: Path) -> None:
    """Write the model into ``folder``: 2.5 GB of bfloat16, and the tokenizer of another model, which nobody asks."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, _SPREAD, generator=generator)

    hidden, vocab_size = LLAMA_1B["hidden_size"], LLAMA_1B["vocab_size"]
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": random(vocab_size, hidden), "model.norm.weight": ones.clone()}
    for layer in range(LLAMA_1B["num_hidden_layers"]):
        for one in _matrices():
            tensors[f"model.layers.{layer}.{one.in_folder}.weight"] = random(one.rows, one.columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = ones.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(LLAMA_1B, indent=2) + "\n", encoding="utf-8")
    for name in _TOKENIZER_FILES:
        if (tokenizer_from / name).exists():
            shutil.copy(tokenizer_from / name, folder / name)


def write_stored_llama(file: Path, header_from: Path, kind_name: Literal["Q4_K", "BF16"] = "Q4_K") -> None:
    """Write the model as a GGUF file: random weights of that kind, and tokenizer and vocabulary of another file.

    A block of Q4_K has 256 weights: a scale and a least value in float16, 12 bytes of scales, and 128 bytes of codes.
    The two numbers are such that weights are as large as a model's.
    """
    import gguf
    import numpy as np

    kind = gguf.GGMLQuantizationType[kind_name]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)

    def random(rows: int, columns: int) -> np.ndarray:
        if kind_name == "BF16":
            return gguf.quantize(_SPREAD * rng.standard_normal((rows, columns), dtype=np.float32), kind)
        blocks = rng.integers(0, 256, (rows, columns // block_size, block_bytes), dtype=np.uint8)
        blocks[..., :4] = np.array([1e-4, 7.5e-4], dtype=np.float16).view(np.uint8)
        return blocks.reshape(rows, -1)

    other = gguf.GGUFReader(header_from)
    hidden = LLAMA_1B["hidden_size"]
    own = {
        "llama.block_count": LLAMA_1B["num_hidden_layers"],
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": LLAMA_1B["intermediate_size"],
        "llama.attention.head_count": LLAMA_1B["num_attention_heads"],
        "llama.attention.head_count_kv": LLAMA_1B["num_key_value_heads"],
        "llama.rope.dimension_count": LLAMA_1B["head_dim"],
    }
    vocab_size = next(int(tensor.shape[1]) for tensor in other.tensors if tensor.name == "token_embd.weight")
    with written_like(file, other, own) as writer:
        writer.add_tensor("token_embd.weight", random(vocab_size, hidden), raw_dtype=kind)
        writer.add_tensor("output_norm.weight", np.ones(hidden, dtype=np.float32))
        for layer in range(LLAMA_1B["num_hidden_layers"]):
            for one in _matrices():
                blocks = random(one.rows, one.columns)
                writer.add_tensor(f"blk.{layer}.{one.in_file}.weight", blocks, raw_dtype=kind)
            for name in ("attn_norm", "ffn_norm"):
                writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, dtype=np.float32))
