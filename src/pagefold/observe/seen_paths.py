"""SeenPaths: which paths of blocks a cache has had, and what became of each: cached now, or gone, why and for whom.

A path is known by the first 8 bytes of its digest (``kv/names.py``). Two paths of the same 8 bytes would be taken for
one: with a million paths that happens once in some ten million servers, and what would be wrong is an explanation.

Entries are columns of plain numbers and not objects: 38 bytes each, an index included. When there is no more room, what
is gone longest makes some, and paths that are cached stay as far as one looks (CLOCK; F. J. Corbato, "A paging
experiment with the Multics system", 1968: whoever was used since the hand came by is passed over once).
"""

from __future__ import annotations

from array import array
from enum import IntEnum, IntFlag

__all__ = ["BYTES_PER_PATH", "Mark", "SeenPaths", "State", "key_of"]

BYTES_PER_PATH = 38
"""Of an entry: two places of the index (4 each), key and time (8 each), three numbers (4 each), era and bits."""

_MOST_LOOKED_AT = 64
"""So many entries the hand passes at most for one that makes room: whoever waits for it runs the model."""

_EMPTY = 0
_MAX_ERAS = 255
_MOST_SCORE = 1e38
"""A larger score is not told: no JSON could."""
_KEY_BYTES = 8


def key_of(digest: bytes) -> int:
    """Return what a path is known by, given its digest."""
    return int.from_bytes(digest[:_KEY_BYTES], "little")


class State(IntEnum):
    """What became of a path's last block."""

    NONE = 0
    """It was never published, as far as is known; perhaps a request is about to compute it."""
    CACHED = 1
    """It was published, and is there."""
    EVICTED = 2
    """Its memory was needed."""
    RESET = 3
    """Everything was forgotten, by request."""
    DISTRUSTED = 4
    """It may have been corrupted."""


class Mark(IntFlag):
    """What else is known of a path, in bits behind its state."""

    USED = 8
    """The hand passes it over once."""
    PIN_EXPIRED = 16
    """A pin had kept it, until its time was up."""
    PART_GONE = 32
    """Some of its blocks have gone, and not all."""
    SUPERSEDED = 64
    """It had to go since its session had edited it away, or had ended."""
    SESSION = 128
    """It had to go since its session was expected back last."""


_STATE = 7


class SeenPaths:
    """The paths, by key. Whoever calls holds a lock.

    Args:
        capacity: how many paths are remembered.

    Attributes:
        capacity: as given.
        num_paths: how many are remembered now.
        lost_until_s: of all paths that were forgotten for want of room, when the last of them had left the cache;
            None while none was.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, "a ledger of nothing"
        self.capacity = capacity
        self.num_paths = 0
        self.lost_until_s: float | None = None
        self._num_places = 2 * capacity + 1
        self._index = array("I", bytes(4 * self._num_places))  # key % num_places -> entry + 1, in a row
        self._keys = array("Q", bytes(8 * capacity))
        self._times = array("d", bytes(8 * capacity))
        self._owners = array("I", bytes(4 * capacity))
        self._causers = array("I", bytes(4 * capacity))
        self._scores = array("f", bytes(4 * capacity))
        self._bits = array("B", bytes(capacity))
        self._eras = array("B", bytes(capacity))
        self._hand = 0
        self._era = 0
        self._reset_s = 0.0

    @property
    def num_bytes(self) -> int:
        """What all of it takes."""
        columns = (self._index, self._keys, self._times, self._owners, self._causers, self._scores)
        return sum(len(column) * column.itemsize for column in columns) + len(self._bits) + len(self._eras)

    # What there is.

    def find(self, key: int) -> int:
        """Return the entry of a path; -1 where it is not remembered. It holds until a path is entered."""
        place = key % self._num_places
        index, keys = self._index, self._keys
        while (entry := index[place]) != _EMPTY:
            if keys[entry - 1] == key:
                return entry - 1
            place += 1
            if place == self._num_places:
                place = 0
        return -1

    def state(self, entry: int) -> State:
        """Return what became of a path."""
        state = State(self._bits[entry] & _STATE)
        return State.RESET if state is State.CACHED and self._eras[entry] != self._era else state

    def has(self, entry: int, mark: Mark) -> bool:
        """Whether a path has a mark."""
        return bool(self._bits[entry] & mark)

    def when_s(self, entry: int) -> float:
        """Return since when a path's state is what it is; of one that was reset, when everything was reset last."""
        return self._reset_s if self.state(entry) is State.RESET else self._times[entry]

    def owner(self, entry: int) -> int:
        """Return the number of the last request that was about to compute the path; 0 for none."""
        return self._owners[entry]

    def causer(self, entry: int) -> int:
        """Return the number of the request for which the path had to go; 0 where that is not known."""
        return self._causers[entry]

    def score(self, entry: int) -> float | None:
        """Return what the policy went by when it evicted the path; None where it did not decide."""
        score = self._scores[entry]
        return None if score != score else score  # noqa: PLR0124 - not a number

    # What happens.

    def enter(self, key: int) -> int:
        """Return the entry of a path; a new one, without a state, if it is not remembered."""
        entry = self.find(key)
        if entry >= 0:
            return entry
        entry = self.num_paths
        if entry < self.capacity:
            self.num_paths += 1
        else:
            entry = self._make_room()
        self._keys[entry] = key
        self._owners[entry] = self._causers[entry] = 0
        self._scores[entry] = float("nan")
        self._bits[entry] = State.NONE
        place = key % self._num_places
        while self._index[place] != _EMPTY:
            place = (place + 1) % self._num_places
        self._index[place] = entry + 1
        return entry

    def put(self, entry: int, state: State, now_s: float) -> None:
        """Let a path have a new state, and no marks; nobody is about to compute it any more."""
        self._bits[entry] = state | Mark.USED
        self._owners[entry] = 0
        self._eras[entry] = self._era
        self._times[entry] = now_s

    def evict(self, entry: int, now_s: float, causer: int, score: float | None) -> None:
        """A path had to go: for which request, and what the policy went by. Whether its pin had expired stays."""
        kept = self._bits[entry] & Mark.PIN_EXPIRED
        self.put(entry, State.EVICTED, now_s)
        self._bits[entry] |= kept
        self._causers[entry] = causer
        self._scores[entry] = float("nan") if score is None or abs(score) > _MOST_SCORE else score

    def mark(self, entry: int, mark: Mark) -> None:
        """Give a path a mark."""
        self._bits[entry] |= mark

    def expect(self, entry: int, owner: int) -> None:
        """A request is about to compute a path."""
        self._owners[entry] = owner
        self._bits[entry] |= Mark.USED

    def blame(self, entry: int, causer: int) -> None:
        """A part of a path had to go for a request."""
        self._causers[entry] = causer
        self._bits[entry] |= Mark.PART_GONE

    def reset(self, now_s: float) -> None:
        """Everything was forgotten: at once, whatever is cached."""
        if self._era < _MAX_ERAS:
            self._era += 1
        else:  # eras begin anew: nothing may be of one that comes again
            for entry in range(self.num_paths):
                if self.state(entry) is State.CACHED:
                    self._bits[entry], self._times[entry] = State.RESET, now_s
                elif self.state(entry) is State.RESET:
                    self._bits[entry], self._times[entry] = State.RESET, self.when_s(entry)
                self._eras[entry] = 0
            self._era = 0
        self._reset_s = now_s

    # Inside.

    def _make_room(self) -> int:
        """Forget a path, and return its entry: of the next few one that is gone, and rather one passed over before."""
        bits, used = self._bits, int(Mark.USED)
        gone = -1
        for _ in range(_MOST_LOOKED_AT):
            entry = self._hand
            self._hand = entry + 1 if entry + 1 < self.capacity else 0
            is_cached = self.state(entry) is State.CACHED
            if not is_cached and gone < 0:
                gone = entry
            if bits[entry] & used:
                bits[entry] &= ~used & 0xFF
            elif not is_cached:
                gone = entry
                break
        entry = gone if gone >= 0 else self._hand
        self.lost_until_s = max(self.lost_until_s or 0.0, self.when_s(entry))
        self._take_out(self._keys[entry])
        return entry

    def _take_out(self, key: int) -> None:
        """Take a path out of the index, and move up those behind it that would not be found across the gap."""
        index, keys, num_places = self._index, self._keys, self._num_places
        gap = key % num_places
        while keys[index[gap] - 1] != key:
            gap = (gap + 1) % num_places
        place = gap
        while True:
            place = (place + 1) % num_places
            entry = index[place]
            if entry == _EMPTY:
                break
            home = keys[entry - 1] % num_places
            if (place - home) % num_places >= (place - gap) % num_places:
                index[gap] = entry
                gap = place
        index[gap] = _EMPTY
