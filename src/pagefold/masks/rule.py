"""The rule: what a query sees whole, and of what it sees only the keys that were kept. Positions alone decide it.

Tokens come in chunks of ``CHUNK`` at fixed positions. A query sees its own chunk and the one before it whole, and the
first ``NUM_SINKS`` tokens. All between is *older*: of it, it sees the keys that pass the threshold of their layer and
KV head. So all queries of a chunk have the same older tokens, and a key is one of them from some chunk on, for good.

KVzap (arXiv 2601.07891) keeps a window of the last 128 tokens, which slides with each token. This one moves by chunks,
and so is 256 to 511 tokens long. The first tokens are kept whatever they are (StreamingLLM; Xiao et al., 2023).
"""

from __future__ import annotations

__all__ = ["CHUNK", "NUM_SINKS", "concerned_from", "first_whole", "num_older", "older", "sees"]

CHUNK = 256
"""Tokens of a chunk: chunk ``c`` is the positions ``[c * CHUNK, (c + 1) * CHUNK)``."""
NUM_SINKS = 4
"""First tokens that everybody sees."""


def first_whole(position: int) -> int:
    """Return from which position on a query at ``position`` sees everything that is before it."""
    return max(0, position // CHUNK - 1) * CHUNK


def older(position: int) -> range:
    """Return the positions of which a query at ``position`` sees only what was kept."""
    return range(NUM_SINKS, max(NUM_SINKS, first_whole(position)))


def num_older(num_tokens: int) -> int:
    """Return how many of a sequence's first ``num_tokens`` tokens are older for the next one."""
    return len(older(num_tokens))


def concerned_from(key: int) -> int:
    """Return the first position whose query sees the key at ``key`` only if it was kept; no sink."""
    return (key // CHUNK + 2) * CHUNK


def sees(position: int, key: int, *, is_kept: bool) -> bool:
    """Return whether a query sees a key.

    Args:
        position: of the query.
        key: position of the key.
        is_kept: whether the key passes the threshold of its layer and KV head.
    """
    return key <= position and (is_kept or key not in older(position))
