"""The log says which eviction policy is followed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pagefold.events import CacheReset, EvictionPolicySwitched
from pagefold.observe.switch_log import log_switches

if TYPE_CHECKING:
    import pytest


def test_a_change_is_one_line_and_the_start_is_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pagefold"):
        log_switches(EvictionPolicySwitched("learned", "", 0.0, 0.0))
        log_switches(EvictionPolicySwitched("lru", "learned", 0.5, 0.25))
        log_switches(CacheReset())
    (record,) = caplog.records
    assert record.getMessage() == (
        "eviction policy: lru from now on; of the blocks used lately it would have found 50.0 %, learned 25.0 %"
    )
