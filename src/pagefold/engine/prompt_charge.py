"""PromptCharge: what a tenant is charged for the prompts of requests that come as one, and gets back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pagefold.engine.token_rates import NO_RATES

if TYPE_CHECKING:
    from pagefold.engine.token_rates import AnyRates

__all__ = ["PromptCharge"]


class PromptCharge:
    """What a tenant is charged for prompts that come as one: for all at once, or for none. Any thread may ask.

    Args:
        num_tokens: of all prompts together.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._num_charged = 0  # and not given back
        self._is_charged = False
        self._rates: AnyRates = NO_RATES
        self._tenant = ""
        self._lock = threading.Lock()

    def enter(self, rates: AnyRates, tenant: str) -> None:
        """Charge ``tenant``, when the first of them comes; the others are paid for.

        Raises:
            RateLimitError: it has used up what it may; nothing is charged.
        """
        with self._lock:
            if not self._is_charged:
                rates.enter(tenant, self._num_tokens)
                self._is_charged = True
                self._rates, self._tenant, self._num_charged = rates, tenant, self._num_tokens

    def give_back(self, num_tokens: int) -> None:
        """Give back what was charged for a prompt that nobody has computed, unless all has been given back."""
        with self._lock:
            num_tokens = min(num_tokens, self._num_charged)
            self._num_charged -= num_tokens
            self._rates.spend(self._tenant, -num_tokens)

    def give_all_back(self) -> None:
        """Give back what was charged for all of them: one was refused, so none is served."""
        self.give_back(self._num_tokens)
