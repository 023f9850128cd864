"""MemoryStore: a slow tier in this process, which keeps whole frames and goes wrong as often as it is told to."""

from __future__ import annotations

import threading
import time
from random import Random
from typing import TYPE_CHECKING

from pagefold.store import FrameFormat, MissCause, SelfTest, StoreError, StoreUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.engine.engine import Engine
    from pagefold.kv import BlockName
    from pagefold.kv.transfers import TierUse
    from pagefold.store import Get, Put

__all__ = ["MemoryStore", "always_load"]


def always_load(engine: Engine) -> None:
    """Let an engine load whatever it can: a tiny model is computed sooner than anything is brought."""
    assert engine.tiering.is_on
    core = engine.scheduler.core
    core.slow.arbiter.compute_s_per_token = 1.0
    engine.tiering.computed = lambda *_: None  # type: ignore[method-assign]


class MemoryStore:
    """Keeps frames in a dict.

    Args:
        frames: of its blocks.
        tier: what it is called.
        fault_rate: of a block that is asked for: its bytes turn, it is lost, or the whole call fails.
        delay_s: of every call.
        seed: of the faults.
    """

    is_out = False

    def __init__(
        self, frames: FrameFormat, *, tier: str = "disk", fault_rate: float = 0.0, delay_s: float = 0.0, seed: int = 0
    ) -> None:
        self.tier = tier
        self.frames = frames
        self.fault_rate = fault_rate
        self.delay_s = delay_s
        self.kept: dict[bytes, bytes] = {}
        self.num_faults = 0
        self.is_closed = False
        self._random = Random(seed)
        self._lock = threading.Lock()

    def put(self, puts: Sequence[Put]) -> int:
        time.sleep(self.delay_s)
        with self._lock:
            for name, payload, checksum, note in puts:
                self.kept[name.digest] = self.frames.header(name, checksum, note=note) + bytes(payload)
        return len(puts)

    def get(self, gets: Sequence[Get]) -> list[bytes | MissCause]:
        time.sleep(self.delay_s)
        with self._lock:
            return [self._get(get) for get in gets]

    def _get(self, get: Get) -> bytes | MissCause:
        name, into, note = get
        frame = bytearray(self.kept.get(name.digest, b""))
        if not frame:
            return MissCause.ABSENT
        if self._random.random() < self.fault_rate:
            self.num_faults += 1
            kind = self._random.randrange(3)
            if kind == 0:
                frame[self._random.randrange(len(frame))] ^= 1 << self._random.randrange(8)
            elif kind == 1:
                del self.kept[name.digest]
                return MissCause.ABSENT
            else:
                msg = "the store fails"
                raise StoreError(msg)
        into[:] = frame[self.frames.header_bytes :]
        found = self.frames.check(bytes(frame[: self.frames.header_bytes]), into, name)
        if isinstance(found, MissCause):
            into[:] = bytes(len(into))
        elif note is not None:
            note.extend(self.frames.note_of(bytes(frame[: self.frames.header_bytes])))
        return found

    def count(self, names: Sequence[BlockName]) -> int:
        for at, name in enumerate(names):
            if name.digest not in self.kept:
                return at
        return len(names)

    def delete(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self.kept.pop(digest, None)

    def clear(self) -> int:
        num = len(self.kept)
        self.kept.clear()
        return num

    def self_test(self) -> SelfTest:
        return SelfTest(
            self.tier, ok=True, read_bytes_per_s=1e12, write_bytes_per_s=1e12, latency_s=1e-5, told="a tier in memory"
        )

    def use(self) -> StoreUse:
        return StoreUse(len(self.kept), sum(map(len, self.kept.values())), 0)

    def known_use(self) -> TierUse | None:
        return None

    def close(self) -> None:
        self.is_closed = True
