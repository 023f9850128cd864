"""The largest sizes that are simulated. Beyond them memory or patience would end before anything was said."""

from __future__ import annotations

__all__ = ["MAX_BLOCKS", "MAX_REQUESTS", "MAX_TOKENS", "MAX_WORKLOAD_TOKENS"]

MAX_TOKENS = 2**24
"""Tokens of one prompt, one output, one block. The longest contexts of today's models are below it."""

MAX_BLOCKS = 10_000_000
"""Blocks of a cache: each takes some hundred bytes here. In blocks of 16 tokens, 160 million tokens."""

MAX_REQUESTS = 2_000_000
"""Requests of a generated workload: each takes about a kilobyte."""

MAX_WORKLOAD_TOKENS = 10**10
"""Tokens of all prompts of a generated workload."""
