"""``/v1/cache/whatif``: what the cache would find if it had another size, or another policy."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import APIRouter, Request

from pagefold.observe.whatif import TIMES, asked_of, ghost_ratios, lru_curve_of, other_policies
from pagefold.server.answer_schemas import WhatIf
from pagefold.server.checked_route import CheckedRoute
from pagefold.server.errors import NoCurveError
from pagefold.server.explain import reader_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.config import ServerConfig
    from pagefold.curves.hit_curve import HitCurve
    from pagefold.observe.block_uses import BlockUses, Sizes, Told
    from pagefold.server.explanations import Reader

__all__ = ["whatif_routes"]

_LRU = "lru"
_TIMES = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
"""Sizes of a curve's points, in caches of today."""

_MOST_SHARE = 0.05
"""Of a core's time that ghosts may take, however often somebody asks."""


class _Ghosts(NamedTuple):
    """What ghosts have found.

    Attributes:
        ratios: of each policy at each of the sizes of ghosts.
        at_s, spent_s: when that was, and how long it took.
    """

    ratios: dict[str, list[float]]
    at_s: float
    spent_s: float


class _WhatIf:
    """Answers from what was used lately.

    Args:
        uses: of blocks.
    """

    def __init__(self, uses: BlockUses) -> None:
        self._uses = uses
        self._ghosts: _Ghosts | None = None
        self._lock = threading.Lock()

    def answer(self, reader: Reader) -> dict[str, Any]:
        """Return what a reader may know: all, or what is of his own tenant.

        Raises:
            NoCurveError: there is nothing yet, or never will be.
        """
        if not self._uses.sizes.publishes:
            msg = "No curve is kept: prefix caching is off, or there is no cache yet."
            raise NoCurveError(msg, remedy="Ask again when the server is ready, without --no-enable-prefix-caching.")
        if self._uses.has_failed:
            msg = "No curve is kept any more: what keeps it has failed, as the server's log says."
            raise NoCurveError(msg, remedy="Restart the server to have one again, and tell us of the error.")
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
            "num_accesses": asked.num_blocks,
            "num_tokens": asked.num_tokens,
            "sampled_share": told.uses.rate,
            "since_s": round(max(0.0, told.now_s - told.uses.counted[0].at_s), 3),
            "policies": policies,
            "tiers": _tiers(curve, sizes) if reader.sees_traffic else [],
            "tenants": tenants,
            "told": sentence,
        }

    def _policies(self, told: Told, curve: HitCurve) -> Iterator[dict[str, Any]]:
        """Yield what each policy would find, LRU first."""
        sizes = told.sizes
        yield {"policy": _LRU, "is_used": sizes.policy == _LRU, "points": _points(curve, sizes)}
        for policy, ratios in self._played(told, curve).items():
            points = [
                _point(max(1, round(times * sizes.num_blocks)), ratio, sizes)
                for times, ratio in zip(TIMES, ratios, strict=True)
            ]
            yield {"policy": policy, "is_used": sizes.policy == policy, "points": points}

    def _played(self, told: Told, curve: HitCurve) -> dict[str, list[float]]:
        """Return what ghosts have found; not anew where that would take too much of a core."""
        with self._lock:
            ghosts = self._ghosts
            if ghosts is None or time.monotonic() - ghosts.at_s > ghosts.spent_s / _MOST_SHARE:
                begin = time.monotonic()
                ratios = ghost_ratios(told.uses, curve, other_policies(_LRU), told.sizes.num_blocks)
                now = time.monotonic()
                self._ghosts = ghosts = _Ghosts(ratios, now, now - begin)
            return ghosts.ratios

    def _tenant(self, tenant: str) -> dict[str, Any]:
        """Return the curve of a tenant's own requests."""
        told = self._uses.told(tenant)
        return {"tenant": tenant, "points": _points(lru_curve_of(told.uses, told.sizes.block_size), told.sizes)}


def whatif_routes(uses: BlockUses, config: ServerConfig) -> APIRouter:
    """Return the route."""
    router = APIRouter(route_class=CheckedRoute)
    whatif = _WhatIf(uses)

    @router.get("/v1/cache/whatif", responses={200: {"model": WhatIf}})
    async def what_if(request: Request) -> dict[str, Any]:
        """Tell what the cache would find with another size or policy; a tenant, of his own requests alone."""
        return await asyncio.to_thread(whatif.answer, reader_of(request, config))

    return router


def _points(curve: HitCurve, sizes: Sizes) -> list[dict[str, Any]]:
    counts = sorted({max(1, round(times * sizes.num_blocks)) for times in _TIMES})
    return [_point(count, curve.at(count * sizes.block_size), sizes) for count in counts]


def _point(num_blocks: int, ratio: float, sizes: Sizes) -> dict[str, Any]:
    return {"num_blocks": num_blocks, "bytes": num_blocks * sizes.bytes_per_block, "hit_ratio": round(ratio, 4)}


def _tiers(curve: HitCurve, sizes: Sizes) -> list[dict[str, Any]]:
    """Return what would be found as far as each tier, the device first."""
    tiers: list[dict[str, Any]] = []
    num_blocks = 0
    counts = {"device": sizes.num_blocks, "host": sizes.num_host_blocks, "disk": sizes.num_disk_blocks}
    for tier, count in counts.items():
        num_blocks += count
        if count:
            ratio = round(curve.at(num_blocks * sizes.block_size), 4)
            tiers.append({"tier": tier, "num_blocks": count, "hit_ratio_up_to_it": ratio})
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
