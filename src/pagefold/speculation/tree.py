"""TreeDrafter: what followed this context before, in the request's own text and in its part of the prefix tree.

Three places are looked at, and of what they find the longest agreement counts:

* the path itself: somebody had all the same tokens before, and went on;
* the request's own text, as ``ngram`` does;
* all that the tree holds in the request's namespace: the model, the tenant and the salt (``kv/continuations.py``).
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from pagefold.kv.continuations import MAX_COMPARED, Continuation, Continuations
from pagefold.kv.tree import TOKEN_BYTES
from pagefold.speculation.drafter import NO_DRAFT, Draft
from pagefold.speculation.kinds import kind_of
from pagefold.speculation.own_text import OwnText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import KVCore
    from pagefold.request import Request

__all__ = ["TreeDrafter"]


class TreeDrafter:
    """A :class:`~pagefold.speculation.drafter.Drafter`.

    Args:
        core: whose tree is searched; its index is made here, for as many nodes as there are blocks.

    Attributes:
        index: of the tree.
    """

    def __init__(self, core: KVCore) -> None:
        self._block_size = core.block_size
        self.index = Continuations(core.pool.num_blocks if core.publishes else 1, core.block_size)
        core.tree.watcher = self.index
        for node in core.tree.nodes():
            self.index.on_insert(node)
        self._texts: dict[str, OwnText] = {}

    def draft(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> list[Draft]:
        """See :class:`~pagefold.speculation.drafter.Drafter`."""
        return [self._draft(request, most) for request, most in zip(requests, num_tokens, strict=True)]

    def forget(self, request_id: str) -> None:
        """See :class:`~pagefold.speculation.drafter.Drafter`."""
        self._texts.pop(request_id, None)

    def _draft(self, request: Request, num_tokens: int) -> Draft:
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = OwnText(predicted=request.predicted)
        best = text.after(request.token_ids, num_tokens)
        best = _better(best, self._along(request, num_tokens))
        if best is None or best.num_matched < MAX_COMPARED:
            last = request.token_ids[-MAX_COMPARED:].tobytes()
            best = _better(best, self.index.after(request.namespace, last, num_tokens))
        return NO_DRAFT if best is None else Draft(array("i", best.packed), kind_of(best.num_matched))

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
