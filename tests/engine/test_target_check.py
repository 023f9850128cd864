"""Targets that a machine cannot keep are said, with what it can."""

from __future__ import annotations

from pagefold.engine.target_check import broken_targets
from pagefold.scheduler import Targets


def test_what_can_be_kept_is_not_told() -> None:
    assert not broken_targets(Targets(), 10.0)
    assert not broken_targets(Targets(ttft_s=0.1, itl_s=0.02), 0.01)


def test_each_target_that_cannot_be_kept_is_told_with_what_can() -> None:
    (of_itl,) = broken_targets(Targets(ttft_s=0.1, itl_s=0.005), 0.01)
    assert of_itl.startswith("--target-itl-ms is 5, which cannot be kept here")
    assert "takes 10 ms. 12 may be." in of_itl
    both = broken_targets(Targets(ttft_s=0.001, itl_s=0.005), 0.01)
    assert [told.split()[0] for told in both] == ["--target-ttft-ms", "--target-itl-ms"]
