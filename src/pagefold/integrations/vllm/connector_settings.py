"""ConnectorSettings: what ``kv_connector_extra_config`` of vLLM says to :class:`PagefoldConnector`."""

from __future__ import annotations

import contextlib
import difflib
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from pagefold.config.size import size_of
from pagefold.errors import ConfigError
from pagefold.integrations.vllm.replica_folder import replica_folder
from pagefold.kv.policies import DEFAULT_POLICY, POLICIES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import ParallelConfig

__all__ = ["ConnectorSettings"]


@dataclass(frozen=True)
class ConnectorSettings:
    """What a user says of the connector, checked.

    Attributes:
        host_bytes: memory of the host for blocks, of all workers together.
        disk_path: a folder for blocks, behind the host's memory; None for none.
        disk_bytes: all that the folder may take.
        remote_url: a Redis, Valkey or Mooncake store behind those; None for none.
        eviction_policy: which of the blocks in the host's memory go first.
        verifies_restored: whether what was restored is read back from vLLM's own blocks, and compared byte by byte with
            what was to be restored: for tests and measurements.
    """

    host_bytes: int
    disk_path: str | None = None
    disk_bytes: int = 0
    remote_url: str | None = None
    eviction_policy: str = DEFAULT_POLICY
    verifies_restored: bool = False

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> ConnectorSettings:
        """Read the settings.

        Args:
            given: as in ``kv_connector_extra_config``; sizes are bytes, or text such as "4GiB".

        Raises:
            ConfigError: one is unknown, missing or cannot work; names it and what there is.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                meant = f" Did you mean {near[0]}?" if near else ""
                msg = f"kv_connector_extra_config has an unknown field {name!r}.{meant}"
                raise ConfigError(msg, remedy=f"There are: {', '.join(known)}.")
        if "host_bytes" not in given:
            msg = "kv_connector_extra_config lacks host_bytes."
            raise ConfigError(
                msg, remedy='Say how much memory of the host blocks may take, as in "host_bytes": "4GiB".'
            )
        settings = cls(
            host_bytes=_size("host_bytes", given["host_bytes"]),
            disk_path=_text("disk_path", given.get("disk_path")),
            disk_bytes=_size("disk_bytes", given.get("disk_bytes", 0)),
            remote_url=_text("remote_url", given.get("remote_url")),
            eviction_policy=_text("eviction_policy", given.get("eviction_policy")) or DEFAULT_POLICY,
            verifies_restored=_switch("verifies_restored", given.get("verifies_restored", False)),
        )
        if not settings.host_bytes:
            raise _bad("host_bytes", 0, "more than 0: blocks come and go through the host's memory")
        if settings.eviction_policy not in POLICIES:
            raise _bad("eviction_policy", repr(settings.eviction_policy), f"one of {', '.join(POLICIES)}")
        if settings.disk_path is not None and not settings.disk_bytes:
            raise _bad("disk_bytes", 0, 'said with disk_path: what the folder may take at most, as in "64GiB"')
        if settings.disk_path is None and settings.disk_bytes:
            raise _bad("disk_path", "not said", "a folder, since disk_bytes is given")
        return settings

    @property
    def has_slow_tiers(self) -> bool:
        """Whether there is anything behind the host's memory."""
        return self.disk_path is not None or self.remote_url is not None

    def of_replica(self, parallel: ParallelConfig) -> ConnectorSettings:
        """Return the settings of one data parallel replica, whose folder is its own."""
        if self.disk_path is None:
            return self
        folder = replica_folder(self.disk_path, parallel.data_parallel_index, parallel.data_parallel_size)
        return replace(self, disk_path=str(folder))


def _bad(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"kv_connector_extra_config: {name} is {value}.", remedy=f"It must be {allowed}.")


def _size(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        with contextlib.suppress(ConfigError):
            return size_of(value)
    raise _bad(name, repr(value), 'bytes, or a size such as "512MiB" or "4GiB"')


def _text(name: str, value: object) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise _bad(name, repr(value), "text")


def _switch(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise _bad(name, repr(value), "true or false")
