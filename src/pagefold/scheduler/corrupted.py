"""Corrupted requests: of which the model computes what is no number. They end, and what they had is never used again.

So does one that has sampled nothing yet: a token that is no number inside the model spreads, in attention, to tokens of
its chunk before it, which do not see it, and so into blocks that others might begin with. Other samples of its prompt
go on, and what they have is dropped too: they have copies of what it began with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import Emit, RequestCorrupted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.kv import KVCore
    from pagefold.request import Request

__all__ = ["end_corrupted"]

_WHY = (
    "What the model computes for this request is NaN or infinite: weights, or cached blocks, are damaged. What it had "
    "and began with is dropped from the cache"
)


def end_corrupted(
    core: KVCore, requests: Iterable[Request], running: Iterable[Request], emit: Emit
) -> tuple[list[Request], set[bytes]]:
    """End requests that run, with those that were to fork from them or hold beams beside them, and drop what they had.

    Args:
        core: the KV core.
        requests: of whom the model computed no numbers.
        running: they, and all others that have blocks.
        emit: where events go.

    Returns those that end by it, and the digests of the paths that were dropped, for slower tiers to forget.
    """
    ended: list[Request] = []
    digests: set[bytes] = set()
    for request in requests:
        if request.finish_reason == "error" and request not in ended:  # by the step before: this row is one too many
            continue
        assert request.cache is not None
        for one in running:
            if one.parent_id == request.parent_id and one.cache is not None:
                digests |= core.forgetting.distrust(one.cache, one.namespace, one.packed())
        if request.is_aborted:
            continue
        together = [request] if request.beams is None else request.beams.beams
        ended += together
        for sample in (*together, *request.forks):
            emit(RequestCorrupted(sample.request_id))
            sample.is_aborted, sample.finish_reason, sample.error = True, "error", _WHY
    return ended, digests
