"""Committing what a step that ran has written, also while the next step is in flight and reads the same caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import ChunksPacked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.events import Emit
    from pagefold.kv import KVCore, Promise
    from pagefold.request import Request
    from pagefold.scheduler.step_in_flight import StepInFlight
    from pagefold.steps import StepResult

__all__ = ["commit", "commit_packed", "join", "publish", "publish_late"]


def commit(core: KVCore, promises: list[Promise], behind: StepInFlight | None, *, joins: bool = True) -> list[Promise]:
    """Commit the promises of a step that ran. Return those whose caches are to join others' blocks yet.

    Args:
        core: the KV core.
        promises: of the step.
        behind: the next step, if it is in flight: the caches that it reads keep their blocks until it ends.
        joins: whether they join at once. Not where some of what the step wrote is corrupted: nobody may join that, so
            it is dropped before :func:`join`.
    """
    for promise in promises:  # all of them first: some caches join blocks that are promised later in the step
        core.publishing.commit(promise, joins=False)
    late = [promise for promise in promises if promise.is_behind]
    if not joins:
        return late
    join(core, late, behind)
    return []


def join(core: KVCore, late: list[Promise], behind: StepInFlight | None) -> None:
    """Let caches join the blocks of others that had published the same tokens first.

    Args:
        core: the KV core.
        late: their promises, which are committed.
        behind: that of :func:`commit`.
    """
    reads = behind.caches() if late and behind is not None else ()
    for promise in late:
        if behind is not None and promise.cache in reads:
            behind.joins.append(promise)
        else:
            core.publishing.join(promise)


def publish_late(core: KVCore, step: StepInFlight, behind: StepInFlight | None, *, joins: bool = True) -> list[Promise]:
    """Publish what could not be promised when ``step`` was planned: now all tokens up to its own are known.

    Arguments and what is returned are those of :func:`commit`.
    """
    late = step.joins
    if joins:
        for joining in late:
            core.publishing.join(joining)
        late = []
    return late + publish(core, [(one, one.num_computed_tokens) for one in step.filling], behind, joins=joins)


def publish(
    core: KVCore, ends: Iterable[tuple[Request, int]], behind: StepInFlight | None, *, joins: bool = True
) -> list[Promise]:
    """Publish what requests have computed up to some positions; all of it has been written.

    Args:
        core: the KV core.
        ends: the requests, each with its position.
        behind: that of :func:`commit`, as what is returned.
        joins: likewise.
    """
    promises: list[Promise] = []
    for request, end in ends:
        cache = request.cache
        if cache is None or cache.tail is None or end > request.num_tokens:  # who was cut off has lost a token
            continue
        promise = core.publishing.promise(cache, request.packed(), end)
        if promise is not None:
            promises.append(promise)
    return commit(core, promises, behind, joins=joins)


def commit_packed(
    core: KVCore, step: StepInFlight, result: StepResult, behind: StepInFlight | None, emit: Emit
) -> None:
    """Let sequences have the chunks that a step packed, and publish them; its promises are committed.

    Args:
        core: the KV core.
        step: that ran.
        result: of it.
        behind: that of :func:`commit`.
        emit: where events go.
    """
    packed = dict(zip(step.plan.packing_rows, result.packed, strict=True))
    corrupted = set(result.corrupted)
    reads = set() if behind is None else behind.caches()
    for row, request in enumerate(step.requests):
        cache = request.cache
        if cache is None or cache in reads:
            continue
        if row in corrupted:  # what was kept of no numbers is no function of the prefix
            core.packing.give_back(cache)
        else:
            core.packing.commit(cache, packed.get(row, ()))
    if packed:
        chunks = [chunk for of_row in result.packed for chunk in of_row]
        num_granted = sum(map(len, step.plan.granted))
        emit(ChunksPacked(len(chunks), num_granted, sum(chunk.num_blocks for chunk in chunks)))
