"""TierOptions: what the configuration of vLLM says of a :class:`PagefoldTier`, checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from pagefold.config.size import size_of
from pagefold.errors import ConfigError
from pagefold.integrations.vllm.replica_folder import replica_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["TierOptions"]

_EXAMPLE = '{"type": "PagefoldTier", "disk_path": "/var/cache/kv", "limit_bytes": "200GiB"}'
_MOST_THREADS = 64


@dataclass(frozen=True)
class TierOptions:
    """The options of a tier.

    Attributes:
        disk_path: the folder of a tier on a disk; empty for another.
        limit_bytes: all that the folder may take, bytes or a size such as "200GiB".
        remote_url: where a tier on another machine is; empty for another.
        weights: what vLLM does not tell of the model, such as its revision, quantization and overrides: chunks of
            others are not found. The files of a local folder are known without it.
        num_threads: how many threads move chunks.
        enable_kv_events: whether vLLM's events tell what was stored.
    """

    disk_path: str = ""
    limit_bytes: int = 0
    remote_url: str = ""
    weights: str = ""
    num_threads: int = 4
    enable_kv_events: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> TierOptions:
        """Read what vLLM hands over: the tier's configuration without what vLLM itself reads of it.

        Raises:
            ConfigError: an option is unknown or cannot work, or the options together cannot.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            msg = f"PagefoldTier has no option {', '.join(unknown)}."
            raise ConfigError(msg, remedy=f"There are {', '.join(sorted(known))}.")
        options = cls(
            disk_path=_text("disk_path", given.get("disk_path", "")),
            limit_bytes=_bytes(given.get("limit_bytes", 0)),
            remote_url=_text("remote_url", given.get("remote_url", "")),
            weights=_text("weights", given.get("weights", "")),
            num_threads=_threads(given.get("num_threads", 4)),
            enable_kv_events=bool(given.get("enable_kv_events", False)),
        )
        if bool(options.disk_path) == bool(options.remote_url):
            msg = "A PagefoldTier keeps its chunks in one place: on a disk, or on another machine."
            raise ConfigError(msg, remedy=f"Give disk_path or remote_url, as in {_EXAMPLE}.")
        if options.disk_path and not options.limit_bytes:
            msg = "A PagefoldTier on a disk needs limit_bytes."
            raise ConfigError(msg, remedy=f"Say how large the folder may become, as in {_EXAMPLE}.")
        if options.remote_url and options.limit_bytes:
            msg = "limit_bytes is of a folder; how much a remote store may keep is set there."
            raise ConfigError(msg, remedy="Leave limit_bytes out, and give Redis maxmemory, or Mooncake segments.")
        return options

    def folder_of(self, replica: int, num_replicas: int) -> Path:
        """Return the folder of a data parallel replica of the engine: one process at a time uses a folder."""
        return replica_folder(self.disk_path, replica, num_replicas)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _bad(name, value, "text")
    return value


def _bytes(value: object) -> int:
    if isinstance(value, str):
        return size_of(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _bad("limit_bytes", value, 'bytes, or a size such as "200GiB"')
    return value


def _threads(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_THREADS:
        raise _bad("num_threads", value, f"a number from 1 to {_MOST_THREADS}")
    return value


def _bad(name: str, value: object, wanted: str) -> ConfigError:
    msg = f"{name}={value!r} of PagefoldTier is not {wanted}."
    return ConfigError(msg, remedy=f"Write it as in {_EXAMPLE}.")
