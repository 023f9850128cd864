"""The token rates that a key file gives tenants, as the engine's door holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.engine.token_rates import NO_RATES, TokenRate, TokenRates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pagefold.config import Account
    from pagefold.engine.token_rates import AnyRates

__all__ = ["rates_of"]

_BURST_S = 60.0
"""A tenant whose burst nobody has said may use at once what it may in a minute: as hosted APIs count."""


def rates_of(accounts: Iterable[Account], clock: Callable[[], float]) -> AnyRates:
    """Return who may use how many tokens; ``clock`` tells seconds."""
    rates: dict[str, TokenRate] = {}
    for account in accounts:
        if account.tokens_per_s is not None:
            burst_tokens = account.burst_tokens
            if burst_tokens is None:
                burst_tokens = account.tokens_per_s * _BURST_S
            rates[account.tenant] = TokenRate(account.tokens_per_s, burst_tokens)
    return TokenRates(rates, clock) if rates else NO_RATES
