"""``/v1/cache/whatif``: what the cache would find if it had another size, or another policy."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import APIRouter, Request

from pagefold.observe.whatif import TIMES, asked_of, ghost_ratios, lru_curve_of, other_policies
from pagefold.server.answer_schemas import WhatIf
from pagefold.server.checked_route import CheckedRoute
from pagefold.server.errors import NoCurveError
from pagefold.server.explain import reader_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pagefold.config import ServerConfig
    from pagefold.curves.hit_curve import HitCurve
    from pagefold.observe.block_uses import Sizes, Told
    from pagefold.observe.ledger import Ledger
    from pagefold.server.explanations import Reader

__all__ = ["whatif_routes"]

_LRU = "lru"
_TIMES = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
"""Sizes of a curve's points, in caches of today."""

_MOST_SHARE = 0.05
"""Of a core's time that answers of all traffic may take, however often somebody asks."""


class _Known(NamedTuple):
    """What was answered of all traffic.

    Attributes:
        answer: all of it, of one moment: a policy beside another's curve of another moment would say nothing.
        at_s, spent_s: when that was, and how long it took.
    """

    answer: dict[str, Any]
    at_s: float
    spent_s: float


class _WhatIf:
    """Answers from what was used lately.

    Args:
        ledger: keeps which blocks were used.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._uses = ledger.uses
        self._known: _Known | None = None

    def answer(self, reader: Reader) -> dict[str, Any]:
        """Return what a reader may know: all, or what is of his own tenant.

        What is told of all is told again where finding it out anew would take too much of a core. Of all is asked once
        at a time.

        Raises:
            NoCurveError: there is nothing yet, or never will be.
        """
        self._check()
        if not reader.sees_traffic:
            return self._answer(reader)
        known = self._known
        if known is None or time.monotonic() - known.at_s > known.spent_s / _MOST_SHARE:
            begin = time.monotonic()
            answer = self._answer(reader)
            now = time.monotonic()
            self._known = known = _Known(answer, now, now - begin)
        return known.answer

    def _check(self) -> None:
        """Check that a curve is kept."""
        if not self._ledger.is_on:
            msg = "No curve is kept: this server remembers nothing of requests."
            raise NoCurveError(msg, remedy="Start it without --no-enable-explain.")
        if not self._uses.sizes.publishes or not self._uses.sizes.num_blocks:
            msg = "No curve is kept: prefix caching is off, or there is no cache yet."
            raise NoCurveError(msg, remedy="Ask again when the server is ready, without --no-enable-prefix-caching.")
        if self._uses.has_failed or self._ledger.has_failed:
            msg = "No curve is kept any more: what keeps it has failed, as the server's log says."
            raise NoCurveError(msg, remedy="Restart the server to have one again, and tell us of the error.")

    def _answer(self, reader: Reader) -> dict[str, Any]:
        told = self._uses.told(None if reader.sees_traffic else reader.tenant)
        asked = asked_of(told.uses)
        if not asked.num_blocks:
            msg = "No prompt of a whole block has been looked up yet."
            raise NoCurveError(msg, remedy="Ask again when some have.")
        sizes, curve = told.sizes, lru_curve_of(told.uses, told.sizes.block_size)
        policies: list[dict[str, Any]] = []
        tenants: list[dict[str, Any]] = []
        if reader.sees_traffic:
            policies = list(self._policies(told, curve))
            tenants = [self._tenant(tenant) for tenant in self._uses.tenants()]
            sentence = _told_of_all(told, curve, policies)
        else:
            tenants = [{"tenant": reader.tenant, "points": _points(curve, sizes)}]
            sentence = _told_of_one(told, curve)
        return {
            "object": "cache.whatif",
            "block_size": sizes.block_size,
            "num_blocks": sizes.num_blocks,
            "blocks_per_place": sizes.blocks_per_place,
            "num_accesses": asked.num_blocks,
            "num_tokens": asked.num_tokens,
            "sampled_share": told.uses.rate,
            "since_s": round(max(0.0, told.now_s - told.uses.counted[0].at_s), 3),
            "policies": policies,
            "tiers": _tiers(curve, sizes) if reader.sees_traffic else [],
            "tenants": tenants,
            "told": sentence,
        }

    @staticmethod
    def _policies(told: Told, curve: HitCurve) -> Iterator[dict[str, Any]]:
        """Yield what each policy would find, LRU first."""
        sizes = told.sizes
        yield {"policy": _LRU, "is_used": sizes.policy == _LRU, "points": _points(curve, sizes)}
        found = ghost_ratios(told.uses, curve, other_policies(_LRU), sizes.num_blocks)
        for policy, ratios in found.items():
            points = [
                _point(max(1, round(times * sizes.num_blocks)), ratio, sizes)
                for times, ratio in zip(TIMES, ratios, strict=True)
            ]
            yield {"policy": policy, "is_used": sizes.policy == policy, "points": points}

    def _tenant(self, tenant: str) -> dict[str, Any]:
        """Return the curve of a tenant's own requests."""
        told = self._uses.told(tenant)
        return {"tenant": tenant, "points": _points(lru_curve_of(told.uses, told.sizes.block_size), told.sizes)}


def whatif_routes(ledger: Ledger, config: ServerConfig) -> APIRouter:
    """Return the route."""
    router = APIRouter(route_class=CheckedRoute)
    whatif = _WhatIf(ledger)
    asked: dict[str | None, asyncio.Future[dict[str, Any]]] = {}  # by tenant, or None for all: what is being found out

    @router.get("/v1/cache/whatif", responses={200: {"model": WhatIf}})
    async def what_if(request: Request) -> dict[str, Any]:
        """Tell what the cache would find with another size or policy; a tenant, of his own requests alone."""
        reader = reader_of(request, config)
        whose = None if reader.sees_traffic else reader.tenant
        if whose not in asked:
            asked[whose] = _aside(partial(whatif.answer, reader))
            asked[whose].add_done_callback(lambda _: asked.pop(whose))
        return await asyncio.shield(asked[whose])  # others may wait for the same

    return router


def _aside(work: Callable[[], dict[str, Any]]) -> asyncio.Future[dict[str, Any]]:
    """Do work on a thread of its own, for which neither other work nor the server's end waits."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[dict[str, Any]] = loop.create_future()

    def run() -> None:
        try:
            settle = partial(future.set_result, work())
        except Exception as error:  # noqa: BLE001 - raised again by whoever waits
            settle = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=run, name="whatif", daemon=True).start()
    return future


def _points(curve: HitCurve, sizes: Sizes) -> list[dict[str, Any]]:
    counts = sorted({max(1, round(times * sizes.num_blocks)) for times in _TIMES})
    return [_point(count, curve.at(count * sizes.block_size), sizes) for count in counts]


def _point(num_blocks: int, ratio: float, sizes: Sizes) -> dict[str, Any]:
    return {"num_blocks": num_blocks, "bytes": num_blocks * sizes.bytes_per_block, "hit_ratio": round(ratio, 4)}


def _tiers(curve: HitCurve, sizes: Sizes) -> list[dict[str, Any]]:
    """Return what would be found as far as each tier, the device first: at least, and at most.

    The host's memory holds what was evicted from the device, and keeps it when it comes back; a disk holds what the
    host's memory has written. So tiers may have the same blocks: as many different ones as the largest has are there at
    least, and as many as all have together at most.
    """
    tiers: list[dict[str, Any]] = []
    num_blocks = num_largest = 0
    counts = {"device": sizes.num_blocks, "host": sizes.num_host_blocks, "disk": sizes.num_disk_blocks}
    for tier, count in counts.items():
        num_blocks += count
        num_largest = max(num_largest, count)
        if count:
            least, most = (round(curve.at(num * sizes.block_size), 4) for num in (num_largest, num_blocks))
            tiers.append({"tier": tier, "num_blocks": count, "hit_ratio_at_least": least, "hit_ratio_up_to_it": most})
    return tiers


def _told_of_all(told: Told, curve: HitCurve, policies: list[dict[str, Any]]) -> str:
    """Return in plain words what doubling would give, and the best policy."""
    size = told.sizes.num_blocks
    used = next((one for one in policies if one["is_used"]), policies[0])
    now, twice = _at(used, size), _at(used, 2 * size)
    words = (
        f"{used['policy']} finds {now:.1%} of all prompt tokens with {size:,} blocks, and would find {twice:.1%} with "
        f"twice as many; LRU would find {curve.infinite:.1%} with any number."
    )
    best = max(policies, key=lambda one: _at(one, size))
    if best is not used and _at(best, size) > now:
        words += f" {best['policy']} would find {_at(best, size):.1%} with what there is."
    return words


def _told_of_one(told: Told, curve: HitCurve) -> str:
    size, block_size = told.sizes.num_blocks, told.sizes.block_size
    now, twice = curve.at(size * block_size), curve.at(2 * size * block_size)
    return (
        f"Of your prompt tokens LRU would find {now:.1%} with all {size:,} blocks for you alone, {twice:.1%} "
        f"with twice as many, and {curve.infinite:.1%} with any number."
    )


def _at(policy: dict[str, Any], num_blocks: int) -> float:
    return next((float(point["hit_ratio"]) for point in policy["points"] if point["num_blocks"] == num_blocks), 0.0)
