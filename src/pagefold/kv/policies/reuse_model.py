"""ReuseModel: how soon blocks of a kind come back, learned from how soon they did; and what that makes them worth.

Three steps, each from a paper or a textbook:

1. *Hazards.* Of all uses that reached an age without being followed by another, what share was followed at that age?
   The actuarial estimate (E. L. Kaplan and P. Meier, "Nonparametric estimation from incomplete observations", JASA
   1958, section 2): a use that is still waiting, or that was forgotten, counts as far as it came.
2. *Kinds.* A use has several features of a few values each. Its hazard is that of all uses of its group, times a factor
   for each feature (D. R. Cox, "Regression models and life-tables", JRSS B 1972, with all features categorical). A
   factor is hits over expected hits, by turns until they agree, and begins as ``_BELIEFS`` has it: so a kind that was
   seen twice is judged by what it has in common with others.
3. *Worth.* A block of age ``a`` that is kept until age ``b`` or its next use costs the time it stays, and finds what
   comes back meanwhile. Its worth is the best ratio of the two over all ``b``: J. C. Gittins' index ("Bandit processes
   and dynamic allocation indices", JRSS B 1979). With one ``b`` for all it is the hit density of N. Beckmann, H. Chen,
   A. Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018, section 3. Worth may grow with age:
   somebody who reads an answer first asks the next question after a while.
"""

from __future__ import annotations

from itertools import accumulate
from math import log2
from operator import add, mul
from typing import TYPE_CHECKING, NamedTuple

from pagefold.kv.policies.ages import NUM_AGES, RANGE_LENGTHS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.kv.policies.aging import Ranks

__all__ = ["NUM_LEVELS", "Kind", "ReuseModel"]


class Kind(NamedTuple):
    """What a use of a block had in common with other uses.

    Attributes:
        shared: 0 for a block of one conversation; for one that many share, 1 + log2 of how often it was used.
        turns: how many requests the conversation had, at most 6.
        new_length: log2 of the tokens that its last request added.
        is_tail: the last block of its request.
        is_new: its request was the first to have it.
        num_uses: of the block, at most 3.
        hint: what somebody said of its future: 0 nothing, 1 that it will be used again, 2 that it will not.
    """

    shared: int
    turns: int
    new_length: int
    is_tail: bool
    is_new: bool
    num_uses: int
    hint: int


_LEVELS_PER_OCTAVE = 2
_MOST_LEVEL = 12
NUM_LEVELS = 2 * _MOST_LEVEL + 1
"""Classes of a group: kinds of about the same factor."""

_GROUP_STRENGTH = 16
_FACTOR_STRENGTH = 40
"""How many uses a belief counts as much as."""

_BELIEF_HAZARD = 0.04
"""The hazard of a range of ages that nothing is known of yet: a tail like a power law, which is LRU's own belief."""

_TURN = 1.25
_LENGTH = 0.8
_TAIL = 0.2
_MEAN_LENGTH = 11
_MEAN_TURNS = 2
_ROUNDS = 3
_FORGET = 0.99
_MOST_HAZARD = 0.9
_HINTS = (1.0, 2.0, 0.3)

_RISK_US, _EXPECTED_US = 20, 8
_NONE = [0.0] * NUM_AGES


class _Counts:
    """What became of the uses of one kind, by age: how many were followed by another, how many were lost sight of."""

    __slots__ = ("hits", "lost")

    def __init__(self) -> None:
        self.hits = [0.0] * NUM_AGES
        self.lost = [0.0] * NUM_AGES

    def fade(self) -> None:
        """Count the past a little less, in new lists."""
        self.hits = [_FORGET * value for value in self.hits]
        self.lost = [_FORGET * value for value in self.lost]


class _Risk(NamedTuple):
    """Of one kind: hits by age, and how many uses reached each age."""

    hits: list[float]
    at_risk: list[float]


class _Worths(dict[int, list[float]]):
    def __init__(self, base: list[list[float]]) -> None:
        super().__init__()
        self._base = list(base)

    def __missing__(self, class_index: int) -> list[float]:
        group, level = divmod(class_index, NUM_LEVELS)
        worth = self[class_index] = _worth(self._base[group], 2.0 ** ((level - _MOST_LEVEL) / _LEVELS_PER_OCTAVE))
        return worth


class ReuseModel:
    """Learns from ``hit`` and ``lose``; ``fit`` makes ranks of it. Counts are of blocks.

    Two groups have hazards of their own: blocks of one conversation, and shared ones. A class is a group and a level of
    factors.
    """

    def __init__(self) -> None:
        self._counts: dict[Kind, _Counts] = {}
        self._classes: dict[Kind, int] = {}
        self._base: list[list[float]] = [[_BELIEF_HAZARD] * NUM_AGES] * 2

    def hit(self, kind: Kind, age: int, num_blocks: int) -> None:
        """Count blocks that were used again at that range of ages."""
        self._counts_of(kind).hits[age] += num_blocks

    def lose(self, kind: Kind, age: int, num_blocks: int) -> None:
        """Count blocks that were not used again up to that range of ages, and are looked after no more."""
        self._counts_of(kind).lost[age] += num_blocks

    def class_of(self, kind: Kind) -> int:
        """Return the class of ``kind``, one of ``2 * NUM_LEVELS``."""
        known = self._classes.get(kind)
        if known is None:
            known = self._classes[kind] = _class_of(kind, _belief(kind))
        return known

    def ranks(self) -> Ranks:
        """Return the worth of every class at every age, by what is known now; each is computed when it is asked for."""
        return _Worths(self._base)

    def fit(self, waiting: dict[Kind, list[float]], blocks_per_use: float) -> Iterator[int]:
        """Estimate hazards and factors anew, piece by piece: each yields what it took, in about microseconds.

        Args:
            waiting: blocks of uses that nothing has become of yet: by kind, then by range of ages.
            blocks_per_use: how many blocks a use has, on average: what beliefs are weighed in.
        """
        risks: dict[Kind, _Risk] = {}
        sums = (_no_risk(), _no_risk())
        for kind in dict.fromkeys((*self._counts, *waiting)):
            counts = self._counts_of(kind)
            risks[kind] = risk = _risk(counts, waiting.get(kind, _NONE))
            _add(sums[kind.shared > 0], risk)
            counts.fade()
            yield _RISK_US
        every = _no_risk()
        for its in sums:
            _add(every, its)
        everywhere = _hazards(every, [_BELIEF_HAZARD] * NUM_AGES, _GROUP_STRENGTH * blocks_per_use)
        for group, its in enumerate(sums):
            self._base[group] = base = _hazards(its, everywhere, _GROUP_STRENGTH * blocks_per_use)
            members = {kind: risk for kind, risk in risks.items() if (kind.shared > 0) == group}
            yield from _fit_factors(members, base, _FACTOR_STRENGTH * blocks_per_use, self._classes)

    def _counts_of(self, kind: Kind) -> _Counts:
        counts = self._counts.get(kind)
        if counts is None:
            counts = self._counts[kind] = _Counts()
        return counts


def _class_of(kind: Kind, factor: float) -> int:
    level = max(-_MOST_LEVEL, min(_MOST_LEVEL, round(_LEVELS_PER_OCTAVE * log2(factor))))
    return (kind.shared > 0) * NUM_LEVELS + level + _MOST_LEVEL


def _belief(kind: Kind) -> float:
    belief = 1.0
    for feature, value in enumerate(kind):
        belief *= _believed(feature, value)
    return belief


def _believed(feature: int, value: int) -> float:
    """Return the factor that a feature's value has before anything was seen.

    As everywhere in caching: what was used more is used more, and what is large is used less.
    """
    if feature == Kind._fields.index("turns"):
        return _TURN ** (value - _MEAN_TURNS)
    if feature == Kind._fields.index("new_length"):
        return _LENGTH ** (value - _MEAN_LENGTH)
    if feature == Kind._fields.index("is_tail"):
        return _TAIL if value else 1.0
    if feature == Kind._fields.index("hint"):
        return _HINTS[value]
    return 1.0


def _risk(counts: _Counts, waiting: list[float]) -> _Risk:
    ended = list(map(add, counts.lost, waiting))
    reached = accumulate(reversed(list(map(add, counts.hits, ended))))
    at_risk = [num - half / 2 for num, half in zip(reversed(list(reached)), ended, strict=True)]
    return _Risk(counts.hits, at_risk)


def _no_risk() -> _Risk:
    return _Risk([0.0] * NUM_AGES, [0.0] * NUM_AGES)


def _add(total: _Risk, risk: _Risk) -> None:
    total.hits[:] = map(add, total.hits, risk.hits)
    total.at_risk[:] = map(add, total.at_risk, risk.at_risk)


def _hazards(risk: _Risk, belief: list[float], strength: float) -> list[float]:
    return [
        (hits + strength * believed) / (at_risk + strength)
        for hits, at_risk, believed in zip(risk.hits, risk.at_risk, belief, strict=True)
    ]


def _fit_factors(
    risks: dict[Kind, _Risk], base: list[float], strength: float, classes: dict[Kind, int]
) -> Iterator[int]:
    """Put the class of each kind into ``classes``, by factors such that each feature's value has the hits expected.

    Yields as :meth:`ReuseModel.fit` does.
    """
    hits = {kind: sum(risk.hits) for kind, risk in risks.items()}
    expected = {kind: sum(map(mul, risk.at_risk, base)) for kind, risk in risks.items()}
    product = {kind: _belief(kind) for kind in risks}
    yield _EXPECTED_US * len(risks)
    num_features = len(Kind._fields)
    factors: list[dict[int, float]] = [
        {kind[feature]: _believed(feature, kind[feature]) for kind in risks} for feature in range(num_features)
    ]
    for _ in range(_ROUNDS):
        for feature in range(num_features):
            values = factors[feature]
            hits_of = dict.fromkeys(values, 0.0)
            expected_of = dict.fromkeys(values, 0.0)
            for kind in risks:
                value = kind[feature]
                hits_of[value] += hits[kind]
                expected_of[value] += expected[kind] * product[kind] / values[value]
            changed = {
                value: (hits_of[value] + strength * _believed(feature, value)) / (expected_of[value] + strength)
                for value in values
            }
            for kind in risks:
                product[kind] *= changed[kind[feature]] / values[kind[feature]]
            factors[feature] = changed
            yield len(risks)
    for kind, factor in product.items():
        classes[kind] = _class_of(kind, factor)


def _worth(base: list[float], factor: float) -> list[float]:
    """Return, for each range of ages, the most hits per time that keeping a block from then on can find."""
    hazards = [min(_MOST_HAZARD, factor * hazard) for hazard in base]
    densities = [hazard / (length * (1 - hazard / 2)) for hazard, length in zip(hazards, RANGE_LENGTHS, strict=True)]
    densest = list(accumulate(reversed(densities), max))[::-1]  # from each age on: no ratio can grow beyond it
    worth = []
    for start in range(NUM_AGES):
        alive, hits, time, best = 1.0, 0.0, 0.0, 0.0
        for age in range(start, NUM_AGES):
            if densest[age] <= best:
                break
            length = RANGE_LENGTHS[age] / 2 if age == start else RANGE_LENGTHS[age]
            hit = alive * hazards[age]
            time += length * (alive - hit / 2)
            hits += hit
            alive -= hit
            best = max(best, hits / time)
        worth.append(best)
    return worth
