"""Which versions of vLLM the connector works in: its interface changes, and a wrong step would spoil outputs."""

from __future__ import annotations

from pagefold.errors import ConfigError
from pagefold.integrations.vllm.versions import KNOWN_VERSIONS

__all__ = ["refuse_unknown"]


def refuse_unknown(version: str) -> None:
    """See that vLLM is of a known version.

    Raises:
        ConfigError: it is not; names those that are known.
    """
    plain = version.partition("+")[0]
    if plain not in KNOWN_VERSIONS:
        msg = f"PagefoldConnector does not know vLLM {version}: its connector interface changes with every version."
        raise ConfigError(msg, remedy=f"Install one of those that it was tried with: {', '.join(KNOWN_VERSIONS)}.")
