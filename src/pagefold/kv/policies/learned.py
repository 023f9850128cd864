"""Learned: evict the block that will find least for the room it takes, as uses so far have taught it.

What it is after: most prompts are used once; a conversation that goes on comes back after minutes, and the more turns
it had the likelier; a shared beginning comes back all the time. :mod:`~pagefold.kv.policies.reuse_model` learns all
that online, from blocks that are there and from those that were evicted and are remembered for a while.

Sources: Z. Song, D. S. Berger, K. Li, W. Lloyd, "Learning relaxed Belady for content distribution network caching",
NSDI 2020 (learn from a window of past requests, evicted objects included); LHD and Gittins as told in
:mod:`~pagefold.kv.policies.reuse_model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.kv.policies.ages import AGE_STARTS, NUM_AGES, age_range
from pagefold.kv.policies.aging import AgingNodes
from pagefold.kv.policies.ghosts import Ghosts
from pagefold.kv.policies.recency import RecencyShadow
from pagefold.kv.policies.reuse_model import Kind, ReuseModel
from pagefold.kv.tree import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagefold.kv.block import Node
    from pagefold.kv.eviction import RequestFacts

__all__ = ["Accuracy", "Learned"]

_GHOSTS_PER_NODE = 4.0
_LEAST_GHOSTS = 1 << 16
_MOST_USES_KEPT = 1 << 16
_FIRST_FIT = 32
_FIT_EVERY = 128
_IDLE_PER_USE = 64
_LEARN_US = 1500
_PIECE = 256
_WORTH_US, _RANK_US, _MOVE_US = 150, 1500, 10
_MOST_TURNS = 6
_LEAST_LENGTH, _MOST_LENGTH = 4, 17
_MANY_CHILDREN = 3
_NO_LENGTH = 11

_JUDGE_EVERY = 512
_BASE_IS_BETTER = 0.98
_FADE = 0.75
_MOST_PATIENCE = 16
_OLDEST_FIRST = [-float(start) for start in AGE_STARTS]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How good the policy has been.

    Attributes:
        num_hit_blocks: blocks that were found.
        num_base_hit_blocks: blocks that LRU would have found with as much room: exact but for blocks of one use that it
            would have cut in the middle.
        num_evicted_blocks: blocks that were evicted.
        num_regretted_blocks: those of them that came back while they were remembered.
        is_falling_back: it evicts as LRU does for now, since LRU did better lately.
    """

    num_hit_blocks: int
    num_base_hit_blocks: int
    num_evicted_blocks: int
    num_regretted_blocks: int
    is_falling_back: bool

    @property
    def evicted_rightly(self) -> float:
        """Share of evicted blocks that were not asked for again, as far as is remembered, 0 to 1."""
        return 1 - self.num_regretted_blocks / self.num_evicted_blocks if self.num_evicted_blocks else 1.0


class _Use:
    """Blocks of one kind that were used at one time, and not since.

    Attributes:
        kind: what they have in common.
        tick: when they were used.
        num_blocks: how many blocks.
        turns: of the conversation.
        tail_depth: of the request's last block.
    """

    __slots__ = ("kind", "num_blocks", "tail_depth", "tick", "turns")

    def __init__(self, kind: Kind, tick: int, turns: int, tail_depth: int) -> None:
        self.kind = kind
        self.tick = tick
        self.turns = turns
        self.tail_depth = tail_depth
        self.num_blocks = 0


class _Seen:
    """What is known of one block, there or evicted.

    Attributes:
        use: its last use; None before its first one ended.
        num_uses: how often it was used.
        num_children: how many different blocks have followed it.
        was_missed: it was not there when its last use began.
    """

    __slots__ = ("num_children", "num_uses", "use", "was_missed")

    def __init__(self) -> None:
        self.use: _Use | None = None
        self.num_uses = 0
        self.num_children = 0
        self.was_missed = True


class Learned:
    """Evicts the least worth. Falls back to LRU while that finds more, as a shadow of LRU tells.

    Time is counted in uses of all requests, since hours mean nothing to a cache that is idle.

    Args:
        sample: share of all blocks that it is told of.
    """

    def __init__(self, sample: float = 1.0) -> None:
        self._model = ReuseModel()
        self._seen: dict[Node, _Seen] = {}
        self._ghosts: Ghosts[_Seen] = Ghosts(_GHOSTS_PER_NODE, round(sample * _LEAST_GHOSTS))
        self._uses: list[_Use] = []
        self._now = 0
        self._next_fit = _FIRST_FIT
        self._learning: Iterator[int] | None = None
        self._ranks = self._model.ranks()
        self._idle = AgingNodes(self._ranks)
        self._recency = RecencyShadow()
        self._num_blocks_used = 0
        self._num_hits = self._num_base_hits = self._num_evicted = self._num_regretted = 0
        self._lately = self._base_lately = 0.0  # hits, fading
        self._is_base = False
        self._judge_at = _JUDGE_EVERY
        self._patience = 1

    def accuracy(self) -> Accuracy:
        """Return how good the policy has been so far."""
        return Accuracy(
            self._num_hits, self._num_base_hits, self._num_evicted, self._num_regretted, is_falling_back=self._is_base
        )

    def on_insert(self, node: Node) -> None:
        """Take up what is remembered of ``node``."""
        seen = self._ghosts.recall(node.path_hash)
        if seen is None:
            seen = _Seen()
        else:
            seen.was_missed = True
            self._num_regretted += 1
        self._seen[node] = seen

    def on_hit(self, path: list[Node]) -> None:
        """Nothing to do: ``on_release`` sees all of the path."""

    def on_release(self, tail: Node, facts: RequestFacts) -> None:
        """Learn when the blocks of the path were used last, and what kind of use this one was.

        What is let go of again teaches nothing: nobody came back. Its blocks are as fresh as any.
        """
        path = []
        node = tail
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        seen = [self._seen[node] for node in path]
        num_known = 0
        while num_known < len(seen) and seen[num_known].use is not None:
            num_known += 1
        if facts.is_repeat:
            self._use_again(path, seen, num_known)
            return
        self._now += 1
        for parent in seen[max(num_known, 1) - 1 : -1]:
            parent.num_children += 1
        turns = _turns(seen[num_known - 1], num_known - 1) if num_known else 1
        self._settle(seen)
        self._use(path, seen, num_known, turns)
        self._num_blocks_used += len(path)
        self._idle.grow(self._now)
        self._learn()
        if self._now >= self._judge_at:
            self._judge()

    def on_evict(self, node: Node) -> None:
        """Remember ``node``."""
        seen = self._seen.pop(node)
        if seen.use is None:  # taken back before it was ever used
            return
        self._num_evicted += 1
        self._ghosts.remember(node.path_hash, seen, len(self._seen))

    def on_idle(self, node: Node) -> None:
        """Offer ``node`` at its rank."""
        use = self._seen[node].use
        self._idle.add(node, self._class_of(node), self._now if use is None else use.tick, self._now)

    def on_busy(self, node: Node) -> None:
        """Withdraw ``node``."""
        self._idle.remove(node)

    def victim(self) -> Node | None:
        """Return the evictable node that is worth least."""
        return self._idle.first(self._now)

    def score(self, node: Node) -> float:
        """Return the rank of its kind and age: what it is expected to spare; its recency while LRU does better."""
        return self._idle.rank_of(node)

    def candidates(self) -> Iterator[Node]:
        """Yield all evictable nodes."""
        return iter(self._idle)

    def _settle(self, seen: list[_Seen]) -> None:
        """Close the last uses of the blocks of a path that was just used again."""
        room = len(self._seen)
        is_base_hit: dict[int, bool] = {}
        for each in seen:
            use = each.use
            if use is None:
                continue
            self._model.hit(use.kind, age_range(self._now - use.tick), 1)
            if not each.was_missed:
                self._num_hits += 1
                self._lately += 1
            if use.tick not in is_base_hit:
                is_base_hit[use.tick] = self._recency.num_newer(use.tick) < room
            if is_base_hit[use.tick]:
                self._num_base_hits += 1
                self._base_lately += 1
        self._close(seen)

    def _close(self, seen: list[_Seen]) -> None:
        for each in seen:
            if each.use is not None:
                each.use.num_blocks -= 1
                self._recency.take(each.use.tick)

    def _use_again(self, path: list[Node], seen: list[_Seen], num_known: int) -> None:
        """Let the last use of the blocks of a path go on until now; blocks that are new are of the same turn."""
        before = seen[num_known - 1].use if num_known else None
        turns = 1 if before is None else before.turns
        kinds = [each.use.kind for each in seen[:num_known] if each.use is not None]
        self._close(seen)
        self._use(path, seen, num_known, turns, kinds)

    def _use(self, path: list[Node], seen: list[_Seen], num_known: int, turns: int, kinds: Sequence[Kind] = ()) -> None:
        """Open a use for each kind of block on a path; the first blocks may have kinds that stay."""
        num_new = len(path) - num_known
        new_tokens = num_new * (len(path[0].key) // TOKEN_BYTES)
        new_length = max(_LEAST_LENGTH, min(_MOST_LENGTH, new_tokens.bit_length() - 1))
        last = len(path) - 1
        num_reused = _num_reused(path)
        uses: dict[Kind, _Use] = {}
        for depth, each in enumerate(seen):
            each.num_uses += depth >= len(kinds)
            each.was_missed = False
            hint = 0 if num_reused is None else 1 if depth < num_reused else 2
            if depth < len(kinds):
                kind = kinds[depth]
            elif each.num_uses > turns + 1:
                kind = Kind(each.num_uses.bit_length(), 0, _NO_LENGTH, False, False, 0, hint)  # noqa: FBT003
            else:
                kind = Kind(
                    0,
                    min(turns, _MOST_TURNS),
                    new_length,
                    depth == last,
                    depth >= num_known,
                    min(each.num_uses, turns, 3),
                    hint,
                )
            use = uses.get(kind)
            if use is None:
                use = uses[kind] = _Use(kind, self._now, turns, last)
                self._uses.append(use)
            use.num_blocks += 1
            each.use = use
        self._recency.add(self._now, len(path))

    def _learn(self) -> None:
        """Go on with what was begun to be learned, or begin anew when it is time: a little at each use."""
        if self._learning is None:
            if self._now < self._next_fit:
                return
            self._next_fit = min(2 * self._now, self._now + max(_FIT_EVERY, len(self._idle) // _IDLE_PER_USE))
            self._learning = self._lesson()
        room_us = _LEARN_US
        while room_us > 0:
            took_us = next(self._learning, None)
            if took_us is None:
                self._learning = None
                return
            room_us -= took_us

    def _lesson(self) -> Iterator[int]:
        """Fit the model to all uses, then give idle nodes the ranks and classes that follow; yield about microseconds.

        Uses that come meanwhile are for the next lesson. No piece takes long, however much there is.
        """
        waiting: dict[Kind, list[float]] = {}
        yield from self._look_at_uses(waiting)
        yield from self._model.fit(waiting, self._num_blocks_used / self._now)
        ranks = self._model.ranks()
        for class_index in self._idle.classes():
            assert ranks[class_index], "made when it is asked for first"
            yield _WORTH_US
        self._ranks = ranks
        if not self._is_base:
            self._idle.rank_again(ranks)
        yield _RANK_US
        nodes = list(self._idle)
        for start in range(0, len(nodes), _PIECE):
            num_moved = self._idle.classify(nodes[start : start + _PIECE], self._class_of, self._now)
            yield _PIECE + _MOVE_US * num_moved

    def _look_at_uses(self, waiting: dict[Kind, list[float]]) -> Iterator[int]:
        """Count the uses that nothing has become of yet; forget the others, and the oldest of too many."""
        uses, self._uses = self._uses, []
        kept: list[_Use] = []
        num_forgotten = len(uses) - _MOST_USES_KEPT
        for start in range(0, len(uses), _PIECE):
            for index, use in enumerate(uses[start : start + _PIECE], start):
                if not use.num_blocks:
                    continue
                age = age_range(self._now - use.tick)
                if index < num_forgotten:
                    self._model.lose(use.kind, age, use.num_blocks)
                    continue
                kept.append(use)
                by_age = waiting.get(use.kind)
                if by_age is None:
                    by_age = waiting[use.kind] = [0.0] * NUM_AGES
                by_age[age] += use.num_blocks
            yield _PIECE
        self._uses = kept + self._uses

    def _judge(self) -> None:
        """Change over to LRU if it found more lately, and back after a while, longer each time that was in vain."""
        if self._is_base:
            self._is_base = False
            self._patience = min(_MOST_PATIENCE, 2 * self._patience)
            self._judge_at = self._now + 2 * _JUDGE_EVERY
            self._lately = self._base_lately = 0.0
        elif self._lately < _BASE_IS_BETTER * self._base_lately:
            self._is_base = True
            self._judge_at = self._now + self._patience * _JUDGE_EVERY
        else:
            self._lately *= _FADE
            self._base_lately *= _FADE
            self._judge_at = self._now + _JUDGE_EVERY
            return
        self._idle.rank_again(_RecencyRanks() if self._is_base else self._ranks)

    def _class_of(self, node: Node) -> int:
        use = self._seen[node].use
        return 0 if use is None else self._model.class_of(use.kind)


class _RecencyRanks(dict[int, list[float]]):
    """Ranks of LRU: whatever the class, the oldest first."""

    def __missing__(self, class_index: int) -> list[float]:
        return _OLDEST_FIRST


def _turns(last_known: _Seen, depth: int) -> int:
    """Return how many requests a conversation has had, the present one among them.

    It goes on if the deepest block that is known is at the end of the request that used it last, but for one block,
    which the answer may have filled; and if few have gone on from there, or it is a beginning that many share.
    """
    use = last_known.use
    assert use is not None, "known blocks were used"
    if depth < use.tail_depth - 1 or last_known.num_children >= _MANY_CHILDREN:
        return 1
    return use.turns + 1


def _num_reused(path: list[Node]) -> int | None:
    """Return how many blocks of ``path`` will be used again, as hints have it; None without hints.

    Whoever uses a block uses those above it, so true hints are a row of yes and then a row of no. Where hints
    contradict that, as few as possible are taken to be wrong.
    """
    if path[0].reuse_hint is None:
        return None
    best = wrong = sum(node.reuse_hint is True for node in path)  # if none will be
    num_reused = 0
    for depth, node in enumerate(path, start=1):
        wrong += 0 if node.reuse_hint is None else -1 if node.reuse_hint else 1
        if wrong < best:
            best, num_reused = wrong, depth
    return num_reused
