"""The weights of a loaded transformers model, packed for the fused decoder.

A matrix ``[N, K]`` becomes panels ``[N / width, K, width]``: a panel is what one matrix tile walks through, and the
whole matrix is read in one stream. q, k and v are one matrix; gate and up alternate panel by panel, so that a tile of
both is there when they are multiplied. N is filled up with zeros to whole panels.

The model's own tensors are let go layer by layer, so that packing needs room for few layers more, not for a model more.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pagefold.config import available_cpus
from pagefold.runner.kernels.simd import MAX_LANES, PANEL_VECTORS

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


@torch.inference_mode()
def pack_model(model: Any, num_positions: int, *, is_int8: bool = False) -> DecoderWeights:  # noqa: ANN401 - transformers
    """Pack a float32 model. It is used up.

    Args:
        model: what :func:`~pagefold.runner.loader.load_model` returned, of a family that
            :func:`~pagefold.runner.fused.families.why_not_fused` has nothing against.
        num_positions: how many positions a sequence can have.
        is_int8: whether to keep matrices as int8, symmetrically rounded, with one scale an output channel.
    """
    config, decoder = model.config, model.model
    layers = decoder.layers
    first = layers[0].self_attn
    hidden, inner = config.hidden_size, config.intermediate_size
    num_qkv = first.q_proj.out_features + 2 * first.k_proj.out_features
    has_bias, has_norms = first.q_proj.bias is not None, hasattr(first, "q_norm")
    num_layers, head_dim = len(layers), first.head_dim
    qkv = _Panels(num_layers, num_qkv, hidden, is_int8=is_int8)
    out = _Panels(num_layers, hidden, first.o_proj.in_features, is_int8=is_int8)
    gate_up = _Panels(num_layers, 2 * num_panels(inner) * PANEL_WIDTH, hidden, is_int8=is_int8)
    down = _Panels(num_layers, hidden, inner, is_int8=is_int8)
    bias = np.zeros((num_layers, num_qkv) if has_bias else (0, 0), np.float32)
    head_norms = np.zeros((num_layers, 2, head_dim) if has_norms else (0, 2, 0), np.float32)
    norms = np.zeros((num_layers, 2, hidden), np.float32)

    @torch.inference_mode()
    def pack_layer(index: int) -> None:
        layer = layers[index]
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qkv.put(index, torch.cat([one.weight for one in projections]))
        if has_bias:
            bias[index] = torch.cat([one.bias for one in projections]).numpy()
        if has_norms:
            head_norms[index, 0] = attention.q_norm.weight.numpy()
            head_norms[index, 1] = attention.k_norm.weight.numpy()
        out.put(index, attention.o_proj.weight)
        gate_up.put(index, mlp.gate_proj.weight, every=2)
        gate_up.put(index, mlp.up_proj.weight, every=2, offset=1)
        down.put(index, mlp.down_proj.weight)
        norms[index, 0] = layer.input_layernorm.weight.numpy()
        norms[index, 1] = layer.post_attention_layernorm.weight.numpy()
        for one in (*projections, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            one.weight = None

    with ThreadPoolExecutor(available_cpus()) as threads:  # copying lets go of the GIL
        list(threads.map(pack_layer, range(num_layers)))
    rope = _rope(decoder, num_positions, head_dim)
    matrix, embedding = model.lm_head.weight, decoder.embed_tokens.weight
    head = _Panels(1, len(matrix), hidden, is_int8=is_int8)
    head.put(0, matrix)
    is_tied = matrix is embedding or matrix.data_ptr() == embedding.data_ptr()
    return DecoderWeights(
        qkv=qkv.panels,
        bias=bias,
        head_norms=head_norms,
        out=out.panels,
        gate_up=gate_up.panels,
        down=down.panels,
        norms=norms,
        last_norm=decoder.norm.weight.numpy().copy(),
        head=head.panels[0],
        embedding=np.zeros((0, 0), np.float32) if is_tied else embedding.numpy().copy(),
        rope=rope,
        epsilon=np.float32(config.rms_norm_eps),
        intermediate=inner,
        qkv_scales=qkv.scales,
        out_scales=out.scales,
        gate_up_scales=gate_up.scales,
        down_scales=down.scales,
        head_scales=None if head.scales is None else head.scales[0],
    )


def _rope(decoder: Any, num_positions: int, head_dim: int) -> NDArray[np.float32]:  # noqa: ANN401
    """Return the model's own cosines and sines, ``[positions, 2, D]``: its ropes do not depend on the batch."""
    positions = torch.arange(num_positions)[None]
    cosines, sines = decoder.rotary_emb(torch.zeros(1, dtype=torch.float32), positions)
    rope = torch.stack([cosines[0], sines[0]], dim=1).numpy().copy()
    assert rope.shape == (num_positions, 2, head_dim), "a rope of a part of the head"
    return np.ascontiguousarray(rope, np.float32)
