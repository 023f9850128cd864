"""What must be known of a GGUF architecture: how the header becomes a config, and which tensors there are.

One file for each architecture says it; what they have in common is here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pagefold.errors import UnsupportedModelError
from pagefold.gguf.header import GgufFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from numpy.typing import NDArray

    from pagefold.gguf.file import GgufFile
    from pagefold.gguf.header import GgufHeader

__all__ = [
    "Architecture",
    "Sizes",
    "Weight",
    "check_keys",
    "check_tensors",
    "num_positions",
    "positive",
    "read_epsilon",
    "read_sizes",
    "refusal",
    "shortest",
    "weights_of_layers",
]

_MOST = (1 << 31) - 1
_MOST_POSITIONS = 1 << 24
_Numbers = TypeVar("_Numbers", np.float32, np.int64)


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the model.

    Attributes:
        gguf_name: which tensor of the file it comes from.
        shape: rows first; the same in the file.
        rows_of_pairs: size of the heads whose rows the file has pair by pair, see :meth:`in_order`; 0 where it has rows
            in the model's order.
        adds_one: whether the file has 1 more than the model, which adds it when it computes.
    """

    gguf_name: str
    shape: tuple[int, ...]
    rows_of_pairs: int = 0
    adds_one: bool = False

    @property
    def rows_together(self) -> int:
        """How many rows :meth:`in_order` must see at once, or a multiple of them."""
        return self.rows_of_pairs or 1

    def in_order(self, rows: NDArray[_Numbers]) -> NDArray[_Numbers]:
        """Return the file's rows, ``[n * rows_together, ...]``, in the model's order.

        Rotation works on pairs of rows of a head. Files of llama's store the two of a pair side by side; transformers
        has one in the first and one in the second half of the head.
        """
        if not self.rows_of_pairs:
            return rows
        pairs = rows.reshape(-1, self.rows_of_pairs // 2, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    def of_model(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the file's rows, ``[n * rows_together, ...]``, as the model has them."""
        ordered = self.in_order(rows)
        return ordered - np.float32(1) if self.adds_one else ordered

    def row_order(self) -> NDArray[np.int64] | None:
        """Return int64 ``[rows]``: which of the file's rows each row of the model is; None where each is itself."""
        return self.in_order(np.arange(self.shape[0])) if self.rows_of_pairs else None


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


def read_sizes(gguf: GgufHeader) -> Sizes:
    """Read the sizes from the header's keys, all of which begin with the architecture's name.

    Raises:
        GgufFormatError: a number is missing, or they contradict each other.
        UnsupportedModelError: layers of different sizes, keys and values of different lengths, or experts.
    """
    name = gguf.value("general.architecture", str)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        message = f"{gguf.path}: the tensor token_embd.weight is missing."
        raise GgufFormatError(message)
    num_layers, hidden_size = gguf.value(f"{name}.block_count", int), gguf.value(f"{name}.embedding_length", int)
    num_heads = _of_all_layers(gguf, f"{name}.attention.head_count")
    num_kv_heads = _of_all_layers(gguf, f"{name}.attention.head_count_kv", num_heads)
    head_dim = gguf.value(f"{name}.attention.key_length", int, hidden_size // max(num_heads, 1))
    # Before anything is divided by them, or is done as many times.
    positive = min(num_layers, num_heads, num_kv_heads, head_dim) > 0
    if not positive or num_heads % num_kv_heads or head_dim % 2 or num_layers > len(gguf.tensors):
        message = f"{gguf.path}: its numbers of layers, heads and tensors contradict each other."
        raise GgufFormatError(message)
    if gguf.value(f"{name}.attention.value_length", int, head_dim) != head_dim:
        raise refusal(gguf, "its keys and values differ in length")
    num_experts = gguf.value(f"{name}.expert_count", int, 0)
    if num_experts:
        raise refusal(gguf, f"it has {num_experts} experts")
    num_tokens = len(gguf.values("tokenizer.ggml.tokens", str))
    if num_tokens > embedding.shape[0]:
        message = f"{gguf.path}: it has {num_tokens} tokens and {embedding.shape[0]} embeddings."
        raise GgufFormatError(message)
    return Sizes(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_of_all_layers(gguf, f"{name}.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
    )


def positive(gguf: GgufHeader, key: str, default: int | None = None) -> int:
    """Return a number of the header that counts something.

    Raises:
        GgufFormatError: it is missing, or counts nothing, or more than there can be.
    """
    number = gguf.value(key, int, default)
    if not 0 < number <= _MOST:
        message = f"{gguf.path}: {key} is {number}."
        raise GgufFormatError(message)
    return number


def num_positions(gguf: GgufHeader, key: str) -> int:
    """Return how long a sequence may be, by the header.

    Raises:
        GgufFormatError: it is missing, or more than any model has: tables of ropes grow with it.
    """
    number = positive(gguf, key)
    if number > _MOST_POSITIONS:
        message = f"{gguf.path}: {key} is {number}, and no model has more than {_MOST_POSITIONS} positions."
        raise GgufFormatError(message)
    return number


def read_epsilon(gguf: GgufHeader) -> float:
    """Return what keeps norms from dividing by zero.

    Raises:
        GgufFormatError: it is missing, or does not.
    """
    key = f"{gguf.value('general.architecture', str)}.attention.layer_norm_rms_epsilon"
    epsilon = shortest(gguf.value(key, float))
    if not 0 < epsilon < 1:
        message = f"{gguf.path}: {key} is {epsilon}."
        raise GgufFormatError(message)
    return epsilon


def _of_all_layers(gguf: GgufHeader, key: str, default: int | None = None) -> int:
    """Return a number that may be written once, or once for each layer."""
    if type(gguf.metadata.get(key)) is not list:
        return gguf.value(key, int, default)
    numbers = gguf.values(key, int)
    if len(set(numbers)) != 1:
        raise refusal(gguf, f"its layers differ in {key}")
    return numbers[0]


_KEYS = {
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "vocab_size",
}
"""What is read of every architecture, without its name; or says nothing."""


def check_keys(gguf: GgufHeader, own: Collection[str] = ()) -> None:
    """Check that the header has no key of its architecture that is not known.

    The header says less than a config does: what is not in it is the same in all models of a family, and llama.cpp has
    it in its code. So a key that is not known may say that something is not the same.

    Args:
        gguf: of the file.
        own: keys that this architecture has beside those of all, without its name.

    Raises:
        UnsupportedModelError: it has one.
    """
    name = gguf.value("general.architecture", str)
    keys = {key.removeprefix(f"{name}.") for key in gguf.metadata if key.startswith(f"{name}.")}
    odd = keys - _KEYS - set(own)
    if odd:
        raise refusal(gguf, f"its header has {name}.{min(odd)}, whose meaning is not known here")
    if not gguf.value(f"{name}.attention.causal", bool, default=True):
        raise refusal(gguf, "its attention looks at later tokens too")


def weights_of_layers(inside: Mapping[str, Weight], num_layers: int) -> dict[str, Weight]:
    """Return the tensors of all layers, by transformers' names.

    Args:
        inside: those of one layer, by what they are called inside it, such as ``self_attn.q_proj.bias``; so are their
            names in the file.
        num_layers: how many layers there are.
    """
    return {
        f"model.layers.{layer}.{name}": replace(weight, gguf_name=f"blk.{layer}.{weight.gguf_name}")
        for layer in range(num_layers)
        for name, weight in inside.items()
    }


def check_tensors(gguf: GgufHeader, weights: Mapping[str, Weight], read_already: Collection[str] = ()) -> None:
    """Check that the file holds exactly these tensors.

    Args:
        gguf: of the file.
        weights: of the model.
        read_already: names of tensors that say something of the config, and may be there.

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
    unknown = set(gguf.tensors) - {weight.gguf_name for weight in weights.values()} - set(read_already)
    if unknown:
        name = gguf.value("general.architecture", str)
        raise refusal(gguf, f"it has {len(unknown)} tensors that a plain {name} has not, such as {min(unknown)}")


def refusal(gguf: GgufHeader, why: str) -> UnsupportedModelError:
    """Return the error for a file whose model is not known here."""
    return UnsupportedModelError(f"{gguf.path} cannot be read: {why}.", remedy="Use the model's original folder.")


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
