"""Expectations: which paths somebody is expected to go on from, and which nobody will; and so what is evicted first.

An eviction policy learns from uses. Sessions know more (``scheduler/sessions.py``): when an agent will be back, and
which blocks its client has edited away. Evictable leaves are in three queues, of which the policy knows one:

1. *superseded* ones go first, whatever else there is;
2. ends of *expected paths*: who comes back last goes first (L. A. Belady, "A study of replacement algorithms for a
   virtual-storage computer", IBM Systems Journal 5(2), 1966);
3. all others, by the policy.

Between the last two it is decided by time: blocks that nobody has used for so many seconds will hardly be used in as
many more, which is how long the policy's victim is expected to stay unused, times how much surer sessions come back.

Only the last node of an expected path is noted. When it is evicted its parent is the path's end: so what is left of a
path is kept as firmly, and nothing is done for each block of it. But what may be edited away before anybody goes on is
worth that much less (:attr:`ExpectedPath.risk`): it is expected so much later, and what lies above it is not.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from pagefold.kv.block import MANY, NOBODY
from pagefold.kv.quotas import NO_QUOTAS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.events import EvictionRule
    from pagefold.kv.block import Node
    from pagefold.kv.eviction import EvictionPolicy
    from pagefold.kv.pause_forecast import PauseForecast
    from pagefold.kv.quotas import AnyQuotas

__all__ = ["Expectations", "ExpectedPath", "Victim"]

_SURER = 8.0
_LEAST_LOOKS = 64
_MOST_LOOKS = 64
"""Paths of which it is asked again when they are expected, at one call: the rest when asked next."""


class Victim(NamedTuple):
    """The leaf that goes next, by which rule, and what it was ranked by."""

    node: Node
    rule: EvictionRule
    score: float | None


class ExpectedPath:
    """A path from which somebody is expected to go on.

    Attributes:
        owner: whose it is: only blocks that nobody else has used are ever superseded.
        tail: its last node that is still in the tree; None if nothing of it is.
        due_s: when somebody goes on from it, as far as is known; infinite while nobody is expected (any more).
        late_s: the same of nodes from ``num_sure`` on: later, by how likely they are edited away before.
        num_sure: how many of its first nodes will be gone on from whatever is edited.
        risk: how likely the others are edited away before, from 0 to below 1.
        forecast: of the pause that it is in; None where its time is known, or nobody is expected.
        since_s: when that pause began.
        version: how often it was said when somebody is expected.
        is_dropped: nobody is expected for good, whatever ends there yet.
    """

    __slots__ = (
        "due_s",
        "forecast",
        "is_dropped",
        "late_s",
        "num_sure",
        "owner",
        "risk",
        "since_s",
        "tail",
        "version",
    )

    def __init__(self, owner: object) -> None:
        self.owner = owner
        self.tail: Node | None = None
        self.due_s = self.late_s = float("inf")
        self.num_sure = 0
        self.risk = 0.0
        self.forecast: PauseForecast | None = None
        self.since_s = 0.0
        self.version = 0
        self.is_dropped = False

    def due_at_s(self, depth: int) -> float:
        """Return when somebody goes on from its node at ``depth``, as far as is known."""
        return self.due_s if depth < self.num_sure else self.late_s


class Expectations:
    """Chooses among evictable leaves, with an eviction policy for those of which no session says anything.

    Args:
        policy: is told only of the leaves that it chooses among.
        quotas: say whose leaves whoever asks can have.

    Attributes:
        num_superseded: nodes in the tree that are superseded.
        has_claims: whether any node was ever used for a session.
    """

    def __init__(self, policy: EvictionPolicy, quotas: AnyQuotas = NO_QUOTAS) -> None:
        self._policy = policy
        self._at: dict[Node, list[ExpectedPath]] = {}
        self._superseded, self._expected = quotas.nodes(), quotas.nodes()
        self._looks: list[tuple[float, int, int, ExpectedPath]] = []  # (when, ticket, version, path)
        self._num_looks = 0
        self._most_looks = _LEAST_LOOKS
        self.num_superseded = 0
        self.has_claims = False

    # Paths.

    def put(self, path: ExpectedPath, tail: Node | None) -> None:
        """Let ``path`` end in ``tail``, which is in the tree or a root; None for no path at all."""
        before = path.tail
        if before is tail or path.is_dropped:
            return
        if before is not None:
            self._leave(path, before)
            self._sort(before)
        if tail is not None and tail.parent is not None:
            self._enter(path, tail)
            self._sort(tail)

    def expect_at(self, path: ExpectedPath, due_s: float) -> None:
        """Expect somebody to go on from ``path`` at a time."""
        if path.is_dropped:
            return
        path.version += 1
        path.forecast = None
        self._set_due(path, due_s, due_s)

    def expect(
        self,
        path: ExpectedPath,
        forecast: PauseForecast,
        now_s: float,
        *,
        num_sure: int = 0,
        risk: float = 0.0,
    ) -> None:
        """Expect somebody to go on from ``path``, which nobody uses since ``now_s``, as ``forecast`` says.

        Args:
            path: that is expected.
            forecast: of the pause.
            now_s: when that begins.
            num_sure: as of :class:`ExpectedPath`.
            risk: as there.
        """
        if path.is_dropped:
            return
        path.num_sure, path.risk = num_sure, risk
        path.forecast = forecast
        path.since_s = now_s
        self._look(path, now_s)

    def drop(self, path: ExpectedPath) -> None:
        """Expect nobody any more, for good: the blocks are like all others."""
        path.version += 1
        path.forecast = None
        self.put(path, None)
        path.is_dropped = True
        path.due_s = path.late_s = float("inf")

    def supersede(self, tail: Node, owner: object, num_kept: int, *, stops: bool = False) -> list[Node]:
        """Let the blocks of the path up to ``tail`` go first, but for the first ``num_kept``.

        Only those that ``owner`` alone has used; what another expected path leads through goes when that has gone.

        Args:
            tail: where the path ends.
            owner: whose it is.
            num_kept: how many nodes from the first on keep their value.
            stops: whether what lies above a parting, or another expected path's end, keeps its value too.

        Returns the nodes, the last first.
        """
        marked: list[Node] = []
        node = tail
        below: Node | None = None
        while node.parent is not None and node.depth >= num_kept:
            if node.claim is MANY or (stops and (node in self._at or self._leads_elsewhere(node, below))):
                break
            if node.claim is owner:
                node.claim = NOBODY
                self.num_superseded += 1
                marked.append(node)
            below, node = node, node.parent
        for node in marked:
            self._sort(node)
        return marked

    # What the tree tells.

    def note_use(self, nodes: list[Node], owner: object | None) -> None:
        """``nodes`` are gone on from for ``owner``; None for who has no session."""
        if not self.has_claims:
            return
        for node in nodes:
            claim = node.claim
            if claim is not owner and claim is not MANY:
                if claim is NOBODY:
                    self.num_superseded -= 1
                    node.claim = owner if owner is not None else MANY
                elif claim is not None:
                    node.claim = MANY

    def claim(self, tail: Node, num_begun: int, owner: object | None) -> None:
        """Note that the nodes of a path behind the first ``num_begun`` were made for ``owner``; None as above."""
        self.has_claims |= owner is not None
        node = tail
        while node.parent is not None and node.depth >= num_begun:
            claim = node.claim
            if claim is NOBODY:
                self.num_superseded -= 1
                claim = None
            if claim is None:
                node.claim = MANY if owner is None else owner
            elif claim is not owner:
                node.claim = MANY
            node = node.parent

    def on_idle(self, node: Node) -> None:
        """``node`` became evictable."""
        if node in self._at:
            self._expected.add(node, (-self._due(node), -node.depth))
        elif node.claim is NOBODY:
            self._superseded.add(node, (node.last_used, -node.depth))
        else:
            self._policy.on_idle(node)

    def on_busy(self, node: Node) -> None:
        """``node`` is evictable no more."""
        if node in self._expected:
            self._expected.remove(node)
        elif node in self._superseded:
            self._superseded.remove(node)
        else:
            self._policy.on_busy(node)

    def on_evict(self, node: Node) -> None:
        """``node`` has left the tree; paths that ended there end with its parent."""
        if node.claim is NOBODY:
            self.num_superseded -= 1
        parent = node.parent
        for path in self._at.pop(node, ()):
            if parent is None or parent.parent is None:
                path.tail = None
            else:
                self._enter(path, parent)

    # What goes next.

    def superseded(self) -> Victim | None:
        """Return the superseded leaf that goes next; None if there is none."""
        node = self._superseded.first()
        return None if node is None else Victim(node, "superseded", None)

    def victim(self, now_s: float) -> Victim | None:
        """Return the leaf that goes next; None where no leaf is evictable."""
        superseded = self.superseded()
        if superseded is not None:
            return superseded
        if self._looks and self._looks[0][0] <= now_s:
            self._look_at_due(now_s)
        by_policy = self._policy.victim()
        expected = self._expected.first_key()
        if expected is None:
            return None if by_policy is None else Victim(by_policy, "policy", self._policy.score(by_policy))
        in_s = -expected[0] - now_s
        if by_policy is not None and in_s <= _SURER * (now_s - by_policy.used_s):
            return Victim(by_policy, "policy", self._policy.score(by_policy))
        last = self._expected.first()
        assert last is not None
        return Victim(last, "session", in_s)

    def candidates(self) -> Iterator[Node]:
        """Yield all evictable leaves, in any order: for audits."""
        yield from self._superseded
        yield from self._expected
        yield from self._policy.candidates()

    def superseded_leaves(self) -> Iterator[Node]:
        """Yield the leaves that go before all others: for audits."""
        return iter(self._superseded)

    def expected_leaves(self) -> Iterator[Node]:
        """Yield the evictable ends of expected paths: for audits."""
        return iter(self._expected)

    def ends(self) -> Iterator[tuple[Node, list[ExpectedPath]]]:
        """Yield the last nodes of expected paths, with these: for audits."""
        return iter(self._at.items())

    # Inside.

    def _enter(self, path: ExpectedPath, tail: Node) -> None:
        path.tail = tail
        self._at.setdefault(tail, []).append(path)

    def _leave(self, path: ExpectedPath, tail: Node) -> None:
        path.tail = None
        paths = self._at[tail]
        paths.remove(path)
        if not paths:
            del self._at[tail]

    @staticmethod
    def _leads_elsewhere(node: Node, below: Node | None) -> bool:
        """Whether a node leads to others than ``below`` that are worth anything."""
        return any(child is not below and child.claim is not NOBODY for child in node.children.values())

    def _sort(self, node: Node) -> None:
        """Put a node into the queue that it belongs to now, if it can go at all."""
        if not node.evictable:
            return
        is_expected, is_superseded = node in self._expected, node in self._superseded
        belongs = node in self._at
        if belongs and is_expected:
            self._expected.add(node, (-self._due(node), -node.depth))
        elif belongs or (node.claim is NOBODY) != is_superseded or is_expected:
            self.on_busy(node)
            self.on_idle(node)

    def _due(self, node: Node) -> float:
        """Return when the first comes back of those whose paths end in ``node``."""
        depth = node.depth
        return min(path.due_at_s(depth) for path in self._at[node])

    def _set_due(self, path: ExpectedPath, due_s: float, late_s: float) -> None:
        path.due_s, path.late_s = due_s, late_s
        if path.tail is not None:
            self._sort(path.tail)

    def _look(self, path: ExpectedPath, now_s: float) -> None:
        """Say anew when ``path`` is gone on from."""
        forecast = path.forecast
        assert forecast is not None
        age_s = max(0.0, now_s - path.since_s)
        path.version += 1
        expected_s = forecast.expected_s(age_s)
        if expected_s is None:
            self.drop(path)
            return
        self._set_due(path, now_s + expected_s, now_s + expected_s / (1.0 - path.risk))
        self._num_looks += 1
        again_s = path.since_s + forecast.look_again_s(age_s)
        heappush(self._looks, (again_s, self._num_looks, path.version, path))
        if len(self._looks) > self._most_looks:  # mostly stale: nobody has asked for memory
            self._looks = [look for look in self._looks if look[3].version == look[2]]
            heapify(self._looks)
            self._most_looks = max(_LEAST_LOOKS, 2 * len(self._looks))

    def _look_at_due(self, now_s: float) -> None:
        num_left = _MOST_LOOKS
        while self._looks and self._looks[0][0] <= now_s and num_left:
            _, _, version, path = heappop(self._looks)
            if path.version == version:
                self._look(path, now_s)
                num_left -= 1
