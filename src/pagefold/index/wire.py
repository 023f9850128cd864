"""KV events as they cross the wire: the structs of vLLM 0.32 (``distributed/kv_events.py``), in msgpack.

A batch is an array, an event a map with its type's name; defaults are left out. What a newer vLLM adds to an event is
passed over. Events that are arrays, as those of older ones are, are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from pagefold.errors import ConfigError, PagefoldError

try:
    import msgspec
except ImportError:
    _missing = "To read KV events, msgspec must be installed."
    raise ConfigError(_missing, remedy='pip install "pagefold[events]"') from None

if TYPE_CHECKING:
    from pagefold.index.prefix_index import Holdings

__all__ = [
    "DEVICE",
    "END_MARK",
    "NUMBER_BYTES",
    "AllBlocksCleared",
    "BadBatchError",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "decode_batch",
    "encode_batch",
    "number_frame",
]

DEVICE = "GPU"
"""The medium of the device's own blocks: vLLM calls it so on a CPU too."""

NUMBER_BYTES = 8
"""Of the frame that numbers a batch, big-endian."""

END_MARK = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
"""Such a frame, behind the last batch that was replayed."""

_SLIDING = ("sliding_window", "sliding_window_mla")
_CHUNKED = "chunked_local_attention"


class BadBatchError(PagefoldError):
    """A payload that is no batch of KV events."""


class _KVEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """What has become of some blocks."""


class BlockStored(_KVEvent):
    """Blocks of one path, one behind the other, can be found from now on.

    Attributes:
        block_hashes: of them, in order: whole ones, or their last 64 bits.
        parent_block_hash: of the block before; None before the first.
        token_ids: of all of them.
        block_size: tokens a block.
        lora_id: deprecated, as in vLLM.
        medium: where they are: ``GPU`` for the device, ``CPU``, ``STORAGE``.
        lora_name: of the adapter.
        extra_keys: of each block, without tags.
        group_idx: their cache group.
        kv_cache_spec_kind, kv_cache_spec_sliding_window: what that group keeps.
        locality, ownership, session_id: as in vLLM; nothing here goes by them.
    """

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None

    def tell(self, holdings: Holdings) -> None:
        """Tell a replica's holdings what has happened."""
        kind, window = self.kv_cache_spec_kind, self.kv_cache_spec_sliding_window
        if window is not None and self.block_size > 0 and (kind in _SLIDING or kind == _CHUNKED):
            holdings.learn_window(self.group_idx or 0, window, self.block_size, is_chunked=kind == _CHUNKED)
        holdings.stored(self.block_hashes, self.medium or DEVICE, self.group_idx or 0)


class BlockRemoved(_KVEvent):
    """Blocks are not found any more in one medium. Fields are those of :class:`BlockStored`."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None

    def tell(self, holdings: Holdings) -> None:
        """Tell a replica's holdings what has happened."""
        holdings.removed(self.block_hashes, self.medium or DEVICE, self.group_idx or 0)


class AllBlocksCleared(_KVEvent):
    """No block is found any more."""

    def tell(self, holdings: Holdings) -> None:
        """Tell a replica's holdings what has happened."""
        holdings.cleared()


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What has become of blocks in one step.

    Attributes:
        ts: seconds since 1970, by the server's clock.
        events: in their order.
        data_parallel_rank: of the server among those that share its work.
    """

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EventBatch)


def encode_batch(batch: EventBatch) -> bytes:
    """Return a batch as it is sent."""
    return _encoder.encode(batch)


def decode_batch(payload: bytes) -> EventBatch:
    """Return the batch that was sent.

    Raises:
        BadBatchError: it is none.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        msg = f"{len(payload)} bytes are no batch of KV events: {error}."
        raise BadBatchError(
            msg, remedy="Events must be maps with a type, as vLLM 0.32 and Pagefold send them."
        ) from None


def number_frame(number: int) -> bytes:
    """Return the frame that numbers a batch."""
    return number.to_bytes(NUMBER_BYTES, "big")
