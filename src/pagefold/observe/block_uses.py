"""BlockUses: which blocks requests use, for curves: of all together, and of each tenant's own. The ledger tells it.

What comes is little to do on the engine's thread: a block is put into the logs (``use_log.py``) whose sample it is in,
and nothing is worked out of them until somebody asks (``whatif.py``).
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from pagefold.events import CacheConfigured
from pagefold.observe.use_log import UseLog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.observe.use_log import Uses

__all__ = ["MOST_TENANTS", "BlockUses", "Sizes", "Told"]

_log = logging.getLogger(__name__)

MOST_TENANTS = 64
"""So many have logs, those that were used last."""

_MOST_KEYS, _MOST_TENANT_KEYS = 131_072, 4096
_REACH = 32
"""Logs that are full reach so many times as many lookups back as all tiers have blocks, where that is not too few of
the device's."""
_MOST_ANSWERS = 8
"""Of a request are noted, each with its whole prompt: a log that is full of copies would reach less far."""
_LEAST_OF_DEVICE = 128
"""So many of the device's blocks are in a sample at least."""


class Sizes(NamedTuple):
    """How much a cache has now. A block is what a place of a path takes: one of each cache group that keeps all.

    Attributes:
        num_blocks: of the device.
        num_host_blocks: of the host's memory; 0 without.
        num_disk_blocks: of the disk; 0 without.
        block_size: tokens a block.
        bytes_per_block: of it; 0 where nobody said.
        policy: what chooses who is evicted from the device.
        publishes: whether anything is ever cached.
        blocks_per_place: blocks of the pool that each of these is.
    """

    num_blocks: int = 0
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    block_size: int = 1
    bytes_per_block: int = 0
    policy: str = ""
    publishes: bool = False
    blocks_per_place: int = 1


class Told(NamedTuple):
    """What was used, as it was when somebody asked.

    Attributes:
        uses: of whom he asked for.
        sizes: of the cache.
        now_s: when.
    """

    uses: Uses
    sizes: Sizes
    now_s: float


class _Open(NamedTuple):
    """A request that has not ended.

    Attributes:
        tenant: whose.
        num_prompt_blocks: full ones.
        prompt: keys of their paths that are in anybody's sample.
        answers: the same of what is behind the prompt, by the answer's name; they grow.
    """

    tenant: str
    num_prompt_blocks: int
    prompt: array[int]
    answers: dict[str, array[int]]


class BlockUses:
    """Remembers uses, from when it is told that there is a cache.

    Args:
        clock: seconds, the engine's.

    Attributes:
        has_failed: a bug of ours has ended it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.has_failed = False
        self.begin(CacheConfigured({}))

    def begin(self, event: CacheConfigured) -> None:
        """Begin anew, for a cache of that size."""
        each = max(1, event.blocks_per_place)
        self.sizes = Sizes(
            event.num_blocks // each,
            event.num_host_blocks // each,
            event.num_disk_blocks // each,
            max(1, event.block_size),
            event.bytes_per_block * each,
            event.eviction_policy,
            event.publishes,
            each,
        )
        with self._lock:
            self._all = self._log(_MOST_KEYS)
            self._of: OrderedDict[str, UseLog] = OrderedDict()
            self._open: dict[int, _Open] = {}

    # What the ledger tells, on the engine's thread.

    def follow(self, policy: str) -> None:
        """Note that another policy chooses from now on."""
        self.sizes = self.sizes._replace(policy=policy)

    def look_up(self, number: int, tenant: str, keys: Sequence[int], num_tokens: int) -> None:
        """Note that a request was let in for the first time.

        Args:
            number: of it.
            tenant: whose it is.
            keys: of the paths of all full blocks of its prompt.
            num_tokens: of its prompt.
        """
        self._contained(lambda: self._look_up(number, tenant, keys, num_tokens))

    def publish(self, number: int, answer: str, depth: int, keys: Sequence[int]) -> None:
        """Note that a request has published blocks: those of its answer are used from now on.

        Args:
            number: of it.
            answer: names which of its answers goes on so, where it asked for several: each has a path of its own.
            depth: of the first of them; the first block of a prompt has 0.
            keys: of their paths.
        """
        self._contained(lambda: self._publish(number, answer, depth, keys))

    def end(self, number: int) -> None:
        """Note that a request has ended: the paths of its answers have been used until now."""
        self._contained(lambda: self._end(number))

    # What is asked, on any other thread.

    def told(self, tenant: str | None) -> Told:
        """Return what a tenant used; or all, for None."""
        with self._lock:
            log = self._all if tenant is None else self._of.get(tenant) or self._log(_MOST_TENANT_KEYS)
            uses = log.copy()
        return Told(uses.uses(), self.sizes, self._clock())

    def tenants(self) -> list[str]:
        """Return whose uses are remembered, the last first."""
        with self._lock:
            return list(reversed(self._of))

    @property
    def num_bytes(self) -> int:
        """What the logs take."""
        with self._lock:
            return sum(log.num_bytes for log in (self._all, *self._of.values()))

    # Inside.

    def _contained(self, note: Callable[[], None]) -> None:
        """Note something. Should that fail, nothing is noted any more: the ledger, and requests, go on."""
        if self.has_failed or not self.sizes.publishes:
            return
        try:
            with self._lock:
                note()
        except Exception:  # noqa: BLE001 - whatever it is, requests are served
            self.has_failed = True
            _log.exception("uses of blocks are not noted any more: no curve is told from now on")

    def _look_up(self, number: int, tenant: str, keys: Sequence[int], num_tokens: int) -> None:
        now_s = self._clock()
        own = self._of.get(tenant)
        if own is None:
            own = self._of[tenant] = self._log(_MOST_TENANT_KEYS)
            if len(self._of) > MOST_TENANTS:
                self._of.popitem(last=False)
        self._of.move_to_end(tenant)
        bound = max(self._all.bound, own.bound)
        sampled = array("Q", [key for key in keys if key < bound])
        for log in (self._all, own):
            log.look_up(sampled, len(keys), num_tokens, now_s)
        self._open[number] = _Open(tenant, len(keys), sampled, {})

    def _publish(self, number: int, answer: str, depth: int, keys: Sequence[int]) -> None:
        opened = self._open.get(number)
        if opened is None:
            return
        own = self._of.get(opened.tenant)
        bound = self._all.bound if own is None else max(self._all.bound, own.bound)
        path = opened.answers.setdefault(answer, array("Q"))
        known = {*opened.prompt, *path}  # those that were published again
        new = keys[max(0, opened.num_prompt_blocks - depth) :]
        path.extend(key for key in new if key < bound and key not in known)

    def _end(self, number: int) -> None:
        opened = self._open.pop(number, None)
        if opened is None:
            return
        now_s = self._clock()
        for path in islice(filter(None, opened.answers.values()), _MOST_ANSWERS):
            for log in (self._all, self._of.get(opened.tenant)):
                if log is not None:
                    log.use_again(opened.prompt + path, now_s)

    def _log(self, most_keys: int) -> UseLog:
        """Return an empty log that will reach far enough back."""
        sizes = self.sizes
        of_all = sizes.num_blocks + sizes.num_host_blocks + sizes.num_disk_blocks
        least = max(most_keys / max(1, _REACH * of_all), _LEAST_OF_DEVICE / max(1, sizes.num_blocks))
        return UseLog(most_keys, min(1.0, least))
