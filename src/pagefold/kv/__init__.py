"""THE CENTRE: paged blocks and shared prefixes. Standard library only: no torch, no numpy, no I/O, no clock."""

from pagefold.kv.arbiter import Arbiter, LinkModel, Verdict
from pagefold.kv.audit import AuditError, audit
from pagefold.kv.block import Block, BlockId, BlockState, PackedChunk
from pagefold.kv.chunk_notes import ChunkNotes, CountsForm
from pagefold.kv.codec import CODECS, KV_CACHE_DTYPES, Codec
from pagefold.kv.core import KVCore
from pagefold.kv.eviction import EvictionPolicy, KeyPolicy, RequestFacts
from pagefold.kv.fetches import Fetch
from pagefold.kv.geometry import CacheGroup, CacheLayout, KVGeometry, LayerKV, lay_out
from pagefold.kv.host_tier import NO_HOST, HostTier
from pagefold.kv.keep import KEEP_ALL, NO_MASK, KeepRule, blocks_per_place
from pagefold.kv.names import BlockName, root_digest
from pagefold.kv.namespace import Namespace
from pagefold.kv.ops import NO_HOST_OPS, CopyOp, FetchOp, HostOps, LoadOp, ResidualCopy, StoreOp, WriteOp
from pagefold.kv.packing import Packed
from pagefold.kv.pins import DroppedPin, Pin, PinLimits, PinTable
from pagefold.kv.policies import AUTO, DEFAULT_POLICY, POLICIES, make_policy
from pagefold.kv.quotas import NO_QUOTAS, AnyQuotas, Quotas
from pagefold.kv.residuals import NO_RESIDUALS, Residuals
from pagefold.kv.sequence_cache import Promise, SequenceCache
from pagefold.kv.slow_tiers import NO_SLOW_TIERS, SlowTiers
from pagefold.kv.streaming import max_hot_blocks_of
from pagefold.kv.table import BlockTable, num_blocks_for
from pagefold.kv.tenant_blocks import KVQuota, TenantBlocks
from pagefold.kv.tree import TOKEN_BYTES, PrefixHit
from pagefold.kv.writes import WRITE_POLICIES, WritePolicy

__all__ = [
    "AUTO",
    "CODECS",
    "DEFAULT_POLICY",
    "KEEP_ALL",
    "KV_CACHE_DTYPES",
    "NO_HOST",
    "NO_HOST_OPS",
    "NO_MASK",
    "NO_QUOTAS",
    "NO_RESIDUALS",
    "NO_SLOW_TIERS",
    "POLICIES",
    "TOKEN_BYTES",
    "WRITE_POLICIES",
    "AnyQuotas",
    "Arbiter",
    "AuditError",
    "Block",
    "BlockId",
    "BlockName",
    "BlockState",
    "BlockTable",
    "CacheGroup",
    "CacheLayout",
    "ChunkNotes",
    "Codec",
    "CopyOp",
    "CountsForm",
    "DroppedPin",
    "EvictionPolicy",
    "Fetch",
    "FetchOp",
    "HostOps",
    "HostTier",
    "KVCore",
    "KVGeometry",
    "KVQuota",
    "KeepRule",
    "KeyPolicy",
    "LayerKV",
    "LinkModel",
    "LoadOp",
    "Namespace",
    "Packed",
    "PackedChunk",
    "Pin",
    "PinLimits",
    "PinTable",
    "PrefixHit",
    "Promise",
    "Quotas",
    "RequestFacts",
    "ResidualCopy",
    "Residuals",
    "SequenceCache",
    "SlowTiers",
    "StoreOp",
    "TenantBlocks",
    "Verdict",
    "WriteOp",
    "WritePolicy",
    "audit",
    "blocks_per_place",
    "lay_out",
    "make_policy",
    "max_hot_blocks_of",
    "num_blocks_for",
    "root_digest",
]
