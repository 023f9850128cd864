"""The weights of a model, packed for the fused decoder.

A matrix ``[N, K]`` becomes panels, as its format has them (see ``kernels/formats.py``): a panel is what one tile walks
through, and the whole matrix is read in one stream. q, k and v are one matrix; gate and up alternate panel by panel, so
that a tile of both is there when they are multiplied. N is filled up with zeros to whole panels.

They are packed from the checkpoint's files, layer by layer, so that there is never a second copy of the model.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pagefold.config import available_cpus
from pagefold.kernels.emit import FLOAT_BYTES
from pagefold.kernels.formats import num_panels
from pagefold.kernels.formats import pack as packed
from pagefold.runner.fused.checkpoint import Checkpoint
from pagefold.runner.fused.rope import rope_tables

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from pagefold.kernels.formats import FormatTiles, ProductFormat
    from pagefold.runner.fused.families import FusedConfig
    from pagefold.runner.fused.formats import DecoderFormats
    from pagefold.runner.keeping import Keeping

__all__ = ["DecoderWeights", "PackedModel", "pack_model", "packed_bytes"]


class DecoderWeights(NamedTuple):
    """L layers, E hidden size, H heads, Hkv KV heads, D head_dim, F intermediate size, V vocabulary; W panel width.

    Panels are uint8 ``[..., panels, bytes of a panel]``, of the embedding in a format of its own. Norms are what rows
    are multiplied by: where a model adds 1 to its weights, they have it.

    Attributes:
        qkv: panels ``[L, ceil(((H + 2 * Hkv) * D + S) / W), ...]``, of K = E. S is Hkv where entries have scores, which
            are the last columns; else 0.
        thresholds: float32 ``[M, L, Hkv]``: the least scores that each of M masks keeps; none without scores.
        bias: float32 ``[L, (H + 2 * Hkv) * D]``, or ``[0, 0]`` without.
        head_norms: float32 ``[L, 2, D]``: of q and of k; or ``[0, 2, 0]`` without.
        out: panels ``[L, ceil(E / W), ...]``, of K = H * D.
        gate_up: panels ``[L, 2 * ceil(F / W), ...]``, of K = E: gate and up in turn.
        down: panels ``[L, ceil(E / W), ...]``, of K = F.
        norms: float32 ``[L, 2, E]``: before attention and before the MLP.
        product_norms: float32 ``[L, 2, E]``: behind them, of what is added then; or ``[L, 2, 0]`` without.
        last_norm: float32 ``[E]``.
        head: panels ``[ceil(V / W), ...]``, of K = E.
        embedding: likewise, a token a column; it is ``head`` where they are tied.
        rope: float32 ``[ropes, positions, 2, D]``: cosines and sines.
        rope_of_layer: int64 ``[L]``.
        embedding_factor: what embeddings are multiplied by; 1 for nothing.
        logit_softcap: of logits; 0 for none.
        epsilon: of the norms.
        intermediate: F.
        num_sinks: so many first entries are kept whatever their scores.
    """

    qkv: NDArray[np.uint8]
    thresholds: NDArray[np.float32]
    bias: NDArray[np.float32]
    head_norms: NDArray[np.float32]
    out: NDArray[np.uint8]
    gate_up: NDArray[np.uint8]
    down: NDArray[np.uint8]
    norms: NDArray[np.float32]
    product_norms: NDArray[np.float32]
    last_norm: NDArray[np.float32]
    head: NDArray[np.uint8]
    embedding: NDArray[np.uint8]
    rope: NDArray[np.float32]
    rope_of_layer: NDArray[np.int64]
    embedding_factor: np.float32
    logit_softcap: np.float32
    epsilon: np.float32
    intermediate: int
    num_sinks: int


class PackedModel(NamedTuple):
    """A model as the fused decoder has it.

    Attributes:
        weights: of it.
        tiles: what computes in the format of its matrices; the column is the embedding's.
        row_bytes: of the longest row in that format.
    """

    weights: DecoderWeights
    tiles: FormatTiles
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, and of the tables of ropes."""
        arrays = {id(one): one for one in self.weights if isinstance(one, np.ndarray)}  # a tied head once
        return sum(one.nbytes for one in arrays.values()) - self.weights.rope_of_layer.nbytes


_EMBEDDING, _HEAD, _LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
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
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    num_out, num_layers = config.num_heads * head_dim, config.num_layers
    num_qkv = num_out + 2 * config.num_kv_heads * head_dim

    def panels(form: ProductFormat, num_columns: int, num_k: int) -> int:
        return num_panels(num_columns) * form.panel_bytes(num_k)

    products = formats.products
    num_scores = has_scores * config.num_kv_heads
    layer = panels(products, num_qkv + num_scores, hidden) + panels(products, hidden, num_out)
    layer += 2 * panels(products, inner, hidden) + panels(products, hidden, inner)
    numbers = (2 + 2 * config.has_product_norms) * hidden + num_scores
    numbers += config.has_biases * num_qkv + config.has_head_norms * 2 * head_dim
    tables = panels(products, config.vocab_size, hidden)
    if not config.is_tied:
        tables += panels(formats.embedding, config.vocab_size, hidden)
    of_ropes = len(config.ropes) * num_positions * 2 * head_dim
    return num_layers * (layer + FLOAT_BYTES * numbers) + FLOAT_BYTES * (hidden + of_ropes) + tables


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
    num_layers, hidden, inner = config.num_layers, config.hidden_size, config.intermediate_size
    num_out = config.num_heads * config.head_dim
    num_qkv = num_out + 2 * config.num_kv_heads * config.head_dim
    num_scores = 0 if keeping is None else config.num_kv_heads

    def panels(num_columns: int, num_k: int, every: int = 1) -> NDArray[np.uint8]:
        shape = num_layers, every * num_panels(num_columns), formats.products.panel_bytes(num_k)
        return np.zeros(shape, np.uint8)

    def pack(matrix: torch.Tensor, into: NDArray[np.uint8]) -> None:
        formats.products.pack(matrix.numpy(), into)

    qkv, out, down = panels(num_qkv + num_scores, hidden), panels(hidden, num_out), panels(hidden, inner)
    gate_up = panels(inner, hidden, every=2)

    @torch.inference_mode()
    def pack_layer(index: int) -> None:
        def tensor(name: str) -> torch.Tensor:
            return checkpoint.tensor(f"model.layers.{index}.{name}")

        rows = [tensor(f"self_attn.{one}_proj.weight") for one in "qkv"]
        if keeping is not None:
            rows.append(keeping.weights[index])
        pack(torch.cat(rows), qkv[index])
        pack(tensor("self_attn.o_proj.weight"), out[index])
        pack(tensor("mlp.gate_proj.weight"), gate_up[index, 0::2])
        pack(tensor("mlp.up_proj.weight"), gate_up[index, 1::2])
        pack(tensor("mlp.down_proj.weight"), down[index])

    @torch.inference_mode()
    def pack_vocabulary() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the head and the embedding, which may be the same."""
        matrix, embedding = _head_and_embedding(config, checkpoint)
        head = packed(formats.products, matrix.numpy())
        return head, head if embedding is None else packed(formats.embedding, embedding.numpy())

    tiles = formats.products.tiles()  # compiled here: some formats pack with them, in every thread
    with ThreadPoolExecutor(available_cpus()) as threads:  # copying lets go of the GIL
        vocabulary = threads.submit(pack_vocabulary)  # the largest piece first
        list(threads.map(pack_layer, range(num_layers)))
        head, embedding = vocabulary.result()
    weights = DecoderWeights(
        **_numbers_of(config, checkpoint)._asdict(),
        qkv=qkv,
        thresholds=_nothing(0, 0, 0) if keeping is None else keeping.thresholds.float().numpy(),
        out=out,
        gate_up=gate_up,
        down=down,
        head=head,
        embedding=embedding,
        rope=rope_tables(config, folder, num_positions),
        rope_of_layer=np.array(config.rope_of_layer, np.int64),
        embedding_factor=formats.rounded(config.embedding_factor),
        logit_softcap=np.float32(config.logit_softcap),
        epsilon=np.float32(config.epsilon),
        intermediate=inner,
        num_sinks=0 if keeping is None else keeping.num_sinks,
    )
    if embedding is not head:
        tiles = tiles._replace(column=formats.embedding.tiles().column)
    longest = max(formats.products.row_bytes(size) for size in (hidden, num_out, inner))
    return PackedModel(weights, tiles, longest)


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
