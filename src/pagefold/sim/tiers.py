"""Tiers in the simulator: the real decisions, and modelled bytes.

Decided by ``kv/host_tier.py``, ``kv/slow_tiers.py``, ``kv/arbiter.py`` and ``scheduler/tiering.py``, as in a server.

The host's memory moves blocks within a step, at its bandwidth. A disk moves them beside the steps, one batch after
another, each at a latency and the bandwidth; some of its blocks come back wrong, drawn by a seed, and are misses.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.kv import KEEP_ALL, NO_HOST, NO_SLOW_TIERS, Arbiter, HostTier, LinkModel, SlowTiers, blocks_per_place
from pagefold.kv.transfers import Fetched, Found, MissCause, TierUse, Written

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.kv import BlockName, Fetch, HostOps, KeepRule, WriteOp, WritePolicy
    from pagefold.kv.transfers import Outcome
    from pagefold.sim.clock import VirtualClock

__all__ = ["DISK", "SimArena", "SimTransfers", "TierModel"]

DISK = "disk"

_BATCH_BYTES = 8 * 2**20
"""Blocks come in batches of about so many bytes, as from a real disk."""

_MOST_BYTES = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class TierModel:
    """The memory behind the device, and how fast it is.

    Attributes:
        host_tokens: that the host's memory holds; 0 for no tiers at all.
        disk_tokens: that a disk holds; 0 for none.
        token_bytes: bytes of KV that a token takes.
        host_bytes_per_s: between host and device.
        disk_bytes_per_s: of reading and of writing.
        disk_latency_s: of each batch.
        fault_rate: share of the blocks read from the disk that are not what was written.
        write_policy: when blocks are written to the disk.
        seed: of the faults.

    Raises:
        ConfigError: a value is out of range.
    """

    host_tokens: int = 0
    disk_tokens: int = 0
    token_bytes: int = 46_080
    host_bytes_per_s: float = 8e9
    disk_bytes_per_s: float = 2e9
    disk_latency_s: float = 2e-4
    fault_rate: float = 0.0
    write_policy: WritePolicy = "write_back"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("host_tokens", "disk_tokens"):
            if getattr(self, name) < 0:
                raise _bad(name, getattr(self, name), "a number of tokens, 0 for none")
        if self.disk_tokens and not self.host_tokens:
            msg = "A disk is given, and no host memory for its blocks to go through."
            raise ConfigError(msg, remedy="Give host_tokens too.")
        if not 1 <= self.token_bytes <= _MOST_BYTES:
            raise _bad("token_bytes", self.token_bytes, "at least 1 byte")
        for name in ("host_bytes_per_s", "disk_bytes_per_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise _bad(name, getattr(self, name), "a positive number of bytes a second")
        if not 0 <= self.disk_latency_s < float("inf"):
            raise _bad("disk_latency_s", self.disk_latency_s, "a number of seconds")
        if not 0 <= self.fault_rate <= 1:
            raise _bad("fault_rate", self.fault_rate, "between 0 and 1")

    def block_bytes(self, block_size: int, num_groups: int = 1) -> int:
        """Return the bytes of a block, of which each cache group has one for so many tokens."""
        return self.token_bytes * block_size // num_groups

    def host(self, block_size: int, num_groups: int = 1) -> HostTier:
        """Return the host tier; ``NO_HOST`` without tiers.

        Args:
            block_size: tokens a block.
            num_groups: cache groups, each of which has blocks of its own.

        Raises:
            ConfigError: it is smaller than a block.
        """
        if not self.host_tokens:
            return NO_HOST
        if self.host_tokens < block_size:
            raise _bad("host_tokens", self.host_tokens, f"at least a block of {block_size} tokens")
        return HostTier(self.host_tokens // block_size * num_groups, notes_unsaved=bool(self.disk_tokens))

    def slow(
        self, host: HostTier, block_size: int, compute_s_per_token: float, rules: Sequence[KeepRule] = (KEEP_ALL,)
    ) -> SlowTiers:
        """Return what is behind the host tier; ``NO_SLOW_TIERS`` without a disk.

        Args:
            host: the host tier.
            block_size: tokens a block.
            compute_s_per_token: what prefilling takes.
            rules: what each cache group keeps.
        """
        if not host.is_on or not self.disk_tokens:
            return NO_SLOW_TIERS
        arbiter = Arbiter(
            self.block_bytes(block_size, len(rules)),
            block_size,
            compute_s_per_token=compute_s_per_token,
            blocks_per_place=blocks_per_place(rules),
        )
        arbiter.links[DISK] = LinkModel(self.disk_latency_s, self.disk_bytes_per_s)
        return SlowTiers(host, self.write_policy, arbiter)

    def step_s(self, ops: HostOps, block_size: int, num_groups: int = 1) -> float:
        """Return the seconds that a step's moves between host and device take."""
        num_bytes = (len(ops.stores) + len(ops.loads)) * self.block_bytes(block_size, num_groups)
        return num_bytes / self.host_bytes_per_s


class SimArena:
    """Stands for the host's arena: there are no bytes."""

    def arrived(self, host_id: int, checksum: bytes) -> None:
        """See :class:`~pagefold.scheduler.tiering.Arena`."""


class SimTransfers:
    """A disk in virtual time: see :class:`~pagefold.kv.transfers.Transfers`. It reads and writes one batch at a time.

    Args:
        model: how fast, how large, how often wrong.
        block_size: tokens a block.
        clock: virtual; :meth:`collect` moves it on where it is told to wait.
    """

    def __init__(self, model: TierModel, block_size: int, clock: VirtualClock, num_groups: int = 1) -> None:
        self.tiers = [DISK]
        self.notify: Callable[[], None] = lambda: None  # time stands still meanwhile: nobody need be told
        self._model = model
        self._clock = clock
        self._random = Random(model.seed)  # noqa: S311 - faults, not secrets
        self._block_bytes = model.block_bytes(block_size, num_groups)
        self._num_batch = max(1, _BATCH_BYTES // self._block_bytes)
        self._most = model.disk_tokens // block_size * num_groups
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()  # notes by digest, least recently used first
        self._due: list[tuple[float, int, Fetch | None, Outcome]] = []
        self._num_begun = 0
        self._free_s = {"look": 0.0, "read": 0.0, "write": 0.0}

    @property
    def next_due_s(self) -> float:
        """When something will have happened; inf for never."""
        return self._due[0][0] if self._due else float("inf")

    def uses(self) -> dict[str, TierUse]:
        """Return what the disk has."""
        return {DISK: TierUse(len(self._kept), self._most)}

    def count(self, tier: str, names: Sequence[BlockName]) -> int:
        """Return how many of ``names`` are kept, from the first on."""
        assert tier == DISK
        return next((at for at, name in enumerate(names) if name.digest not in self._kept), len(names))

    def look(self, tier: str, names: Sequence[BlockName], ticket: int) -> None:
        """Answer as if asked with :meth:`count`: a disk knows at once."""
        self._begin("look", 0.0, None, Found(tier, ticket, self.count(tier, names)))

    def fetch(self, fetch: Fetch) -> None:
        """Read what a fetch lacks, batch by batch."""
        for tier, ops in fetch.ops.items():
            for at in range(0, len(ops), self._num_batch):
                batch = ops[at : at + self._num_batch]
                found = [self._read(op.name) for op in batch]
                seconds = self._seconds(len(batch))
                notes = {op.host_id: self._kept.get(op.name.digest, b"") for op in batch}
                self._begin("read", seconds, fetch, Fetched(tier, batch, found, seconds, notes))

    def write(self, ops: Sequence[WriteOp]) -> None:
        """Write blocks; those used longest ago make room."""
        if not ops:
            return
        for op in ops:
            self._kept.setdefault(op.name.digest, op.note)  # what is known is not rewritten
            self._kept.move_to_end(op.name.digest)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        num_kept = sum(op.name.digest in self._kept for op in ops)
        self._begin("write", self._seconds(len(ops)), None, Written(ops, num_kept))

    def collect(self, timeout_s: float = 0.0) -> list[Outcome]:
        """Return what has happened up to now."""
        if timeout_s > 0:
            self._clock.advance_to(min(self._clock() + timeout_s, self.next_due_s))
        outcomes: list[Outcome] = []
        while self._due and self._due[0][0] <= self._clock():
            _, _, fetch, outcome = heapq.heappop(self._due)
            if fetch is not None and not fetch.is_wanted and isinstance(outcome, Fetched):
                outcome = outcome._replace(found=[MissCause.LATE] * len(outcome.ops))
            outcomes.append(outcome)
        return outcomes

    def forget(self, digests: Sequence[bytes]) -> None:
        """Forget these blocks at once."""
        for digest in digests:
            self._kept.pop(digest, None)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def close(self, timeout_s: float = 0.0) -> None:
        """Nothing is open."""

    def _seconds(self, num_blocks: int) -> float:
        return self._model.disk_latency_s + num_blocks * self._block_bytes / self._model.disk_bytes_per_s

    def _begin(self, lane: str, seconds: float, fetch: Fetch | None, outcome: Outcome) -> None:
        self._free_s[lane] = done_s = max(self._clock(), self._free_s[lane]) + seconds
        self._num_begun += 1
        heapq.heappush(self._due, (done_s, self._num_begun, fetch, outcome))

    def _read(self, name: BlockName) -> bytes | MissCause:
        if name.digest not in self._kept:
            return MissCause.ABSENT
        if self._random.random() < self._model.fault_rate:
            del self._kept[name.digest]
            return MissCause.DAMAGED
        self._kept.move_to_end(name.digest)
        return b"right"


def _bad(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name} is {value}.", remedy=f"It must be {allowed}.")
