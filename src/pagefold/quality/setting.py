"""Settings: what is evaluated. A codec is one; so is whatever else an engine can be started with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagefold.config import EngineConfig, TransportCodec

__all__ = ["EXACT", "Setting"]

_FIXED = ("model", "max_model_len", "kv_cache_memory_bytes", "seed")
"""What the harness itself decides, or what would make it another question."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Fields of the engine's config that differ from the exact one's, under a name.

    Attributes:
        name: for tables.
        overrides: fields of :class:`~pagefold.config.engine_config.EngineConfig` and their values.
        transport: how blocks are packed on their way to a pool: all but a step's own are as they come back from it.

    Raises:
        ConfigError: there is no such field, or it is not one to be compared.
    """

    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    transport: TransportCodec = "none"

    def __post_init__(self) -> None:
        from pagefold.config import EngineConfig  # noqa: PLC0415 - kept lazy: a setting is only a name until then

        for name in self.overrides:
            if name in _FIXED or name not in EngineConfig.__dataclass_fields__:
                msg = f"{name} cannot be evaluated."
                raise ConfigError(msg, remedy="Name a field of EngineConfig that the harness does not set itself.")

    def apply(self, config: EngineConfig) -> EngineConfig:
        """Return ``config`` with this setting's fields.

        Raises:
            ConfigError: a value that the engine does not take.
        """
        return replace(config, **self.overrides)


EXACT = Setting("auto")
"""What others are compared with: KV in the model's dtype, every token kept."""
