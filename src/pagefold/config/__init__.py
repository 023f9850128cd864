"""Settings, and what the environment and the machine say: nobody else reads these."""

from pagefold.config.engine_config import (
    DROPPED_BITS,
    AttentionBackend,
    Device,
    Dtype,
    EngineConfig,
    ModelImpl,
    QuantizationName,
    TransportCodec,
)
from pagefold.config.environment import (
    cache_dir,
    environment_admin_key,
    environment_hash_seed,
    environment_int_hashes,
    environment_metrics_key,
    environment_npm_registry,
    environment_remote_url,
    environment_traces,
)
from pagefold.config.flag import Flag
from pagefold.config.kv_events import KVEventsConfig
from pagefold.config.lora_module import LoRAModule, check_adapter_name
from pagefold.config.machine import available_cpus, available_memory_bytes
from pagefold.config.server_config import MAX_PRIORITY, REASONING_PARSERS, Account, ServerConfig, is_key
from pagefold.config.tenant_quota import TenantQuota, quotas_of

__all__ = [
    "DROPPED_BITS",
    "MAX_PRIORITY",
    "REASONING_PARSERS",
    "Account",
    "AttentionBackend",
    "Device",
    "Dtype",
    "EngineConfig",
    "Flag",
    "KVEventsConfig",
    "LoRAModule",
    "ModelImpl",
    "QuantizationName",
    "ServerConfig",
    "TenantQuota",
    "TransportCodec",
    "available_cpus",
    "available_memory_bytes",
    "cache_dir",
    "check_adapter_name",
    "environment_admin_key",
    "environment_hash_seed",
    "environment_int_hashes",
    "environment_metrics_key",
    "environment_npm_registry",
    "environment_remote_url",
    "environment_traces",
    "is_key",
    "quotas_of",
]
