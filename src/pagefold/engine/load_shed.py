"""LoadShed: a refusal by the guardrails, as clients are told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.errors import LoadShedError

if TYPE_CHECKING:
    from pagefold.scheduler import Refusal

__all__ = ["load_shed"]


def load_shed(refusal: Refusal | None) -> LoadShedError | None:
    """Return the error that tells of a refusal; None where there is none."""
    if refusal is None:
        return None
    what = f"at most {refusal.threshold_s:.3g} s are taken (--target-ttft-ms is {1e3 * refusal.target_s:g})"
    if refusal.goes_on:
        what = f"{what}: others were refused, and the queue has not become clearly shorter yet"
    msg = f"The server is overloaded: the first token is expected after {refusal.expected_s:.3g} s, and {what}."
    return LoadShedError(
        msg,
        reason="ttft_target",
        expected_s=refusal.expected_s,
        threshold_s=refusal.threshold_s,
        target_s=refusal.target_s,
        retry_after_s=refusal.retry_after_s,
        remedy=f"Try again in {refusal.retry_after_s} s.",
    )
