"""UseLog: which blocks prompts used lately, of a sample of all blocks. Bounded; what a curve is made of.

The sample is by place, not by time: a block is in it if its path's key, which is a piece of a digest, is below a bound,
so it is in it whenever it is used (C. A. Waldspurger et al., "Efficient MRC construction with SHARDS", FAST'15). The
bound begins where every block is in the sample. When the log is full it is halved, and what is no longer below it is
dropped, as in the paper's fixed-size variant (section 3.4, where one block after another goes); down to a least rate,
and from there on the oldest uses go. So the log begins exact, and reaches far back where much is going on.

Columns of plain numbers: 8 bytes a block of the sample, and 25 a use that has any.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Use", "UseLog", "Uses"]

_ALL = 2**64
_WARM_SHARE = 0.25
"""Of the blocks in a log that has forgotten any."""

_SLACK = 8
"""One in so many of what is in the columns may be forgotten already."""

_COLUMNS = ("_keys", "_num_keys", "_num_blocks", "_num_tokens", "_at_s", "_is_lookup")


class Use(NamedTuple):
    """One prompt's blocks, as far as they are in the sample.

    Attributes:
        keys: of their paths, from the first on.
        num_blocks: full blocks that were looked up: of the prompt, in the sample or not, and of those that came after
            it and had none in it.
        num_tokens: of those prompts.
        is_lookup: whether ``keys`` were looked up; else they are used once more, with what was generated behind them.
        at_s: when.
    """

    keys: array[int]
    num_blocks: int
    num_tokens: int
    is_lookup: bool
    at_s: float


class Uses(NamedTuple):
    """A log as it was at one time.

    Attributes:
        uses: in their order.
        num_warm: the first so many only fill a cache, since what was used before them is forgotten.
        rate: share of the blocks that are in the sample.
    """

    uses: tuple[Use, ...]
    num_warm: int
    rate: float

    @property
    def counted(self) -> tuple[Use, ...]:
        """Those that are not there to fill a cache."""
        return self.uses[self.num_warm :]

    def sampled(self, rate: float, most_keys: int) -> Uses:
        """Return the same of a share ``rate`` of all blocks at most, and of those the last ``most_keys`` uses."""
        if rate >= self.rate:
            return self.last(most_keys)
        bound = int(rate * _ALL)
        fewer = tuple(use._replace(keys=array("Q", (key for key in use.keys if key < bound))) for use in self.uses)
        return Uses(fewer, self.num_warm, rate).last(most_keys)

    def last(self, most_keys: int) -> Uses:
        """Return the last uses, of so many blocks; the first of those fill a cache."""
        num_keys, first = 0, len(self.uses)
        while first and num_keys + len(self.uses[first - 1].keys) <= most_keys:
            first -= 1
            num_keys += len(self.uses[first].keys)
        if not first:
            return self
        kept = self.uses[first:]
        return Uses(kept, max(self.num_warm - first, _num_warm([len(use.keys) for use in kept])), self.rate)


class UseLog:
    """The log. Whoever calls holds a lock.

    Args:
        most_keys: how many blocks it has at most, each as often as it was used.
        least_rate: where the sample has no larger share of all blocks, it stays as it is, and the oldest uses go.

    Attributes:
        bound: a block whose key is below it is in the sample.
        has_dropped: whether uses are forgotten.
    """

    def __init__(self, most_keys: int, least_rate: float = 0.0) -> None:
        self._most_keys = most_keys
        self._least_rate = least_rate
        self.bound = _ALL
        self.has_dropped = False
        self._keys = array("Q")
        self._num_keys = array("I")  # of each use, as all below
        self._num_blocks = array("Q")  # with those of uses that have no block in the sample, which never end
        self._num_tokens = array("Q")
        self._at_s = array("d")
        self._is_lookup = array("B")
        self._first_key = self._first_use = 0  # what is before them is dropped

    @property
    def rate(self) -> float:
        """Share of the blocks that are in the sample."""
        return self.bound / _ALL

    @property
    def num_keys(self) -> int:
        """Blocks that it has, each as often as it was used."""
        return len(self._keys) - self._first_key

    @property
    def num_bytes(self) -> int:
        """What its columns take."""
        columns: list[array[int]] = [getattr(self, name) for name in _COLUMNS]
        return sum(len(column) * column.itemsize for column in columns)

    def look_up(self, keys: Iterable[int], num_blocks: int, num_tokens: int, at_s: float) -> None:
        """Note that a prompt was looked up.

        Args:
            keys: of the paths of its full blocks.
            num_blocks: how many of those it has.
            num_tokens: how many tokens.
            at_s: when.
        """
        bound = self.bound
        chosen = array("Q", [key for key in keys if key < bound])
        self._append(chosen, num_blocks, num_tokens, at_s, is_lookup=True)

    def use_again(self, keys: Iterable[int], at_s: float) -> None:
        """Note that a prompt has ended, with what was generated behind it."""
        bound = self.bound
        chosen = array("Q", [key for key in keys if key < bound])
        if chosen:
            self._append(chosen, 0, 0, at_s, is_lookup=False)

    def copy(self) -> UseLog:
        """Return another with the same in it: quick, for whoever holds a lock."""
        other = UseLog(self._most_keys, self._least_rate)
        other.bound, other.has_dropped = self.bound, self.has_dropped
        other._first_key, other._first_use = self._first_key, self._first_use
        for name in _COLUMNS:
            setattr(other, name, getattr(self, name)[:])
        return other

    def uses(self) -> Uses:
        """Return what it has."""
        uses = tuple(self._uses())
        num_warm = _num_warm([len(use.keys) for use in uses]) if self.has_dropped else 0
        return Uses(uses, num_warm, self.rate)

    # Inside.

    def _uses(self) -> Iterator[Use]:
        begin = self._first_key
        for use in range(self._first_use, len(self._num_keys)):
            end = begin + self._num_keys[use]
            is_lookup = bool(self._is_lookup[use])
            yield Use(self._keys[begin:end], self._num_blocks[use], self._num_tokens[use], is_lookup, self._at_s[use])
            begin = end

    def _append(self, keys: array[int], num_blocks: int, num_tokens: int, at_s: float, *, is_lookup: bool) -> None:
        """Append a use, and make room; one without blocks is counted with the one before."""
        if not keys and len(self._num_keys) > self._first_use:
            self._num_blocks[-1] += num_blocks
            self._num_tokens[-1] += num_tokens
            return
        self._keys.extend(keys)
        self._num_keys.append(len(keys))
        self._num_blocks.append(num_blocks)
        self._num_tokens.append(num_tokens)
        self._at_s.append(at_s)
        self._is_lookup.append(is_lookup)
        while self.num_keys > self._most_keys and len(self._num_keys) - self._first_use > 1:
            if self.rate > self._least_rate:
                self._halve()
            else:
                self._drop_first()

    def _halve(self) -> None:
        """Look at half as many blocks from now on, and forget the others."""
        before = tuple(self._uses())
        self._forget_all()
        self.bound //= 2
        bound = self.bound
        for use in before:
            keys = array("Q", [key for key in use.keys if key < bound])
            self._append(keys, use.num_blocks, use.num_tokens, use.at_s, is_lookup=use.is_lookup)

    def _drop_first(self) -> None:
        """Forget the oldest use."""
        self.has_dropped = True
        self._first_key += self._num_keys[self._first_use]
        self._first_use += 1
        if self._first_use > len(self._num_keys) // _SLACK:
            for column in (self._num_keys, self._num_blocks, self._num_tokens, self._at_s, self._is_lookup):
                del column[: self._first_use]
            self._first_use = 0
        if self._first_key > len(self._keys) // _SLACK:
            del self._keys[: self._first_key]
            self._first_key = 0

    def _forget_all(self) -> None:
        self._first_key = self._first_use = 0
        for column in (self._keys, self._num_keys, self._num_blocks, self._num_tokens, self._at_s, self._is_lookup):
            del column[:]


def _num_warm(num_keys: list[int]) -> int:
    """Return how many of the first uses, of so many blocks each, only fill a cache."""
    left = sum(num_keys) * _WARM_SHARE
    for use, num in enumerate(num_keys):
        if left <= 0:
            return use
        left -= num
    return len(num_keys)
