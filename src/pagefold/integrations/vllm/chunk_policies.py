"""Which of our eviction policies can do with what vLLM's CPU tier is told, by the names of the classes it loads."""

from __future__ import annotations

from pagefold.errors import ConfigError

__all__ = ["DEFAULT", "POLICY_CLASSES", "policy_of"]

DEFAULT = "learned"
"""What ``PagefoldPolicy`` is: see docs/vllm.md for how it was chosen."""

POLICY_CLASSES = {
    "PagefoldPolicy": DEFAULT,
    "PagefoldFifo": "fifo",
    "PagefoldLearned": "learned",
    "PagefoldLfu": "lfu",
    "PagefoldLru": "lru",
    "PagefoldS3Fifo": "s3-fifo",
    "PagefoldSlru": "slru",
    "PagefoldTwoQueues": "2q",
}
"""The policies that need no more than names in order: who was used when, how often, and what goes on from what."""

_REFUSED = {
    "PagefoldWeighted": "it goes by progress, priority and customer of requests, and vLLM tells none of them",
    "PagefoldCostAware": "it goes by how many tokens a block has and lies behind, and vLLM tells no tokens",
    "PagefoldAuto": "it replays whole paths in caches of its own, and vLLM may evict in the middle of one",
    "PagefoldBelady": "it knows the future: it is a bound, in the simulator only",
}


def policy_of(class_name: str) -> str:
    """Return the name of the policy that a class is.

    Raises:
        ConfigError: the policy cannot do with what vLLM tells it, or there is none of that name.
    """
    name = POLICY_CLASSES.get(class_name)
    if name is not None:
        return name
    reason = _REFUSED.get(class_name)
    if reason is None:
        msg = f"Pagefold has no cache policy {class_name!r} for vLLM."
    else:
        msg = f"{class_name} cannot be vLLM's cache policy: {reason}."
    raise ConfigError(msg, remedy=f"There are {', '.join(POLICY_CLASSES)}.")
