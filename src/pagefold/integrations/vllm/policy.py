"""PagefoldPolicy: our eviction policies as the ``CachePolicy`` of vLLM's CPU tier, which loads it by module path.

``{"eviction_policy": "PagefoldPolicy", "cache_policy_module_path": "pagefold.integrations.vllm"}``. All it does is in
:class:`~pagefold.integrations.vllm.chunk_tree.ChunkTree`; here is how vLLM calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pagefold.integrations.vllm.chunk_policies import DEFAULT, policy_of
from pagefold.integrations.vllm.chunk_tree import ChunkTree
from pagefold.integrations.vllm.versions import check_version, unmet
from pagefold.kv import make_policy

try:
    from vllm import __version__ as vllm_version
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
except ImportError as error:
    from pagefold.errors import ConfigError

    _msg = f"vLLM's cache policies are not there ({error})."
    raise ConfigError(_msg, remedy="Use PagefoldPolicy inside vLLM: pip install vllm.") from None

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.kv_offload.base import OffloadKey, ReqContext
    from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

__all__ = ["PagefoldPolicy"]


class PagefoldPolicy(CachePolicy):  # type: ignore[misc] # vLLM is not there when types are checked
    """A ``CachePolicy`` of vLLM that evicts as one of our policies does; see its contract for the methods.

    Args:
        cache_capacity: how many chunks there can be.

    Attributes:
        policy: the name of the policy that it is.
    """

    policy: ClassVar[str] = DEFAULT

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._tree: ChunkTree[ChunkStatus] = ChunkTree(lambda: make_policy(self.policy, cache_capacity))

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """Return a chunk if it is there; not a use."""
        return self._tree.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        """Add a chunk that was allocated."""
        self._tree.insert(key, chunk)

    def remove(self, key: OffloadKey) -> None:
        """Take out a chunk that could not be written."""
        self._tree.remove(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Say that chunks, in order, were used."""
        listed = list(keys)
        self._tree.use(listed, set(listed), req_context.get_offload_key_position)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Nothing to do: chunks that come are inserted, and what is remembered of them is found then."""

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],  # noqa: ARG002 - those that were reused say as much
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Say what a request used: of each KV cache group a path."""
        for keys in key_groups:
            self._tree.use(keys, reused_keys, req_context.get_offload_key_position)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict exactly ``n`` chunks that nobody uses, none of them protected; or none at all, and return None."""
        return self._tree.evict(n, protected)

    def clear(self) -> None:
        """Forget all chunks, and what was learned."""
        self._tree.clear()

    def mark_evictable(self, key: OffloadKey) -> None:
        """Say that nobody uses a chunk any more."""
        self._tree.mark_evictable(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """Say that somebody uses a chunk."""
        self._tree.mark_non_evictable(key)


_HOOKS = ("on_store_miss", "on_request_finished", "mark_evictable", "mark_non_evictable")
"""What vLLM must call beside the abstract methods: without them no chunk would ever be known to be free."""


def _checked() -> None:
    left = set(getattr(PagefoldPolicy, "__abstractmethods__", ()))
    missing = left | {hook for hook in _HOOKS if not hasattr(CachePolicy, hook)}
    if missing:
        raise unmet(vllm_version, "PagefoldPolicy", ", ".join(sorted(missing)))
    check_version(vllm_version, "PagefoldPolicy")


_checked()


def __getattr__(name: str) -> type[PagefoldPolicy]:
    """Return the class of another of our policies by its name; refuse those that cannot do with what vLLM tells."""
    if not name.startswith("Pagefold"):
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    policy = policy_of(name)
    about = {"__module__": __name__, "__doc__": f"Evicts as {policy} does.", "policy": policy}
    made = globals()[name] = type(name, (PagefoldPolicy,), about)
    return made
