"""The weights of a model, packed for the fused decoder.

A matrix ``[N, K]`` becomes panels ``[N / width, K, width]``: a panel is what one matrix tile walks through, and the
whole matrix is read in one stream. q, k and v are one matrix; gate and up alternate panel by panel, so that a tile of
both is there when they are multiplied. N is filled up with zeros to whole panels.

They are packed from the checkpoint's files, layer by layer, so that there is never a second copy of the model.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pagefold.config import available_cpus
from pagefold.kernels.emit import MAX_LANES
from pagefold.kernels.simd import PANEL_VECTORS
from pagefold.runner.fused.checkpoint import Checkpoint
from pagefold.runner.fused.rope import rope_table

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from pagefold.runner.fused.families import FusedConfig

__all__ = ["PANEL_WIDTH", "DecoderWeights", "num_panels", "pack_model"]

PANEL_WIDTH = PANEL_VECTORS * MAX_LANES
_INT8_MAX = 127


class DecoderWeights(NamedTuple):
    """L layers, E hidden size, H heads, Hkv KV heads, D head_dim, F intermediate size, V vocabulary; W panel width.

    Attributes:
        qkv: float32 ``[L, ceil((H + 2 * Hkv) * D / W), E, W]``.
        bias: float32 ``[L, (H + 2 * Hkv) * D]``, or ``[0, 0]`` without.
        head_norms: float32 ``[L, 2, D]``: of q and of k; or ``[0, 2, 0]`` without.
        out: float32 ``[L, ceil(E / W), H * D, W]``.
        gate_up: float32 ``[L, 2 * ceil(F / W), E, W]``: gate and up panels in turn.
        down: float32 ``[L, ceil(E / W), F, W]``.
        norms: float32 ``[L, 2, E]``: before attention and before the MLP.
        last_norm: float32 ``[E]``.
        head: float32 ``[ceil(V / W), E, W]``.
        embedding: float32 ``[V, E]``; ``[0, 0]`` where it is ``head``.
        rope: float32 ``[positions, 2, D]``: cosines and sines.
        epsilon: of the norms.
        intermediate: F.
        qkv_scales, out_scales, gate_up_scales, down_scales, head_scales: float32 ``[L, panels, W]``, ``[panels, W]``;
            then the panels are int8: a column is its numbers times its scale. None where they are float32.
    """

    qkv: NDArray[np.float32]
    bias: NDArray[np.float32]
    head_norms: NDArray[np.float32]
    out: NDArray[np.float32]
    gate_up: NDArray[np.float32]
    down: NDArray[np.float32]
    norms: NDArray[np.float32]
    last_norm: NDArray[np.float32]
    head: NDArray[np.float32]
    embedding: NDArray[np.float32]
    rope: NDArray[np.float32]
    epsilon: np.float32
    intermediate: int
    qkv_scales: NDArray[np.float32] | None
    out_scales: NDArray[np.float32] | None
    gate_up_scales: NDArray[np.float32] | None
    down_scales: NDArray[np.float32] | None
    head_scales: NDArray[np.float32] | None


def num_panels(num_columns: int) -> int:
    """Return how many panels hold so many columns."""
    return -(-num_columns // PANEL_WIDTH)


class _Panels:
    """Weights ``[N, K]`` of ``num`` layers, being packed; int8 with a scale a column if quantized."""

    def __init__(self, num: int, num_columns: int, num_k: int, *, is_int8: bool) -> None:
        shape = num, num_panels(num_columns), num_k, PANEL_WIDTH
        self.panels: NDArray[Any] = np.zeros(shape, np.int8 if is_int8 else np.float32)
        self.scales = np.zeros((num, shape[1], PANEL_WIDTH), np.float32) if is_int8 else None

    def put(self, index: int, matrix: torch.Tensor, every: int = 1, offset: int = 0) -> None:
        """Pack a layer's matrix, into every so many panels from ``offset`` on."""
        if self.scales is not None:
            scales = (matrix.abs().amax(1) / _INT8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
            matrix = (matrix / scales[:, None]).round().to(torch.int8)
            _pack(scales[:, None], self.scales[index, offset::every, None])
        _pack(matrix, self.panels[index, offset::every])


def _pack(matrix: torch.Tensor, into: NDArray[Any]) -> None:
    """Pack a weight ``[N, K]`` into panels ``[>= N / W, K, W]``; what is beyond N stays as it was."""
    numbers = matrix.numpy()
    num = len(numbers)
    whole = num // PANEL_WIDTH
    into[:whole] = numbers[: whole * PANEL_WIDTH].reshape(whole, PANEL_WIDTH, -1).transpose(0, 2, 1)
    if num % PANEL_WIDTH:
        into[whole, :, : num % PANEL_WIDTH] = numbers[whole * PANEL_WIDTH :].T


_EMBEDDING, _HEAD, _LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def pack_model(config: FusedConfig, folder: Path, num_positions: int, *, is_int8: bool = False) -> DecoderWeights:
    """Read and pack a model, on all cores.

    Args:
        config: of the model.
        folder: where its weights are, in any float type.
        num_positions: how many positions a sequence can have.
        is_int8: whether to keep matrices as int8, symmetrically rounded, with one scale an output channel.

    Raises:
        UnsupportedModelError: the weights are not those that the config asks for.
    """
    checkpoint = Checkpoint(folder)
    checkpoint.check(_shapes(config, checkpoint))
    num_layers, hidden, inner = config.num_layers, config.hidden_size, config.intermediate_size
    num_out = config.num_heads * config.head_dim
    num_qkv = num_out + 2 * config.num_kv_heads * config.head_dim
    qkv = _Panels(num_layers, num_qkv, hidden, is_int8=is_int8)
    out = _Panels(num_layers, hidden, num_out, is_int8=is_int8)
    gate_up = _Panels(num_layers, 2 * num_panels(inner) * PANEL_WIDTH, hidden, is_int8=is_int8)
    down = _Panels(num_layers, hidden, inner, is_int8=is_int8)
    head = _Panels(1, config.vocab_size, hidden, is_int8=is_int8)
    bias = np.zeros((num_layers, num_qkv) if config.has_biases else (0, 0), np.float32)
    head_norms = np.zeros((num_layers, 2, config.head_dim) if config.has_head_norms else (0, 2, 0), np.float32)
    norms = np.zeros((num_layers, 2, hidden), np.float32)

    @torch.inference_mode()
    def pack_layer(index: int) -> None:
        def tensor(name: str) -> torch.Tensor:
            return checkpoint.tensor(f"model.layers.{index}.{name}")

        qkv.put(index, torch.cat([tensor(f"self_attn.{one}_proj.weight") for one in "qkv"]))
        if config.has_biases:
            bias[index] = torch.cat([tensor(f"self_attn.{one}_proj.bias") for one in "qkv"]).numpy()
        if config.has_head_norms:
            head_norms[index, 0] = tensor("self_attn.q_norm.weight").numpy()
            head_norms[index, 1] = tensor("self_attn.k_norm.weight").numpy()
        out.put(index, tensor("self_attn.o_proj.weight"))
        gate_up.put(index, tensor("mlp.gate_proj.weight"), every=2)
        gate_up.put(index, tensor("mlp.up_proj.weight"), every=2, offset=1)
        down.put(index, tensor("mlp.down_proj.weight"))
        norms[index, 0] = tensor("input_layernorm.weight").numpy()
        norms[index, 1] = tensor("post_attention_layernorm.weight").numpy()

    @torch.inference_mode()
    def pack_head() -> NDArray[np.float32]:
        """Pack the head; return the embedding, or nothing where it is the same matrix."""
        matrix, embedding = _head_and_embedding(config, checkpoint)
        head.put(0, matrix)
        return np.zeros((0, 0), np.float32) if embedding is None else embedding.numpy().copy()

    with ThreadPoolExecutor(available_cpus()) as threads:  # copying lets go of the GIL
        packed_head = threads.submit(pack_head)  # the largest piece first
        list(threads.map(pack_layer, range(num_layers)))
        embedding = packed_head.result()
    return DecoderWeights(
        qkv=qkv.panels,
        bias=bias,
        head_norms=head_norms,
        out=out.panels,
        gate_up=gate_up.panels,
        down=down.panels,
        norms=norms,
        last_norm=checkpoint.tensor(_LAST_NORM).numpy().copy(),
        head=head.panels[0],
        embedding=embedding,
        rope=rope_table(config, folder, num_positions),
        epsilon=np.float32(config.epsilon),
        intermediate=inner,
        qkv_scales=qkv.scales,
        out_scales=out.scales,
        gate_up_scales=gate_up.scales,
        down_scales=down.scales,
        head_scales=None if head.scales is None else head.scales[0],
    )


def _shapes(config: FusedConfig, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all tensors that a model of this config has."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads = {"q": config.num_heads * head_dim, "k": config.num_kv_heads * head_dim, "v": config.num_kv_heads * head_dim}
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, heads["q"]),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        **{f"self_attn.{one}_proj.weight": (num, hidden) for one, num in heads.items()},
    }
    if config.has_biases:
        layer |= {f"self_attn.{one}_proj.bias": (num,) for one, num in heads.items()}
    if config.has_head_norms:
        layer |= {f"self_attn.{one}_norm.weight": (head_dim,) for one in "qk"}
    matrices = dict.fromkeys((_EMBEDDING, _HEAD), (config.vocab_size, hidden))
    if config.is_tied and _EMBEDDING in checkpoint and _HEAD not in checkpoint:
        del matrices[_HEAD]
    elif config.is_tied and _HEAD in checkpoint and _EMBEDDING not in checkpoint:
        del matrices[_EMBEDDING]
    layers = {f"model.layers.{index}.{name}": layer[name] for index in range(config.num_layers) for name in layer}
    return layers | matrices | {_LAST_NORM: (hidden,)}


def _head_and_embedding(config: FusedConfig, checkpoint: Checkpoint) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the head's matrix, and the embedding's if it is another.

    A config may say that they are tied and the files have both: then, as for transformers, the files are right.
    """
    if config.is_tied and not (_HEAD in checkpoint and _EMBEDDING in checkpoint):
        return checkpoint.tensor(_HEAD if _HEAD in checkpoint else _EMBEDDING), None
    matrix, embedding = checkpoint.tensor(_HEAD), checkpoint.tensor(_EMBEDDING)
    return matrix, None if config.is_tied and torch.equal(matrix, embedding) else embedding
