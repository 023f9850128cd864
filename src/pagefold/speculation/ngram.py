"""NgramDrafter: what followed the last tokens where they came before in the request's own text (prompt lookup).

As in vLLM's ``ngram`` and in transformers' prompt lookup (Saxena, 2023). Of several places the last one counts.
"""

from __future__ import annotations

from pagefold.speculation.text_drafter import TextDrafter

__all__ = ["NgramDrafter"]


class NgramDrafter(TextDrafter):
    """A :class:`~pagefold.speculation.drafter.Drafter`.

    Args:
        min_tokens: how many tokens must agree at least: vLLM's ``prompt_lookup_min``.
        max_tokens: how many are looked for first: vLLM's ``prompt_lookup_max``.
    """

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        super().__init__(tuple(range(max_tokens, min_tokens - 1, -1)))
