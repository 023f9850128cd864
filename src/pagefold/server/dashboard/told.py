"""What an overview has seen, as ``/v1/dashboard`` tells it: few numbers, and sentences where causes are named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold import __version__
from pagefold.observe.misses import Cause
from pagefold.observe.timeline import NUM_PIECES, PIECE_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagefold.observe.hot_prefixes import HotPrefix
    from pagefold.observe.overview import EndedRequest, Seen

__all__ = ["EVICTIONS", "told"]

EVICTIONS = {
    "policy": "the policy named it",
    "stale": "a window had left it behind",
    "cut": "its path was cut",
    "landmark": "only a landmark kept it",
    "firm_landmark": "only a firm landmark kept it",
    "idle": "it led nowhere",
    "packed": "it held packed tokens",
    "superseded": "its session has edited it away, or has ended",
    "session": "its session was expected back last",
    "reset": "the cache was reset",
    "corrupted": "it was not trusted",
}
"""Rule or cause of an eviction, to what it means."""

_ZEROS: list[float] = [0] * NUM_PIECES


def told(seen: Seen, model_name: str) -> dict[str, Any]:
    """Return what is told."""
    status, series = seen.status, seen.series
    lookups = series["lookups"]
    return {
        "object": "dashboard",
        "version": __version__,
        "model": model_name,
        "policy": seen.policy,
        "block_size": seen.block_size,
        "piece_s": PIECE_S,
        "num_pieces": NUM_PIECES,
        "is_whole": seen.is_whole,
        "engine": {
            "is_healthy": status.is_healthy,
            "running": status.num_running,
            "waiting_for_capacity": status.num_for_capacity,
            "waiting_for_tiers": status.num_deferred,
            "output_tokens_per_s": round(seen.output_tokens_per_s, 1),
            "prompt_tokens_per_s": round(seen.prompt_tokens_per_s, 1),
            "preemptions": _sum(series["preemptions"].get("all", ())),
        },
        "tiers": [_device(seen), *_host(seen), *_slow(seen)],
        "lookups": {name: lookups.get(name, _ZEROS) for name in ("device", "tiers", "computed")},
        "output_tokens": series["tokens"].get("output", _ZEROS),
        "misses": _misses(series["misses"]),
        "evictions": [
            {"rule": rule, "told": EVICTIONS[rule], "blocks": _sum(counts), "series": counts}
            for rule, counts in sorted(series["evictions"].items(), key=lambda item: -sum(item[1]))
        ],
        "requests": [_request(request, seen.now_s) for request in seen.requests],
        "prefixes": [_prefix(prefix, seen) for prefix in seen.prefixes],
    }


def _device(seen: Seen) -> dict[str, Any]:
    status, now = seen.status, seen.uses[-1]
    return {
        "name": "device",
        "num_blocks": status.num_blocks,
        "now": {
            "held": 0 if now is None else now.num_held,
            "pinned": 0 if now is None else now.num_pinned,
            "cached": 0 if now is None else now.num_cached,
            "free": status.num_free_blocks,
        },
        "series": {
            "held": [None if use is None else use.num_held for use in seen.uses],
            "pinned": [None if use is None else use.num_pinned for use in seen.uses],
            "cached": [None if use is None else use.num_cached for use in seen.uses],
        },
        "is_fast": None,
    }


def _host(seen: Seen) -> list[dict[str, Any]]:
    """Return the host's memory, if there is such a tier."""
    num_blocks, num_held = seen.status.num_host_blocks, seen.status.num_held_host_blocks
    if not num_blocks:
        return []
    return [
        {
            "name": "host",
            "num_blocks": num_blocks,
            "now": {
                "cached": num_held,
                "unsaved": seen.status.num_unsaved_blocks,
                "free": max(0, num_blocks - num_held),
            },
            "series": {"cached": [None if use is None else use.num_host for use in seen.uses]},
            "is_fast": None,
        }
    ]


def _slow(seen: Seen) -> list[dict[str, Any]]:
    """Return the slow tiers, by what came from them. What was written went to all of them that take it.

    Those that know it tell too what they have.
    """
    series, known = seen.series, seen.status.tier_uses
    return [
        {
            "name": tier,
            "num_blocks": known[tier].num_blocks if tier in known else None,
            "now": _room(tier, seen)
            | {
                "read": _sum(series["read"].get(tier, ())),
                "read_bytes": _sum(series["read_bytes"].get(tier, ())),
                "unread": _sum(series["unread"].get(tier, ())),
                "written": _sum(series["written"].get("kept", ())),
            },
            "series": _held(tier, seen)
            | {
                "read": series["read"].get(tier, _ZEROS),
                "written": series["written"].get("kept", _ZEROS),
            },
            "is_fast": is_fast,
        }
        for tier, is_fast in seen.status.tiers_fast.items()
    ]


def _room(tier: str, seen: Seen) -> dict[str, int]:
    """Return how many blocks a slow tier has, and has room for; nothing where it does not know."""
    use = seen.status.tier_uses.get(tier)
    return {} if use is None else {"cached": use.num_held, "free": max(0, use.num_blocks - use.num_held)}


def _held(tier: str, seen: Seen) -> dict[str, list[int | None]]:
    """Return how many blocks a slow tier had, over time; nothing where it does not know."""
    if tier not in seen.status.tier_uses:
        return {}
    return {"cached": [None if use is None else use.num_slow.get(tier) for use in seen.uses]}


def _misses(by_cause: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return how many tokens were computed for which cause, most first."""
    totals = sorted(((_sum(counts), cause) for cause, counts in by_cause.items()), reverse=True)
    return [
        {"cause": cause, "tokens": total, "told": Cause(cause).told, "remedy": Cause(cause).remedy or None}
        for total, cause in totals
        if total
    ]


def _request(request: EndedRequest, now_s: float) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "tenant": request.tenant,
        "ago_s": round(now_s - request.ended_s, 1),
        "queue_s": round(request.queue_s, 4),
        "fetch_s": round(request.fetch_s, 4),
        "prefill_s": round(request.prefill_s, 4),
        "decode_s": round(request.decode_s, 4),
        "prompt_tokens": request.num_prompt_tokens,
        "device_tokens": request.num_device_tokens,
        "tier_tokens": request.num_tier_tokens,
        "output_tokens": request.num_output_tokens,
        "cause": None if request.worst is None else request.worst.value,
        "cause_tokens": request.num_worst_tokens,
        "finish_reason": request.finish_reason,
    }


def _prefix(prefix: HotPrefix, seen: Seen) -> dict[str, Any]:
    return {
        "name": prefix.name,
        "tenant": prefix.tenant,
        "blocks": prefix.num_blocks,
        "tokens": prefix.num_blocks * seen.block_size,
        "finds": prefix.num_finds,
        "ago_s": round(seen.now_s - prefix.last_s, 1),
        "is_cached": prefix.is_cached,
    }


def _sum(counts: Sequence[float]) -> int:
    return int(sum(counts))
