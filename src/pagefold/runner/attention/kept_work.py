"""KeptWork: what is packed of a step's sequences, and what the step packs, as kernels take it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefold.runner.attention.inputs import AttentionInputs
    from pagefold.runner.attention.packed import KeptUnits, PackedInputs

__all__ = ["KeptWork", "kept_work", "masks_of", "tell_counts"]


class KeptWork(NamedTuple):
    """What is packed of a step's sequences (``packed.py``): C chunks, of which the step packs P.

    Attributes:
        chunk_ids: int32 ``[S, most chunks]``: which of the C chunks each sequence has, the first first.
        counts: int32 ``[C, L, Hkv]``: entries that are kept. Layers of the step fill it in for what they pack.
        units: int32 ``[C, L, Hkv]``: the unit that they begin with; likewise.
        blocks: int32 ``[C, blocks]``: where units lie.
        packs: int32 ``[P, 3]``: sequence, which of its chunks, which of the C.
        num_units: int32 ``[P]``: how many units of each are filled already.
        block_units: units a block.
    """

    chunk_ids: NDArray[np.int32]
    counts: NDArray[np.int32]
    units: NDArray[np.int32]
    blocks: NDArray[np.int32]
    packs: NDArray[np.int32]
    num_units: NDArray[np.int32]
    block_units: int


def _zeros(*shape: int) -> NDArray[np.int32]:
    return np.zeros(shape, np.int32)


_NOTHING_KEPT = KeptWork(_zeros(0, 0), _zeros(0, 0, 0), _zeros(0, 0, 0), _zeros(0, 0), _zeros(0, 3), _zeros(0), 1)


def kept_work(inputs: AttentionInputs) -> KeptWork:
    """Return what is packed of a step's sequences; each chunk once, whoever has it."""
    packed = inputs.packed
    if packed is None:
        return _NOTHING_KEPT
    ids: dict[int, int] = {}
    chunks: list[KeptUnits] = []
    packs: list[tuple[int, int, int]] = []
    chunk_ids = _zeros(len(packed.chunks), max(map(len, packed.chunks), default=0))
    for seq, own in enumerate(packed.chunks):
        num_old = len(own) if packed.num_old is None else packed.num_old[seq]
        for at, chunk in enumerate(own):
            found = ids.setdefault(id(chunk), len(chunks))
            if found == len(chunks):
                chunks.append(chunk)
            chunk_ids[seq, at] = found
            if at >= num_old:
                packs.append((seq, at, found))
    if not chunks:
        return _NOTHING_KEPT._replace(chunk_ids=chunk_ids)
    counts = np.stack([chunk.counts for chunk in chunks]).astype(np.int32)
    num_units = -(-counts // chunks[0].shape.block_size)
    before = num_units.reshape(len(chunks), -1).cumsum(1).reshape(counts.shape) - num_units
    blocks = _zeros(len(chunks), max(len(chunk.block_ids) for chunk in chunks))
    for into, chunk in zip(blocks, chunks, strict=True):
        into[: len(chunk.block_ids)] = chunk.block_ids
    return KeptWork(
        chunk_ids=chunk_ids,
        counts=counts,
        units=before.astype(np.int32),
        blocks=blocks,
        packs=np.array(packs, np.int32).reshape(-1, 3),
        num_units=_zeros(len(packs)),
        block_units=chunks[0].shape.num_cells,
    )


def masks_of(inputs: AttentionInputs) -> NDArray[np.int32]:
    """Return by which mask each sequence keeps older entries; the first one for all where nothing is packed."""
    packed = inputs.packed
    return _zeros(inputs.num_seqs) if packed is None or packed.mask_of is None else packed.mask_of


def tell_counts(packs: NDArray[np.int32], counts: NDArray[np.int32], packed: PackedInputs | None) -> None:
    """Tell the chunks that a step has packed how many entries each layer and head has kept of them.

    Args:
        packs: of the step's :class:`KeptWork`.
        counts: likewise.
        packed: where the chunks are.
    """
    if packed is not None:
        for seq, number, chunk in packs.tolist():
            packed.chunks[seq][number].counts[:] = counts[chunk]
