"""Names and frames of vLLM's chunks: under which layout they are kept, and what each is called.

vLLM calls a chunk by a digest of all tokens up to its end and by its group of layers: an *offload key*. A frame holds
that key whole, where frames of ours hold tokens; the rest of its name follows from it. So a frame under a wrong name is
found to be one.

All else that decides what a chunk's bytes mean is the layout: chunks of another layout are not found, whoever wrote
them into the folder. vLLM's own filesystem tier goes by the name of the model, its dtype, its groups and how it is
split; here are also the bytes of a chunk, the order of its bytes, the kind of device, and the family of vLLM.
"""

from __future__ import annotations

import json
import platform
import sys
from typing import TYPE_CHECKING, Any

from pagefold.kv import TOKEN_BYTES, BlockName, Namespace, root_digest
from pagefold.kv.names import path_digest
from pagefold.store.frame import FrameFormat

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ChunkNames", "describe_layout", "frames_of"]

_LEAST_KEY_BYTES = 64
"""Room for a digest of 32 bytes, the group and the length."""


def describe_layout(spec: Any, row_bytes: int, *, weights: str, version_family: str, device: str) -> dict[str, Any]:  # noqa: ANN401 - vLLM's
    """Return all that decides how a chunk's bytes are to be read, and whose they are.

    Args:
        spec: vLLM's ``OffloadingSpec``.
        row_bytes: of a chunk in the host's memory, padding included.
        weights: what the weights are beside the model's name.
        version_family: of vLLM.
        device: the kind of device that vLLM runs on, as it calls it.
    """
    config = spec.config
    parallel = config.parallel
    return {
        "engine": f"vllm-{version_family}",
        "machine": platform.machine(),
        "byte_order": sys.byteorder,
        "device": device,
        "model": config.model.name,
        "weights": weights,
        "dtype": str(config.model.dtype),
        "row_bytes": row_bytes,
        "worker_bytes_per_block": config.worker_kv_bytes_per_block,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "rank": parallel.rank,
        "sizes": {
            name: getattr(parallel, name) for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        },
        "kv_cache_layout": config.kv_cache_layout,
        "replicated": bool(spec.replicated_layout),
        "canonical": bool(config.canonical_layout),
    }


def frames_of(layout: Mapping[str, Any]) -> FrameFormat:
    """Return the format of the frames of chunks of a layout, as :func:`describe_layout` tells it."""
    said = json.dumps(layout, sort_keys=True, separators=(",", ":"))
    namespace = Namespace(model=layout["model"], layout=said, dtype=layout["dtype"])
    tokens = layout["groups"][0][0] * layout["blocks_per_chunk"] if layout["groups"] else 0
    key_bytes = max(_LEAST_KEY_BYTES, tokens * TOKEN_BYTES)  # so that people are told how many tokens a chunk has
    return FrameFormat(root_digest(namespace.key()), layout["row_bytes"], key_bytes)


class ChunkNames:
    """From vLLM's keys to names of blocks.

    Args:
        frames: their format.
    """

    def __init__(self, frames: FrameFormat) -> None:
        self._namespace = root_digest(b"vllm" + frames.layout)
        self._key_bytes = frames.key_bytes

    def __call__(self, offload_key: bytes) -> BlockName:
        """Return the name of the chunk that vLLM calls so. Of a key too long for a frame, its digest is kept."""
        fits = len(offload_key) < min(self._key_bytes, 256)
        key = bytes((len(offload_key),)) + offload_key if fits else b"\0" + root_digest(offload_key)
        key = key.ljust(self._key_bytes, b"\0")
        return BlockName(path_digest(self._namespace, key), self._namespace, self._namespace, key)
