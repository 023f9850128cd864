"""Turn a GGUF file of the llama architecture into a model folder that transformers (and other engines) load.

The weights become float32, equal in bits to what transformers gets from the same file, in a small part of its time. One
tensor at a time is held in memory. Whoever changes what is written here raises ``catalog.CONVERTER_VERSION``.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pagefold.errors import UnsupportedModelError
from pagefold.hub.gguf import GgufFile, GgufFormatError
from pagefold.hub.progress import Progress, silent
from pagefold.hub.publish import publish_folder
from pagefold.hub.tokenizer_files import write_tokenizer_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["convert", "write_model_folder"]

_SPECIAL_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def convert(gguf_path: Path, target: Path, *, progress: Progress = silent) -> Path:
    """Make the model folder ``target`` out of a GGUF file, unless it is there already.

    The folder appears whole or not at all; any number of processes may ask for it at once, and one does the work.

    Args:
        gguf_path: a GGUF file of the llama architecture.
        target: the folder to make; its parents are made too.
        progress: called after each tensor with the number of tensors.

    Raises:
        GgufError: the file is damaged, or has tensors of a type that is not known.
        UnsupportedModelError: a model or tokenizer of another architecture.
        ConfigError: the target cannot be written.
    """

    def build(folder: Path, _scratch: Path) -> None:
        write_model_folder(gguf_path, folder, progress=progress)

    return publish_folder(target, build, about={"source": gguf_path.name}, progress=progress)


def write_model_folder(gguf_path: Path, folder: Path, *, progress: Progress = silent) -> None:
    """Write the model's files into ``folder``, which exists; what ``convert`` does inside its lock.

    Raises:
        GgufError: the file is damaged, or has tensors of a type that is not known.
        UnsupportedModelError: a model or tokenizer of another architecture.
        OSError: the folder cannot be written.
    """
    with GgufFile(gguf_path) as gguf:
        config = _model_config(gguf)
        weights = _weights(gguf, config)
        token_ids = {key: config[key] for key in _SPECIAL_TOKEN_IDS if key in config}
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", token_ids)
        write_tokenizer_files(gguf, folder)
        _write_weights(gguf, weights, folder / "model.safetensors", progress)


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor of the model: where it comes from, its shape, and the heads its rows are grouped by (0: none)."""

    gguf_name: str
    shape: tuple[int, ...]
    num_rotary_heads: int = 0


def _model_config(gguf: GgufFile) -> dict[str, Any]:
    architecture = gguf.value("general.architecture", str)
    if architecture != "llama":
        raise _unsupported(gguf, f"its architecture is {architecture!r}, not 'llama'")
    scaling = gguf.value("llama.rope.scaling.type", str, "none")
    if scaling != "none":
        raise _unsupported(gguf, f"it scales its positions ({scaling!r})")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        message = f"{gguf.path}: the tensor token_embd.weight is missing."
        raise GgufFormatError(message)
    num_layers, hidden_size = gguf.value("llama.block_count", int), gguf.value("llama.embedding_length", int)
    num_heads = gguf.value("llama.attention.head_count", int)
    num_kv_heads = gguf.value("llama.attention.head_count_kv", int, num_heads)
    head_dim = gguf.value("llama.attention.key_length", int, hidden_size // max(num_heads, 1))
    # Before anything is divided by them, or is done as many times.
    positive = min(num_layers, num_heads, num_kv_heads, head_dim) > 0
    if not positive or num_heads % num_kv_heads or head_dim % 2 or num_layers > len(gguf.tensors):
        message = f"{gguf.path}: its numbers of layers, heads and tensors contradict each other."
        raise GgufFormatError(message)
    if gguf.value("llama.rope.dimension_count", int, head_dim) != head_dim:
        raise _unsupported(gguf, "it rotates a part of each head only")
    if gguf.value("llama.attention.value_length", int, head_dim) != head_dim:
        raise _unsupported(gguf, "its keys and values differ in length")
    rope_theta = _shortest(gguf.value("llama.rope.freq_base", float, 10000.0))
    special = {name: f"tokenizer.ggml.{key}_token_id" for name, key in _SPECIAL_TOKEN_IDS.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": gguf.value("llama.feed_forward_length", int),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": gguf.value("llama.context_length", int),
        "rms_norm_eps": _shortest(gguf.value("llama.attention.layer_norm_rms_epsilon", float)),
        # In both spellings: transformers 5 reads the second, what was written for 4 reads the first.
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **{name: gguf.value(key, int) for name, key in special.items() if key in gguf.metadata},
        "dtype": "float32",
    }


def _shortest(stored: float) -> float:
    # GGUF stores float32: 1e-5 comes back as 9.999999747378752e-06. The shortest decimal that rounds to the same
    # float32 is what the model's author wrote, and what a float64 run of the original would compute with.
    bits = _float32_bits(stored)
    candidates = (float(f"{stored:.{digits}g}") for digits in range(1, 10))
    return next((number for number in candidates if _float32_bits(number) == bits), stored)


def _float32_bits(number: float) -> bytes | None:
    try:
        return struct.pack("<f", number)
    except OverflowError:
        return None


def _weights(gguf: GgufFile, config: Mapping[str, Any]) -> dict[str, _Weight]:
    """Return every tensor of the model by transformers' name; the file must hold exactly these."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rows, kv_rows = num_heads * config["head_dim"], num_kv_heads * config["head_dim"]
    inside = {
        "input_layernorm": _Weight("attn_norm", (hidden,)),
        "self_attn.q_proj": _Weight("attn_q", (rows, hidden), num_heads),
        "self_attn.k_proj": _Weight("attn_k", (kv_rows, hidden), num_kv_heads),
        "self_attn.v_proj": _Weight("attn_v", (kv_rows, hidden)),
        "self_attn.o_proj": _Weight("attn_output", (hidden, rows)),
        "post_attention_layernorm": _Weight("ffn_norm", (hidden,)),
        "mlp.gate_proj": _Weight("ffn_gate", (inner, hidden)),
        "mlp.up_proj": _Weight("ffn_up", (inner, hidden)),
        "mlp.down_proj": _Weight("ffn_down", (hidden, inner)),
    }
    weights = {"model.embed_tokens.weight": _Weight("token_embd.weight", (vocab, hidden))}
    for layer in range(config["num_hidden_layers"]):
        for name, weight in inside.items():
            from_layer = replace(weight, gguf_name=f"blk.{layer}.{weight.gguf_name}.weight")
            weights[f"model.layers.{layer}.{name}.weight"] = from_layer
    weights["model.norm.weight"] = _Weight("output_norm.weight", (hidden,))
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = _Weight("output.weight", (vocab, hidden))

    for weight in weights.values():
        found = gguf.tensors.get(weight.gguf_name)
        if found is None or found.shape != weight.shape:
            what = "is missing" if found is None else f"has the shape {found.shape}"
            message = f"{gguf.path}: the tensor {weight.gguf_name} of shape {weight.shape} {what}."
            raise GgufFormatError(message)
    # Biases, experts, position factors: to leave one out would compute another model without a word.
    unknown = set(gguf.tensors) - {weight.gguf_name for weight in weights.values()}
    if unknown:
        raise _unsupported(gguf, f"it has {len(unknown)} tensors that a plain llama has not, such as {min(unknown)}")
    return weights


def _unsupported(gguf: GgufFile, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{gguf.path} cannot be converted: {why}.", remedy="Use the model's original folder.")


def _write_weights(gguf: GgufFile, weights: Mapping[str, _Weight], path: Path, progress: Progress) -> None:
    # The format's own library wants all tensors at once, six times the size of a 4-bit file; the format itself is a
    # header of known offsets and then the numbers, which can be written as they come.
    what = f"converting {gguf.path.name}"
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in weights.items():
        start, end = end, end + 4 * math.prod(weight.shape)
        header[name] = {"dtype": "F32", "shape": weight.shape, "data_offsets": (start, end)}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the numbers are aligned when the file is mapped
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for done, weight in enumerate(weights.values()):
            progress(what, done, len(weights))
            numbers = _split_pairs(gguf.read(weight.gguf_name), weight.num_rotary_heads)
            file.write(numbers.astype("<f4", order="C", copy=False).data)
    progress(what, len(weights), len(weights))


def _split_pairs(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Put the rows of Q or K, float32 [num_heads * head_dim, hidden], into transformers' order.

    Rotation works on pairs of rows of a head. GGUF stores the two of a pair side by side; transformers has one in the
    first and one in the second half of the head.
    """
    if not num_heads:
        return rows
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
