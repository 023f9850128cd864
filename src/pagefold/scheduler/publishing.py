"""Publishing what a step that ran has written, also while the next step is in flight and reads the same tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefold.kv import KVCore, Promise
    from pagefold.scheduler.step_in_flight import StepInFlight

__all__ = ["commit", "publish_late"]


def commit(core: KVCore, promises: list[Promise], behind: StepInFlight | None) -> None:
    """Commit the promises of a step that ran.

    Args:
        core: the KV core.
        promises: of the step.
        behind: the next step, if it is in flight: the tables that it reads keep their blocks until it ends.
    """
    if behind is None:
        for promise in promises:
            core.commit(promise)
        return
    reads = behind.tables() if promises else ()
    for promise in promises:
        is_read = promise.table in reads
        core.commit(promise, is_read=is_read)
        if is_read and promise.is_behind:
            behind.joins.append(promise)


def publish_late(core: KVCore, step: StepInFlight, behind: StepInFlight | None) -> None:
    """Publish what could not be promised when ``step`` was planned: now all tokens up to its own are known.

    Arguments are those of :func:`commit`.
    """
    for joining in step.joins:
        core.join(joining)
    promises: list[Promise] = []
    for request in step.filling:
        table, end = request.table, request.num_computed_tokens
        if table is None or table.tail is None or end > request.num_tokens:  # who was cut off has lost a token
            continue
        promise = core.promise(table, request.packed(), end)
        if promise is not None:
            promises.append(promise)
    commit(core, promises, behind)
