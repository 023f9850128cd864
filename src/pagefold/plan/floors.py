"""Floors: what no engine can beat on a device. Either its products or its memory traffic take longer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pagefold.plan.shape import DecoderLayer, ModelShape

__all__ = [
    "Floor",
    "break_even_bandwidth",
    "decode_bytes",
    "decode_operations",
    "prefill_operations",
    "share_of_touched_experts",
    "ttft_bound",
]


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time that something takes.

    Attributes:
        compute_s: seconds of its operations at the device's peak; None where nobody said what that is.
        bandwidth_s: seconds of its bytes at the memory's peak; None where nobody said.
    """

    compute_s: float | None
    bandwidth_s: float | None

    @property
    def seconds(self) -> float | None:
        """The longer of the two; None where one of them is not known."""
        if self.compute_s is None or self.bandwidth_s is None:
            return None
        return max(self.compute_s, self.bandwidth_s)

    @property
    def binds(self) -> Literal["compute", "bandwidth"] | None:
        """Which of the two peaks the floor comes from."""
        if self.compute_s is None or self.bandwidth_s is None:
            return None
        return "compute" if self.compute_s >= self.bandwidth_s else "bandwidth"

    @classmethod
    def of(cls, operations: float, num_bytes: float, *, flops: float | None, bandwidth: float | None) -> Floor:
        """Return the floor of so many operations and so many bytes."""
        return cls(operations / flops if flops else None, num_bytes / bandwidth if bandwidth else None)


def prefill_operations(shape: ModelShape, num_tokens: int, num_cached: int = 0) -> float:
    """Return the operations of computing a prompt: two for each parameter that a token meets, and causal attention.

    ``2 * P * n + sum over layers of heads * (key_dim + value_dim) * n**2``, which for equal dims is
    ``2 * P * n + 2 * layers * heads * head_dim * n**2``. P counts what tokens are multiplied with: no embedding table,
    of experts the active ones; the output layer once, for the last token.

    Args:
        shape: of the model.
        num_tokens: of the prompt.
        num_cached: of them found in the cache; they are attended to, but not computed.
    """
    products = 2 * shape.num_active_parameters * (num_tokens - num_cached) + 2 * shape.output_parameters
    return products + sum(_scores(layer, num_tokens) - _scores(layer, num_cached) for layer in shape.layers)


def _scores(layer: DecoderLayer, num_tokens: int) -> float:
    """Operations of attention when every token up to ``num_tokens`` attends to those before it and itself."""
    window = None if layer.kv is None else layer.kv.keeps.window
    if window is None:
        return layer.score_width * num_tokens**2
    if layer.kv is not None and layer.kv.keeps.is_chunked:
        num_chunks, rest = divmod(num_tokens, window)
        return layer.score_width * (num_chunks * window**2 + rest**2)
    seen = layer.kv.num_tokens(num_tokens) if layer.kv is not None else num_tokens  # of the last token
    return layer.score_width * (seen**2 + 2 * (num_tokens - seen) * seen)


def decode_operations(shape: ModelShape, context: float) -> float:
    """Return the operations of one token of one sequence with so many tokens of context."""
    products = 2 * (shape.num_active_parameters + shape.output_parameters)
    attention = 0.0
    for layer in shape.layers:
        seen = context
        if layer.kv is not None and layer.kv.keeps.window is not None:
            seen = min(context, layer.kv.keeps.num_sinks + layer.kv.keeps.window)
        attention += 2 * layer.score_width * seen
    return products + attention


def decode_bytes(weight_bytes: float, num_sequences: float, kv_bytes: float) -> float:
    """Return the bytes that a decode step reads: the weights once, and the KV of every sequence."""
    return weight_bytes + num_sequences * kv_bytes


def share_of_touched_experts(active_share: float, num_tokens: float) -> float:
    """Return the share of a layer's experts that so many tokens use between them, if each chooses evenly."""
    idle: float = (1 - active_share) ** max(1.0, num_tokens)
    return 1 - idle


def ttft_bound(hit_share: float) -> float:
    """Return how many times sooner the first token can come when that share of the prefill's work is spared."""
    return 1 / (1 - hit_share) if hit_share < 1 else float("inf")


def break_even_bandwidth(kv_bytes: float, prefill_s: float) -> float:
    """Return the bytes a second at which loading KV takes as long as computing it."""
    return kv_bytes / prefill_s
