"""The log says so when ``auto`` follows another eviction policy."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pagefold.events import EvictionPolicySwitched

if TYPE_CHECKING:
    from pagefold.events import Event

__all__ = ["log_switches"]

_log = logging.getLogger(__name__)


def log_switches(event: Event) -> None:
    """Subscribe to events, and log those that say that another policy is followed."""
    if isinstance(event, EvictionPolicySwitched) and event.before:
        _log.info(
            "eviction policy: %s from now on; of the blocks used lately it would have found %.1f %%, %s %.1f %%",
            event.policy,
            100 * event.found_share,
            event.before,
            100 * event.found_share_before,
        )
