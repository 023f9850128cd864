"""Acceptance: how often drafts were right, of each kind and of each request."""

from __future__ import annotations

from pagefold.speculation.kinds import NUM_KINDS

__all__ = ["Acceptance"]

_FIRST_GUESS = (0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 0.7)
"""Of each kind, as long as none were verified."""

_KIND_WEIGHT = 8.0
"""So many drafts is the first guess worth."""

_REQUEST_WEIGHT = 3.0
"""So many drafts of a request is what is known of all others worth."""

_KIND_DECAY = 0.995
_REQUEST_DECAY = 0.9
"""What each count keeps when another draft is verified: texts change, and what was learned is forgotten."""


class _Counts:
    """Drafts that could have been accepted, and those that were, the older ones less."""

    __slots__ = ("num_accepted", "num_tried")

    def __init__(self, num_tried: float = 0.0, num_accepted: float = 0.0) -> None:
        self.num_tried = num_tried
        self.num_accepted = num_accepted

    def add(self, num_tried: int, num_accepted: int, decay: float) -> None:
        """Count a row's drafts, and keep so much of what was counted before."""
        self.num_tried = self.num_tried * decay + num_tried
        self.num_accepted = self.num_accepted * decay + num_accepted

    def rate(self, prior: float, weight: float) -> float:
        """Return the share that was accepted, where ``prior`` counts as so many."""
        return (self.num_accepted + prior * weight) / (self.num_tried + weight)


class Acceptance:
    """The chance that a draft is right whose predecessors were: of a kind, and of one request in particular."""

    def __init__(self) -> None:
        self._of_kinds = [_Counts() for _ in range(NUM_KINDS)]
        self._of_requests: dict[str, _Counts] = {}

    def chance(self, request_id: str, kind: int) -> float:
        """Return the chance of each draft of a kind for a request, if those before it are right: above 0, below 1."""
        of_kind = self._of_kinds[kind].rate(_FIRST_GUESS[kind], _KIND_WEIGHT)
        counts = self._of_requests.get(request_id)
        return of_kind if counts is None else counts.rate(of_kind, _REQUEST_WEIGHT)

    def learn(self, request_id: str, kind: int, num_drafts: int, num_accepted: int) -> None:
        """Note how many of a row's drafts were right. Behind the first wrong one nothing is known."""
        num_tried = min(num_drafts, num_accepted + 1)
        self._of_kinds[kind].add(num_tried, num_accepted, _KIND_DECAY)
        self._of_requests.setdefault(request_id, _Counts()).add(num_tried, num_accepted, _REQUEST_DECAY)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._of_requests.pop(request_id, None)
