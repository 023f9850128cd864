"""Which versions of vLLM are known, and what is said of others."""

from __future__ import annotations

import logging

from pagefold.errors import ConfigError

__all__ = ["KNOWN_VERSIONS", "check_version", "family_of", "refuse_unknown", "unmet"]

KNOWN_VERSIONS = ("0.32.0", "0.31.0")
"""What was tested. vLLM calls the interfaces that are used here experimental."""

_log = logging.getLogger(__name__)


def family_of(version: str) -> str:
    """Return the major and the minor number of a version: what decides how the bytes of a chunk are arranged."""
    return ".".join(_plain(version).split(".")[:2])


def check_version(version: str, what: str) -> None:
    """Warn if ``version`` was not tested; its interfaces may be met all the same.

    Args:
        version: of vLLM, as it says it.
        what: the class of ours that it loads.
    """
    if _plain(version) not in KNOWN_VERSIONS:
        _log.warning("vLLM %s is not known to %s: it was tested with %s", version, what, " and ".join(KNOWN_VERSIONS))


def refuse_unknown(version: str, what: str) -> None:
    """See that ``version`` is known: where a wrong step of the interfaces would spoil outputs, a warning is too little.

    Args:
        version: of vLLM, as it says it.
        what: the class of ours that it loads.

    Raises:
        ConfigError: it is not; names those that are known.
    """
    if _plain(version) not in KNOWN_VERSIONS:
        msg = f"{what} does not know vLLM {version}: the interfaces that it uses change with every version."
        raise ConfigError(msg, remedy=f"Install one of those that it was made for: {', '.join(KNOWN_VERSIONS)}.")


def unmet(version: str, what: str, missing: object) -> ConfigError:
    """Return the error of a vLLM whose interfaces are others.

    Args:
        version: of vLLM.
        what: the class of ours that it loads.
        missing: what is not there, or not ours.
    """
    msg = f"vLLM {version} cannot load {what}: its interfaces are not those that are known ({missing})."
    return ConfigError(msg, remedy=f"Use one of vLLM {', '.join(KNOWN_VERSIONS)}, or a newer Pagefold.")


def _plain(version: str) -> str:
    """Return a version without what a build adds to it."""
    return version.partition("+")[0]
