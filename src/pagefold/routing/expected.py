"""ExpectedPrefixes: prompts that replicas were sent, which they will hold soon, though none of them has said so yet.

Two requests of one conversation that follow each other closely, or a crowd that begins alike, come before the first
event does. What is expected is forgotten some time after the request's end: by then events have told.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ExpectedPrefixes"]


class _Sent(NamedTuple):
    replica: str
    block_hashes: Sequence[bytes]


class ExpectedPrefixes:
    """What requests that were sent lately leave where they went.

    Args:
        settle_s: seconds from a request's end until events must have told of it.
    """

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._sent: dict[str, _Sent] = {}
        self._ending: OrderedDict[str, float] = OrderedDict()  # in the order in which they ended
        self._holders: dict[bytes, dict[str, int]] = {}  # how many of those sent to a replica have a block

    def __len__(self) -> int:
        """How many requests it knows."""
        return len(self._sent)

    def sent(self, request_id: str, replica: str, block_hashes: Sequence[bytes]) -> None:
        """A request was sent to a replica. One that was sent before, elsewhere perhaps, is expected here alone."""
        self.forget(request_id)
        self._sent[request_id] = _Sent(replica, block_hashes)
        for each in block_hashes:
            holders = self._holders.setdefault(each, {})
            holders[replica] = holders.get(replica, 0) + 1

    def ended(self, request_id: str, now: float) -> None:
        """It has ended there, whether or not it was computed."""
        if request_id in self._sent:
            self._ending[request_id] = now + self._settle_s

    def forget_until(self, now: float) -> None:
        """Forget those of which events must have told by ``now``."""
        while self._ending:
            request_id, due_s = next(iter(self._ending.items()))
            if due_s > now:
                return
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Forget a request, if it is known."""
        self._ending.pop(request_id, None)
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        for each in sent.block_hashes:
            holders = self._holders[each]
            holders[sent.replica] -= 1
            if not holders[sent.replica]:
                del holders[sent.replica]
                if not holders:
                    del self._holders[each]

    def forget_replica(self, replica: str) -> None:
        """Forget all that was sent to a replica."""
        for request_id in [name for name, sent in self._sent.items() if sent.replica == replica]:
            self.forget(request_id)

    def match(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        """Return how many of a prompt's blocks, from the first on, each replica is expected to hold; none with none."""
        found: dict[str, int] = {}
        left: set[str] | None = None
        for place, each in enumerate(block_hashes):
            holders = self._holders.get(each)
            if not holders:
                break
            here = set(holders) if left is None else left & holders.keys()
            for replica in (left or set()) - here:
                found[replica] = place
            left = here
            if not left:
                break
        else:
            place = len(block_hashes)
        for replica in left or ():
            found[replica] = place
        return found
