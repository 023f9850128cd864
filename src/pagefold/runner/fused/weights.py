"""The weights of a model, packed for the fused decoder.

A matrix ``[N, K]`` becomes panels, as their formats have them (see ``kernels/formats.py``): a panel is what one tile
walks through. q, k and v are one matrix; gate and up alternate panel by panel, so that a tile of both is there when
they are multiplied. N is filled up with zeros to whole panels. The kernel is told of each panel where it lies and what
multiplies with it, so tensors of one model may have several formats (``matrices.py``).

They are packed from the checkpoint's files, layer by layer, so that there is never a second copy of the model.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from pagefold.config import available_cpus
from pagefold.kernels.emit import FLOAT_BYTES
from pagefold.runner.fused.checkpoint import Checkpoint
from pagefold.runner.fused.matrices import EMBEDDING, HEAD, SCORERS, Room, layers_of, vocabulary_of
from pagefold.runner.fused.rope import rope_tables

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from pagefold.runner.fused.families import FusedConfig
    from pagefold.runner.fused.formats import DecoderFormats
    from pagefold.runner.fused.matrices import Layer, Matrix, Tensor
    from pagefold.runner.keeping import Keeping

__all__ = ["DecoderWeights", "PackedModel", "pack_model", "packed_bytes"]


class DecoderWeights(NamedTuple):
    """L layers, E hidden size, H heads, Hkv KV heads, D head_dim, F intermediate size, V vocabulary; W panel width.

    Panels are int64 ``[..., panels, 2]``: the address of each, and that of its product, or of its column in the
    embedding's (see :class:`~pagefold.kernels.formats.FormatTiles`). Norms are what rows are multiplied by: where a
    model adds 1 to its weights, they have it.

    Attributes:
        qkv: panels ``[L, ceil(((H + 2 * Hkv) * D + S) / W), 2]``, of K = E. S is Hkv where entries have scores, which
            are the last columns; else 0.
        thresholds: float32 ``[M, L, Hkv]``: the least scores that each of M masks keeps; none without scores.
        bias: float32 ``[L, (H + 2 * Hkv) * D]``, or ``[0, 0]`` without.
        head_norms: float32 ``[L, 2, D]``: of q and of k; or ``[0, 2, 0]`` without.
        out: panels ``[L, ceil(E / W), 2]``, of K = H * D.
        gate_up: panels ``[L, 2 * ceil(F / W), 2]``, of K = E: gate and up in turn.
        down: panels ``[L, ceil(E / W), 2]``, of K = F.
        forms: int64 ``[L, 4]``: the address of what turns float32 rows into those that q, k and v, out, gate and up,
            and down are multiplied with; 0 where rows stay as they are.
        head_form: likewise, of the head.
        norms: float32 ``[L, 2, E]``: before attention and before the MLP.
        product_norms: float32 ``[L, 2, E]``: behind them, of what is added then; or ``[L, 2, 0]`` without.
        last_norm: float32 ``[E]``.
        head: panels ``[ceil(V / W), 2]``, of K = E.
        embedding: likewise, a token a column; it is ``head`` where they are tied.
        rope: float32 ``[ropes, positions, 2, D]``: cosines and sines.
        rope_of_layer: int64 ``[L]``.
        embedding_factor: what embeddings are multiplied by; 1 for nothing.
        logit_softcap: of logits; 0 for none.
        epsilon: of the norms.
        intermediate: F.
        num_sinks: so many first entries are kept whatever their scores.
    """

    qkv: NDArray[np.int64]
    thresholds: NDArray[np.float32]
    bias: NDArray[np.float32]
    head_norms: NDArray[np.float32]
    out: NDArray[np.int64]
    gate_up: NDArray[np.int64]
    down: NDArray[np.int64]
    forms: NDArray[np.int64]
    head_form: int
    norms: NDArray[np.float32]
    product_norms: NDArray[np.float32]
    last_norm: NDArray[np.float32]
    head: NDArray[np.int64]
    embedding: NDArray[np.int64]
    rope: NDArray[np.float32]
    rope_of_layer: NDArray[np.int64]
    embedding_factor: np.float32
    logit_softcap: np.float32
    epsilon: np.float32
    intermediate: int
    num_sinks: int


Panels: TypeAlias = "list[NDArray[np.uint8]]"
"""Of a matrix: uint8 ``[panels, bytes of a panel]`` of each of its parts."""


class PackedLayer(NamedTuple):
    """Panels of a layer's matrices, as :class:`~pagefold.runner.fused.matrices.Layer` has them."""

    qkv: Panels
    out: Panels
    gate: Panels
    up: Panels
    down: Panels


class PackedModel(NamedTuple):
    """A model as the fused decoder has it.

    Attributes:
        weights: of it.
        layers: panels of each layer's matrices, of which ``weights`` has the addresses.
        head: panels of the head.
        embedding: likewise; the same where they are tied.
        row_bytes: of the longest row that is turned into another format; 0 where none is.
    """

    weights: DecoderWeights
    layers: tuple[PackedLayer, ...]
    head: Panels
    embedding: Panels
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, and of the tables of ropes."""
        numbers = [one for one in self.weights if isinstance(one, np.ndarray) and one.dtype == np.float32]
        panels = [*self.head, *(self.embedding if self.embedding is not self.head else ())]
        panels += [part for layer in self.layers for matrix in layer for part in matrix]
        return sum(one.nbytes for one in (*numbers, *panels))


_LAST_NORM = "model.norm.weight"
_NORMS = "input_layernorm.weight", "post_attention_layernorm.weight"
"""A layer's norms before attention and before the MLP, in a model that has no others."""
_OUTER_NORMS = "input_layernorm.weight", "pre_feedforward_layernorm.weight"
_PRODUCT_NORMS = "post_attention_layernorm.weight", "post_feedforward_layernorm.weight"
"""The same, and the norms behind them, in one that norms products."""
_HEAD_NORMS = "self_attn.q_norm.weight", "self_attn.k_norm.weight"


def packed_bytes(config: FusedConfig, num_positions: int, formats: DecoderFormats, *, has_scores: bool = False) -> int:
    """Return what :attr:`PackedModel.num_bytes` will be, to the byte: whole panels, scales, and float32 of the rest.

    That is also of the tables of ropes, which have cosines and sines of each of ``num_positions``.

    Only where a config says that head and embedding are tied, and the files have two that differ, is one not counted.
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    num_scores = has_scores * config.num_kv_heads
    layers = layers_of(config, formats, num_scores)
    num_bytes = sum(matrix.num_bytes for layer in layers for matrix in layer)
    numbers = (2 + 2 * config.has_product_norms) * hidden + num_scores
    numbers += config.has_biases * (config.num_heads + 2 * config.num_kv_heads) * head_dim
    numbers += config.has_head_norms * 2 * head_dim
    names = {"head": EMBEDDING, "embedding": None} if config.is_tied else {"head": HEAD, "embedding": EMBEDDING}
    head, embedding = vocabulary_of(config, formats, **names)
    num_bytes += head.num_bytes + (0 if embedding is None else embedding.num_bytes)
    of_ropes = len(config.ropes) * num_positions * 2 * head_dim
    return num_bytes + FLOAT_BYTES * (config.num_layers * numbers + hidden + of_ropes)


def pack_model(
    config: FusedConfig, folder: Path, num_positions: int, formats: DecoderFormats, keeping: Keeping | None = None
) -> PackedModel:
    """Read and pack a model, on all cores.

    Args:
        config: of the model.
        folder: where its weights are, in any float type.
        num_positions: how many positions a sequence can have.
        formats: of the matrices.
        keeping: by which scores entries are kept; None where all are.

    Raises:
        UnsupportedModelError: the weights are not those that the config asks for.
    """
    checkpoint = Checkpoint(folder)
    checkpoint.check(_shapes(config, checkpoint))
    num_scores = 0 if keeping is None else config.num_kv_heads
    layers = tuple(layers_of(config, formats, num_scores))
    head, embedding = vocabulary_of(config, formats, **_names_of_vocabulary(config, checkpoint))
    room = Room([head, *([] if embedding is None else [embedding]), *(matrix for layer in layers for matrix in layer)])
    of_head = room.take(head)
    of_embedding = of_head if embedding is None else room.take(embedding)
    of_layers = tuple(PackedLayer(*map(room.take, layer)) for layer in layers)

    def tensor(one: Tensor, layer: int) -> torch.Tensor:
        if one.name != SCORERS:
            return checkpoint.tensor(one.name)
        assert keeping is not None, "rows that score entries, where all are kept"
        return keeping.weights[layer]

    @torch.inference_mode()
    def pack(matrix: Matrix, into: Panels, layer: int = 0) -> None:
        for part, panels in zip(matrix.parts, into, strict=True):
            rows = [tensor(one, layer) for one in part.tensors]
            part.form.pack((torch.cat(rows) if len(rows) > 1 else rows[0]).numpy(), panels)

    def pack_layer(index: int) -> None:
        for matrix, into in zip(layers[index], of_layers[index], strict=True):
            pack(matrix, into, index)

    def pack_vocabulary() -> None:
        pack(head, of_head)
        if embedding is not None:
            pack(embedding, of_embedding)

    with ThreadPoolExecutor(available_cpus()) as threads:  # copying lets go of the GIL
        vocabulary = threads.submit(pack_vocabulary)  # the largest piece first
        list(threads.map(pack_layer, range(config.num_layers)))
        vocabulary.result()
    tables = [_tables_of(layer, panels) for layer, panels in zip(layers, of_layers, strict=True)]
    qkv, out, gate_up, down = (np.stack(each) for each in zip(*tables, strict=True))
    at_head = _table(head, of_head)
    weights = DecoderWeights(
        **_numbers_of(config, checkpoint)._asdict(),
        qkv=qkv,
        thresholds=_nothing(0, 0, 0) if keeping is None else keeping.thresholds.float().numpy(),
        out=out,
        gate_up=gate_up,
        down=down,
        forms=np.array([[layer.qkv.rows, layer.out.rows, layer.gate.rows, layer.down.rows] for layer in layers]),
        head_form=head.rows,
        head=at_head,
        embedding=_table(embedding or head, of_embedding, is_embedding=True),
        rope=rope_tables(config, folder, num_positions),
        rope_of_layer=np.array(config.rope_of_layer, np.int64),
        embedding_factor=formats.rounded(config.embedding_factor),
        logit_softcap=np.float32(config.logit_softcap),
        epsilon=np.float32(config.epsilon),
        intermediate=config.intermediate_size,
        num_sinks=0 if keeping is None else keeping.num_sinks,
    )
    longest = max(matrix.row_bytes for matrix in (head, *(matrix for layer in layers for matrix in layer)))
    return PackedModel(weights, of_layers, of_head, of_embedding, longest)


def _table(matrix: Matrix, panels: Panels, *, is_embedding: bool = False) -> NDArray[np.int64]:
    """Return what the kernel is told of panels, ``[panels, 2]``: their addresses, and what computes with them."""
    table = np.zeros((matrix.num_panels, 2), np.int64)
    first = 0
    for part, of_part in zip(matrix.parts, panels, strict=True):
        rows = table[first : first + len(of_part)]
        rows[:, 0] = of_part.ctypes.data + np.arange(len(of_part)) * of_part.strides[0]
        tiles = part.form.tiles()
        rows[:, 1] = tiles.column if is_embedding else tiles.product
        first += len(of_part)
    return table


def _tables_of(layer: Layer, panels: PackedLayer) -> list[NDArray[np.int64]]:
    """Return the tables of a layer's matrices, in which gate and up alternate."""
    qkv, out, gate, up, down = (_table(*one) for one in zip(layer, panels, strict=True))
    return [qkv, out, np.stack([gate, up], axis=1).reshape(-1, 2), down]


class _Numbers(NamedTuple):
    """What is no matrix; see :class:`DecoderWeights`."""

    bias: NDArray[np.float32]
    head_norms: NDArray[np.float32]
    norms: NDArray[np.float32]
    product_norms: NDArray[np.float32]
    last_norm: NDArray[np.float32]


@torch.inference_mode()
def _numbers_of(config: FusedConfig, checkpoint: Checkpoint) -> _Numbers:
    """Read what is no matrix; 1 is added to norms of a model that adds it."""
    num_layers = config.num_layers

    def norm(name: str) -> torch.Tensor:
        weight = checkpoint.tensor(name)
        return 1.0 + weight if config.adds_one_to_norms else weight.clone()

    def of_layers(names: tuple[str, ...]) -> NDArray[np.float32]:
        layers = [[norm(f"model.layers.{index}.{name}") for name in names] for index in range(num_layers)]
        return torch.stack([torch.stack(of_one) for of_one in layers]).numpy()

    def bias(index: int) -> torch.Tensor:
        return torch.cat([checkpoint.tensor(f"model.layers.{index}.self_attn.{one}_proj.bias") for one in "qkv"])

    before, behind = _norms_of(config)
    return _Numbers(
        bias=torch.stack([*map(bias, range(num_layers))]).numpy() if config.has_biases else _nothing(0, 0),
        head_norms=of_layers(_HEAD_NORMS) if config.has_head_norms else _nothing(0, 2, 0),
        norms=of_layers(before),
        product_norms=of_layers(behind) if behind else _nothing(num_layers, 2, 0),
        last_norm=norm(_LAST_NORM).numpy(),
    )


def _nothing(*shape: int) -> NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def _norms_of(config: FusedConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of a layer's norms: those before attention and the MLP, and those behind them."""
    return (_OUTER_NORMS, _PRODUCT_NORMS) if config.has_product_norms else (_NORMS, ())


def _shapes(config: FusedConfig, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of all tensors that a model of this config has."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads = {"q": config.num_heads * head_dim, "k": config.num_kv_heads * head_dim, "v": config.num_kv_heads * head_dim}
    before, behind = _norms_of(config)
    layer: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(before + behind, (hidden,)),
        "self_attn.o_proj.weight": (hidden, heads["q"]),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        **{f"self_attn.{one}_proj.weight": (num, hidden) for one, num in heads.items()},
    }
    if config.has_biases:
        layer |= {f"self_attn.{one}_proj.bias": (num,) for one, num in heads.items()}
    if config.has_head_norms:
        layer |= dict.fromkeys(_HEAD_NORMS, (head_dim,))
    matrices = dict.fromkeys((EMBEDDING, HEAD), (config.vocab_size, hidden))
    if config.is_tied and EMBEDDING in checkpoint and HEAD not in checkpoint:
        del matrices[HEAD]
    elif config.is_tied and HEAD in checkpoint and EMBEDDING not in checkpoint:
        del matrices[EMBEDDING]
    layers = {f"model.layers.{index}.{name}": layer[name] for index in range(config.num_layers) for name in layer}
    return layers | matrices | {_LAST_NORM: (hidden,)}


def _names_of_vocabulary(config: FusedConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return which tensors the head and the embedding are; no embedding where it is the head.

    A config may say that they are tied and the files have both: then, as for transformers, the files are right.
    """
    if config.is_tied and not (HEAD in checkpoint and EMBEDDING in checkpoint):
        return {"head": HEAD if HEAD in checkpoint else EMBEDDING, "embedding": None}
    is_same = config.is_tied and torch.equal(checkpoint.tensor(HEAD), checkpoint.tensor(EMBEDDING))
    return {"head": HEAD, "embedding": None if is_same else EMBEDDING}
