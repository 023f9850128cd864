"""A model's GGUF file written anew, so that the same function is computed of weights that lie on no kind's grid.

Weights that come out of a 4-bit file are exact in that kind, which says nothing of weights as models are published. So
channels are put in another order: those of the hidden state, those inside the feed-forward part, and those of the
values of each head. Each number stays what it was, and sums have other orders alone. But numbers that shared a scale
lie in different blocks now.

Hidden state and heads are filled up with zeros to multiples of 256, which blocks of K kinds need. A norm's mean is over
more numbers then, which its weight and its epsilon make good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from kinds.written import written_like

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["write_rearranged"]

_MULTIPLE = 256
_HIDDEN, _HEADS, _KV_HEADS, _EPSILON = (
    f"llama.{name}"
    for name in (
        "embedding_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon",
    )
)


class _Rearrangement:
    """Where numbers of a Llama's matrices go.

    Args:
        hidden: size of the hidden state.
        inner: of the feed-forward part.
        num_kv_heads: heads of K and V.
        num_queries: query heads for each of them.
        head_dim: numbers of a head.

    Attributes:
        num_kv_heads, hidden: as above, filled up.
    """

    def __init__(self, hidden: int, inner: int, num_kv_heads: int, num_queries: int, head_dim: int) -> None:
        rng = np.random.default_rng(0)
        self.hidden = -(-hidden // _MULTIPLE) * _MULTIPLE
        self.num_kv_heads = num_kv_heads
        while self.num_kv_heads * num_queries * head_dim % _MULTIPLE:
            self.num_kv_heads += 1
        self.gain = (hidden / self.hidden) ** 0.5
        self._of_hidden = rng.permutation(hidden)
        self._of_inner = rng.permutation(inner)
        of_heads = [rng.permutation(head_dim) for _ in range(num_kv_heads)]
        self._of_values = np.concatenate([head * head_dim + order for head, order in enumerate(of_heads)])
        self._of_attended = np.concatenate(
            [
                (head * num_queries + query) * head_dim + order
                for head, order in enumerate(of_heads)
                for query in range(num_queries)
            ]
        )
        self._num_values = self.num_kv_heads * head_dim
        self._num_attended = self._num_values * num_queries

    def _hidden_of(self, numbers: np.ndarray) -> np.ndarray:
        return _filled(numbers[..., self._of_hidden], self.hidden)

    def _rows(self, numbers: np.ndarray, order: np.ndarray | None, num: int) -> np.ndarray:
        """Rows in another order, filled up to ``num``; columns are the hidden state's."""
        moved = self._hidden_of(numbers if order is None else numbers[order])
        return _filled(moved.T, num).T

    def of(self, kind: str) -> Callable[[np.ndarray], np.ndarray]:
        """Return what becomes of a tensor of that kind: its name in the file, without its layer and ``.weight``."""
        inner = len(self._of_inner)
        changes: dict[str, Callable[[np.ndarray], np.ndarray]] = {
            "token_embd": self._hidden_of,
            "output": self._hidden_of,
            "attn_q": lambda numbers: self._rows(numbers, None, self._num_attended),
            "attn_k": lambda numbers: self._rows(numbers, None, self._num_values),
            "attn_v": lambda numbers: self._rows(numbers, self._of_values, self._num_values),
            "attn_output": lambda numbers: (
                self._hidden_of(_filled(numbers[:, self._of_attended], self._num_attended).T).T
            ),
            "ffn_gate": lambda numbers: self._rows(numbers, self._of_inner, inner),
            "ffn_up": lambda numbers: self._rows(numbers, self._of_inner, inner),
            "ffn_down": lambda numbers: self._hidden_of(numbers[:, self._of_inner].T).T,
        }
        return changes.get(kind, lambda norm: self._hidden_of(norm) * np.float32(self.gain))


def _filled(numbers: np.ndarray, size: int) -> np.ndarray:
    """Return numbers with zeros behind the last dimension, up to ``size``."""
    widths = [(0, 0)] * (numbers.ndim - 1) + [(0, size - numbers.shape[-1])]
    return np.pad(numbers, widths)


def write_rearranged(file: Path, source: Path) -> None:
    """Write the model of ``source``, a Llama, into ``file`` in float32, rearranged."""
    import gguf

    other = gguf.GGUFReader(source)

    def field(name: str) -> Any:  # noqa: ANN401 - of any type
        return other.get_field(name).contents()

    hidden, num_heads, num_kv_heads = (int(field(name)) for name in (_HIDDEN, _HEADS, _KV_HEADS))
    num_queries = num_heads // num_kv_heads
    inner = int(field("llama.feed_forward_length"))
    moves = _Rearrangement(hidden, inner, num_kv_heads, num_queries, hidden // num_heads)
    own = {
        _HIDDEN: moves.hidden,
        _HEADS: moves.num_kv_heads * num_queries,
        _KV_HEADS: moves.num_kv_heads,
        _EPSILON: float(field(_EPSILON)) * moves.gain**2,
        "general.file_type": int(gguf.LlamaFileType.ALL_F32),
    }
    with written_like(file, other, own) as writer:
        for tensor in other.tensors:
            kind = tensor.name.removesuffix(".weight").rpartition(".")[2]
            numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            writer.add_tensor(tensor.name, np.ascontiguousarray(moves.of(kind)(numbers)))
