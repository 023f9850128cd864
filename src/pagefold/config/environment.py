"""What the environment says: the only place that reads its variables."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = [
    "cache_dir",
    "environment_admin_key",
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
