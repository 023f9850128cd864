"""What the converter must know of a GGUF architecture: how the header becomes a config, and which tensors there are.

One file for each architecture says it (``llama``, ``gemma3``); what they have in common is here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pagefold.errors import UnsupportedModelError
from pagefold.hub.gguf import GgufFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from pagefold.hub.gguf import GgufFile

__all__ = [
    "Architecture",
    "Sizes",
    "Weight",
    "check_tensors",
    "read_sizes",
    "refusal",
    "shortest",
    "special_token_ids",
    "weights_of_layers",
]

_SPECIAL_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def _as_stored(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return rows


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the model.

    Attributes:
        gguf_name: which tensor of the file it comes from.
        shape: rows first; the same in the file.
        change: from the file's rows, float32 [n * rows_together, ...], to the model's, of the same shape.
        rows_together: how many rows ``change`` must see at once.
    """

    gguf_name: str
    shape: tuple[int, ...]
    change: Callable[[NDArray[np.float32]], NDArray[np.float32]] = _as_stored
    rows_together: int = 1


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the files of one architecture are read.

    Attributes:
        config: the model's ``config.json``; raises ``UnsupportedModelError`` for what is not known here.
        weights: every tensor of the model by transformers' name; the file must hold exactly these.
    """

    config: Callable[[GgufFile], dict[str, Any]]
    weights: Callable[[GgufFile, Mapping[str, Any]], dict[str, Weight]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of a decoder that its tensors' shapes follow from; they fit each other."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    def as_config(self) -> dict[str, int]:
        """Return them by the names of a ``config.json``."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
        }


def read_sizes(gguf: GgufFile) -> Sizes:
    """Read the sizes from the header's keys, all of which begin with the architecture's name.

    Raises:
        GgufFormatError: a number is missing, or they contradict each other.
        UnsupportedModelError: keys and values of different lengths, or heads that are rotated in part, or scaled.
    """
    name = gguf.value("general.architecture", str)
    scaling = gguf.value(f"{name}.rope.scaling.type", str, "none")
    if scaling != "none":
        raise refusal(gguf, f"it scales its positions ({scaling!r})")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        message = f"{gguf.path}: the tensor token_embd.weight is missing."
        raise GgufFormatError(message)
    num_layers, hidden_size = gguf.value(f"{name}.block_count", int), gguf.value(f"{name}.embedding_length", int)
    num_heads = gguf.value(f"{name}.attention.head_count", int)
    num_kv_heads = gguf.value(f"{name}.attention.head_count_kv", int, num_heads)
    head_dim = gguf.value(f"{name}.attention.key_length", int, hidden_size // max(num_heads, 1))
    # Before anything is divided by them, or is done as many times.
    positive = min(num_layers, num_heads, num_kv_heads, head_dim) > 0
    if not positive or num_heads % num_kv_heads or head_dim % 2 or num_layers > len(gguf.tensors):
        message = f"{gguf.path}: its numbers of layers, heads and tensors contradict each other."
        raise GgufFormatError(message)
    if gguf.value(f"{name}.rope.dimension_count", int, head_dim) != head_dim:
        raise refusal(gguf, "it rotates a part of each head only")
    if gguf.value(f"{name}.attention.value_length", int, head_dim) != head_dim:
        raise refusal(gguf, "its keys and values differ in length")
    return Sizes(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=gguf.value(f"{name}.feed_forward_length", int),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
    )


def special_token_ids(gguf: GgufFile) -> dict[str, int]:
    """Return the ids of special tokens that the file names, by transformers' names."""
    keys = {name: f"tokenizer.ggml.{key}_token_id" for name, key in _SPECIAL_TOKEN_IDS.items()}
    return {name: gguf.value(key, int) for name, key in keys.items() if key in gguf.metadata}


def weights_of_layers(inside: Mapping[str, Weight], num_layers: int) -> dict[str, Weight]:
    """Return the tensors of all layers, by transformers' names.

    Args:
        inside: those of one layer, by what they are called inside it; so are their names in the file.
        num_layers: how many layers there are.
    """
    return {
        f"model.layers.{layer}.{name}.weight": replace(weight, gguf_name=f"blk.{layer}.{weight.gguf_name}.weight")
        for layer in range(num_layers)
        for name, weight in inside.items()
    }


def check_tensors(gguf: GgufFile, weights: Mapping[str, Weight]) -> None:
    """Check that the file holds exactly these tensors.

    Raises:
        GgufFormatError: one is missing, or of another shape.
        UnsupportedModelError: there are others. Biases, experts, position factors: to leave one out would compute
            another model without a word.
    """
    for weight in weights.values():
        found = gguf.tensors.get(weight.gguf_name)
        if found is None or found.shape != weight.shape:
            what = "is missing" if found is None else f"has the shape {found.shape}"
            message = f"{gguf.path}: the tensor {weight.gguf_name} of shape {weight.shape} {what}."
            raise GgufFormatError(message)
    unknown = set(gguf.tensors) - {weight.gguf_name for weight in weights.values()}
    if unknown:
        name = gguf.value("general.architecture", str)
        raise refusal(gguf, f"it has {len(unknown)} tensors that a plain {name} has not, such as {min(unknown)}")


def refusal(gguf: GgufFile, why: str) -> UnsupportedModelError:
    """Return the error for a file whose model is not known here."""
    return UnsupportedModelError(f"{gguf.path} cannot be converted: {why}.", remedy="Use the model's original folder.")


def shortest(stored: float) -> float:
    """Return the shortest decimal that rounds to the same float32.

    GGUF stores float32: 1e-5 comes back as 9.999999747378752e-06. The shortest decimal is what the model's author
    wrote, and what a float64 run of the original would compute with.
    """
    bits = _float32_bits(stored)
    candidates = (float(f"{stored:.{digits}g}") for digits in range(1, 10))
    return next((number for number in candidates if _float32_bits(number) == bits), stored)


def _float32_bits(number: float) -> bytes | None:
    try:
        return struct.pack("<f", number)
    except OverflowError:
        return None
