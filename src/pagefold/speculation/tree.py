"""TreeDrafter: what followed this context before, in the request's own text and in its part of the prefix tree.

Three places are looked at, and of what they find the longest agreement counts:

* the path itself: somebody had all the same tokens before, and went on;
* the request's own text, as ``ngram`` does;
* all that the tree holds in the request's namespace: the model, the tenant and the salt (``kv/continuations.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.continuations import MAX_COMPARED, Continuation, Continuations
from pagefold.kv.tree import TOKEN_BYTES
from pagefold.speculation.drafter import Kept
from pagefold.speculation.text_drafter import TextDrafter

if TYPE_CHECKING:
    from pagefold.kv import KVCore
    from pagefold.request import Request

__all__ = ["TreeDrafter"]


class TreeDrafter(TextDrafter):
    """A :class:`~pagefold.speculation.drafter.Drafter`.

    Args:
        core: whose tree is searched; its index is made here, for as many nodes as there are blocks.

    Attributes:
        index: of the tree.
    """

    def __init__(self, core: KVCore) -> None:
        super().__init__()
        self._block_size = core.block_size
        self.index = Continuations(core.pool.num_blocks if core.publishes else 1, core.block_size)
        core.tree.watcher = self.index
        for node in core.tree.nodes():
            self.index.on_insert(node)

    def kept(self) -> Kept:
        """See :class:`~pagefold.speculation.drafter.Drafter`: its index, which follows the tree when that is reset."""
        return Kept("drafts", self.index.num_bytes, self.index.num_bytes)

    def after(self, request: Request, num_tokens: int) -> Continuation | None:
        """Return what may follow the tokens of a request, at most so many; None for no guess."""
        best = _better(super().after(request, num_tokens), self._along(request, num_tokens))
        if best is None or best.num_matched < MAX_COMPARED:
            last = request.token_ids[-MAX_COMPARED:].tobytes()
            best = _better(best, self.index.after(request.namespace, last, num_tokens))
        return best

    def _along(self, request: Request, num_tokens: int) -> Continuation | None:
        """Return what others published behind all of a request's tokens."""
        cache = request.cache
        if cache is None or cache.tail is None or not cache.tail.children:
            return None
        rest = request.token_ids[cache.num_published * self._block_size :].tobytes()
        if len(rest) >= self._block_size * TOKEN_BYTES:
            return None
        return self.index.along(cache.tail, rest, num_tokens)


def _better(one: Continuation | None, other: Continuation | None) -> Continuation | None:
    """Return which of two has more tokens before it that agree; of equals the first."""
    if one is None or other is None:
        return one or other
    return other if other.num_matched > one.num_matched else one
