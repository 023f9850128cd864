"""All eviction policies, by name: one file a policy. ``docs/policies`` tells when each wins and loses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.events import ignore
from pagefold.kv.policies.auto import Auto
from pagefold.kv.policies.cost_aware import CostAware
from pagefold.kv.policies.fifo import Fifo
from pagefold.kv.policies.learned import Learned
from pagefold.kv.policies.lfu import Lfu
from pagefold.kv.policies.lru import Lru
from pagefold.kv.policies.s3_fifo import S3Fifo
from pagefold.kv.policies.slru import Slru
from pagefold.kv.policies.two_queues import TwoQueues
from pagefold.kv.policies.weighted import Weighted

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.events import Emit
    from pagefold.kv.eviction import EvictionPolicy

__all__ = ["AUTO", "DEFAULT_POLICY", "POLICIES", "make_policy"]

_SINGLE: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "slru": Slru,
    "2q": TwoQueues,
    "s3-fifo": S3Fifo,
    "weighted": Weighted,
    "cost-aware": CostAware,
    "learned": Learned,
}

AUTO = "auto"
"""The policy that follows others."""

_FOLLOWED: dict[str, Callable[[float], EvictionPolicy]] = {
    "learned": Learned,
    "lru": lambda _: Lru(),
    "lfu": Lfu,
    "s3-fifo": lambda _: S3Fifo(),
    "2q": lambda sample: TwoQueues(sample=sample),
}
"""By ``auto``: the default first, and the simple rules that come first somewhere. Each for a share of all blocks."""

POLICIES = (*_SINGLE, AUTO)
"""Names of all policies."""

DEFAULT_POLICY = "learned"
"""What server, simulator and planner use: see docs/policies/index.md for how it was chosen."""


def make_policy(name: str, num_blocks: int = 0, emit: Emit = ignore) -> EvictionPolicy:
    """Return a fresh policy by name; ``default`` is that of the server.

    Args:
        name: of it.
        num_blocks: places of paths in the cache that it is for; 0 where nobody knows: ``auto`` looks at all then.
        emit: where ``auto`` says whom it follows.

    Raises:
        ConfigError: no policy has that name; lists those there are.
    """
    if name == AUTO:
        return Auto(_FOLLOWED, num_blocks, emit)
    made = _SINGLE.get(DEFAULT_POLICY if name == "default" else name)
    if made is None:
        msg = f"There is no eviction policy {name!r}."
        raise ConfigError(msg, remedy=f"It must be one of {', '.join(POLICIES)}.")
    return made()
