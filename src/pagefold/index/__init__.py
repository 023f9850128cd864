"""Which server holds which prefixes: an index of KV events, as vLLM's publisher and ours send them. No torch.

What is needed where nothing is decoded or received is here. :mod:`pagefold.index.wire` (msgspec) and
:mod:`pagefold.index.subscriber` (ZeroMQ) take ``pip install "pagefold[events]"``.
"""

from pagefold.index.block_hash import DEFAULT_SEED, ExtraKeys, block_hashes, tenant_salt
from pagefold.index.prefix_index import PrefixIndex, ReplicaState

__all__ = ["DEFAULT_SEED", "ExtraKeys", "PrefixIndex", "ReplicaState", "block_hashes", "tenant_salt"]
