"""Tiny models of every architecture as GGUF's own library writes them, and beside each a folder of what its file says.

Weights are quantized and expanded by that library; the folder has the expanded ones in transformers' order. So nothing
of ours is in either.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
import transformers
from equivalence import tiny_models

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["FAMILIES", "GgufPair", "byte_alphabet", "write_model", "write_pair"]

_Q = gguf.GGMLQuantizationType
KINDS = (_Q.Q4_0, _Q.Q4_1, _Q.Q5_0, _Q.Q5_1, _Q.Q8_0, _Q.F16, _Q.BF16, _Q.F32)
"""Those that the library can make, and that have blocks of 32 at most."""
K_KINDS = (_Q.Q4_K, _Q.Q5_K, _Q.Q6_K)
EOS, UNUSED, NORMAL, CONTROL = 2, 5, 1, 3


def _tiny(name: str, **changes: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = tiny_models.FAMILIES[name]()
        for key, value in {"eos_token_id": EOS, **changes}.items():
            setattr(config, key, value)
        return config

    return make


def _rope(**rope: Any) -> Callable[[], Any]:
    return _tiny("llama", rope_parameters={"rope_theta": 1e4, **rope})


def _longrope() -> Any:
    """Return a config whose factors are those of a file: numbers in float32."""
    config = _tiny("phi3-longrope")()
    for which in ("long_factor", "short_factor"):
        config.rope_parameters[which] = [round(factor, 3) for factor in config.rope_parameters[which]]
    return config


_GEMMA = {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}
FAMILIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("llama", _tiny("llama")),
    "llama-tied": ("llama", _tiny("llama-mqa", tie_word_embeddings=True)),
    "llama3": ("llama", _tiny("llama3")),
    "llama-linear": ("llama", _rope(rope_type="linear", factor=4.0)),
    "llama-yarn": ("llama", _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)),
    "qwen2": (
        "qwen2",
        _tiny("qwen2", use_sliding_window=False, sliding_window=None, layer_types=["full_attention"] * 2),
    ),
    "qwen3": ("qwen3", _tiny("qwen3")),
    "gemma2": ("gemma2", _tiny("gemma2", **_GEMMA)),
    "gemma3": ("gemma3", _tiny("gemma3", **_GEMMA)),
    "phi3": ("phi3", _tiny("phi3")),
    "phi3-longrope": ("phi3", _longrope),
}
"""By a name: GGUF's name of the architecture, and the config."""


@dataclass(frozen=True)
class GgufPair:
    """A file, and what it says.

    Attributes:
        path: of the file.
        folder: of the same model, as ``save_pretrained`` writes it.
    """

    path: Path
    folder: Path


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in the order of its vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in plain] + [chr(256 + place) for place in range(256 - len(plain))]


def write_pair(family: str, where: Path, *, seed: int = 0) -> GgufPair:
    """Write a tiny model of that family, with tensors of all kinds that the library makes."""
    name, make = FAMILIES[family]
    return write_model(name, make(), where, seed=seed)


def write_model(name: str, config: Any, where: Path, *, seed: int = 0, k_kinds: bool = False) -> GgufPair:
    """Write a model of that architecture and config; of K kinds if asked for."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    family = "gemma" if name.startswith("gemma") else name
    with torch.no_grad():
        for parameter_name, parameter in sorted(model.named_parameters()):
            parameter.copy_(tiny_models._draw(parameter_name, parameter, generator, family))
    path = where / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, name)
    _write_header(writer, name, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config.num_hidden_layers)
    rng = np.random.default_rng(seed)
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for place, (hf_name, tensor) in enumerate(state.items()):
        numbers = tensor.float().numpy().copy()
        stored, change_back = _as_stored(name, config, hf_name, numbers)
        kind = _Q.F32 if numbers.ndim == 1 else (K_KINDS if k_kinds else KINDS)[place % (3 if k_kinds else len(KINDS))]
        blocks = _random_blocks(rng, kind, numbers.shape) if k_kinds and numbers.ndim > 1 else _blocks(stored, kind)
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(gguf_name, blocks, raw_dtype=kind)
        expanded = gguf.dequantize(blocks, kind).reshape(numbers.shape)
        tensor.copy_(torch.from_numpy(change_back(expanded)))
    _write_factors(writer, name, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = where / "reference"
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    return GgufPair(path, folder)


def _blocks(stored: np.ndarray, kind: Any) -> np.ndarray:
    return stored if kind == _Q.F32 else gguf.quantize(stored, kind)


def _random_blocks(rng: np.random.Generator, kind: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Any codes, with scales of weights that work; the library cannot make blocks of these kinds."""
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // block_size, block_bytes), dtype=np.uint8)
    scale = {_Q.Q4_K: 2e-4, _Q.Q5_K: 1e-4, _Q.Q6_K: 3e-5}[kind] * 16 / math.sqrt(shape[1])
    places = {_Q.Q6_K: (208,)}.get(kind, (0, 2))
    for place in places:
        blocks[..., place : place + 2] = np.array([scale], "<f2").view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _as_stored(name: str, config: Any, hf_name: str, numbers: np.ndarray) -> tuple[np.ndarray, Callable[..., Any]]:
    """Return a tensor as the file has it, and what makes the model's of the file's, expanded."""
    if name == "llama" and hf_name.endswith(("q_proj.weight", "k_proj.weight")):
        num_heads = config.num_attention_heads if "q_proj" in hf_name else config.num_key_value_heads
        shape = numbers.shape

        def back(rows: np.ndarray) -> np.ndarray:
            return rows.reshape(num_heads, -1, 2, shape[1]).swapaxes(1, 2).reshape(shape)

        return numbers.reshape(num_heads, 2, -1, shape[1]).swapaxes(1, 2).reshape(shape).copy(), back
    if name.startswith("gemma") and hf_name.endswith("norm.weight"):
        return numbers + np.float32(1), lambda rows: rows - np.float32(1)
    return numbers, lambda rows: rows


def _write_header(writer: Any, name: str, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    if name != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters
    if name == "gemma3":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_sliding_window_pattern(2)
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if name in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if name == "phi3":
        writer.add_rope_scaling_orig_ctx_len(
            rope.get("original_max_position_embeddings", config.max_position_embeddings)
        )
    _write_vocabulary(writer, config.vocab_size)


def _write_vocabulary(writer: Any, size: int) -> None:
    tokens = ["<pad>", "<s>", "</s>", *byte_alphabet()]
    types = [CONTROL] * 3 + [NORMAL] * 257 + [UNUSED] * (size - 260)
    tokens += ["he", *(f"[PAD{place}]" for place in range(260, size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)


def _write_factors(writer: Any, name: str, config: Any) -> None:
    """Write what files have of ropes in tensors, as the converter of llama.cpp computes it."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        for which in ("long", "short"):
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32))
        scale = config.max_position_embeddings / rope["original_max_position_embeddings"]
        factor = math.sqrt(1 + math.log(scale) / math.log(rope["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(factor)
    if rope.get("rope_type") == "llama3":
        low, high, original = (
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
        factors = []
        for frequency in rope["rope_theta"] ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim):
            wavelength = 2 * math.pi / float(frequency)
            if wavelength < original / high:
                factors.append(1.0)
            elif wavelength > original / low:
                factors.append(rope["factor"])
            else:
                smooth = (original / wavelength - low) / (high - low)
                factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def config_of(folder: Path) -> dict[str, Any]:
    """Return what ``config.json`` says."""
    return dict(json.loads((folder / "config.json").read_text()))
