"""Times: what happened to requests when, noted as it happens and told as events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.events import FirstToken, NextTokens, OutputFinished, length_class

if TYPE_CHECKING:
    from pagefold.events import Emit
    from pagefold.request import FinishReason, Request

__all__ = ["tell_end", "tell_tokens"]


def tell_tokens(emit: Emit, requests: list[Request], now: float, block_size: int) -> None:
    """Note that each of ``requests`` has just got a token, and tell it: one event for all that were not first ones.

    The samples of one prompt have one first token.
    """
    waits: dict[tuple[int, float], int] = {}  # by class of length, and gap: few, though there may be many requests
    for request in requests:
        times = request.times
        last_s = times.last_token_s
        times.last_token_s = now
        if last_s is None:
            times.first_token_s = now
            if request.sample_index:
                continue  # of a prompt that has been told
            num_cached = request.num_cached_tokens
            emit(
                FirstToken(
                    request.request_id,
                    now - times.arrival_s,
                    request.num_prompt_tokens,
                    num_cached,
                    num_cached % block_size,
                    sum(request.num_loaded_tokens.values()),
                    is_warm_up=request.warm_up is not None,
                    num_ahead=times.num_ahead,
                )
            )
        else:
            wait = length_class(request.num_tokens), now - last_s
            waits[wait] = waits.get(wait, 0) + 1
    if waits:
        gaps: dict[float, int] = {}
        by_length: dict[int, dict[float, int]] = {}
        for (length, gap_s), num in waits.items():
            gaps[gap_s] = gaps.get(gap_s, 0) + num
            by_length.setdefault(length, {})[gap_s] = num
        emit(NextTokens(gaps, by_length))


def tell_end(emit: Emit, request: Request, reason: FinishReason, now: float) -> None:
    """Tell that ``request`` has ended, and its caller is told ``reason``."""
    times = request.times
    e2e_s = now - times.arrival_s
    emit(
        OutputFinished(
            request.request_id,
            reason,
            request.num_prompt_tokens,
            max(0, request.num_cached_tokens),
            request.num_output_tokens,
            e2e_s=e2e_s,
            queue_s=e2e_s if times.queue_s is None else times.queue_s,
            prefill_s=times.prefill_s,
            decode_s=times.decode_s,
            is_warm_up=request.warm_up is not None,
            num_allowed_tokens=request.stop.max_total_tokens - request.num_prompt_tokens,
            num_preemptions=request.num_preemptions,
        )
    )
