"""Which versions of vLLM the connector was tried with: its interface is experimental, and changes."""

from __future__ import annotations

from pagefold.errors import ConfigError

__all__ = ["KNOWN_VERSIONS", "check_version"]

KNOWN_VERSIONS = ("0.32.0", "0.31.0")


def check_version(version: str) -> None:
    """See that vLLM is of a known version.

    Raises:
        ConfigError: it is not; names those that are known.
    """
    plain = version.partition("+")[0]
    if plain not in KNOWN_VERSIONS:
        msg = f"PagefoldConnector does not know vLLM {version}: its connector interface changes with every version."
        raise ConfigError(msg, remedy=f"Install one of those that it was tried with: {', '.join(KNOWN_VERSIONS)}.")
