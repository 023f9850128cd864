"""The largest sizes that are simulated. Beyond them memory or patience would end before anything was said."""

from __future__ import annotations

__all__ = ["MAX_BLOCKS", "MAX_REQUESTS", "MAX_TOKENS", "MAX_WORKLOAD_TOKENS"]

MAX_TOKENS = 2**24
"""Of one prompt, one output, one block. The longest contexts of today's models are below it."""

MAX_BLOCKS = 10_000_000
"""Of a cache: each takes some hundred bytes here. In blocks of 16 tokens, 160 million tokens."""

MAX_REQUESTS = 2_000_000
"""Of a generated workload: each takes about a kilobyte."""

MAX_WORKLOAD_TOKENS = 10**10
"""Of all prompts of a generated workload."""
