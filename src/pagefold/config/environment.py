"""What the environment says: the only place that reads its variables."""

from __future__ import annotations

import os
from pathlib import Path

from pagefold.errors import ConfigError

__all__ = [
    "cache_dir",
    "environment_admin_key",
    "environment_hash_seed",
    "environment_int_hashes",
    "environment_metrics_key",
    "environment_npm_registry",
    "environment_remote_url",
    "environment_traces",
]


def cache_dir() -> Path:
    """Return the folder for models and compiled kernels: ``$PAGEFOLD_CACHE``, else ``~/.cache/pagefold``."""
    return Path(os.environ.get("PAGEFOLD_CACHE") or Path.home() / ".cache" / "pagefold")


def environment_admin_key() -> str | None:
    """Return the admin's key of ``$PAGEFOLD_ADMIN_API_KEY``, which no list of processes shows, if it is set."""
    return os.environ.get("PAGEFOLD_ADMIN_API_KEY") or None


def environment_hash_seed() -> str | None:
    """Return what chains of block hashes begin with: ``$PYTHONHASHSEED``, as in vLLM, if it is set."""
    return os.environ.get("PYTHONHASHSEED")


def environment_int_hashes() -> bool:
    """Whether KV events tell the last 64 bits of hashes: ``$VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES``, 1 if it is not set.

    Raises:
        ConfigError: it is no number.
    """
    value = os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    try:
        return bool(int(value))
    except ValueError:
        msg = f"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is {value!r}."
        raise ConfigError(msg, remedy="It must be 0 or 1.") from None


def environment_metrics_key() -> str | None:
    """Return the key of ``/metrics`` of ``$PAGEFOLD_METRICS_KEY``, which no list of processes shows, if it is set."""
    return os.environ.get("PAGEFOLD_METRICS_KEY") or None


def environment_npm_registry() -> str | None:
    """Return the registry of npm packages of ``$NPM_CONFIG_REGISTRY``, if it is set."""
    return os.environ.get("NPM_CONFIG_REGISTRY") or None


def environment_remote_url() -> str | None:
    """Return the remote store of ``$PAGEFOLD_KV_REMOTE_URL``, which no list of processes shows, if it is set."""
    return os.environ.get("PAGEFOLD_KV_REMOTE_URL") or None


def environment_traces() -> Path | None:
    """Return the folder of ``$PAGEFOLD_TRACES``, where real traces lie, if it is set."""
    folder = os.environ.get("PAGEFOLD_TRACES")
    return Path(folder) if folder else None
