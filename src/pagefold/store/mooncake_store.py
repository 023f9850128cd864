"""MooncakeStore: blocks in the pooled memory of a Mooncake cluster.

A block is one object: its frame, under ``pagefold:LAYOUT:DIGEST`` (both in hex). Objects never change; the master makes
room. What was just read, or asked for, has a *lease* and is not evicted for some seconds. So a pool that is too small
refuses blocks: they are not kept, and that is no failure.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from pagefold.errors import ConfigError
from pagefold.kv.transfers import MissCause, StoreError
from pagefold.store.deadline import Deadline
from pagefold.store.mooncake_process import MooncakeProcess
from pagefold.store.protocol import StoreUse
from pagefold.store.self_test import run_self_test

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from numpy.typing import NDArray

    from pagefold.store.address import RemoteAddress
    from pagefold.store.frame import BlockName, FrameFormat
    from pagefold.store.mooncake_process import Lane
    from pagefold.store.protocol import Get, Put, SelfTest

__all__ = ["DEFAULT_PORT", "MooncakeStore"]

DEFAULT_PORT = 50051

_T = TypeVar("_T")
_OPTIONS = frozenset({"local_hostname", "segment_gib", "protocol", "device"})
_PROTOCOLS = ("tcp", "rdma")
_BATCH_BYTES = 2**23
_BATCH_NAMES = 256

# Mooncake's error codes, as far as they mean something to us.
_NO_ROOM = -200
_OTHER_SIZE = -600
_NOT_READY = -703
_ABSENT = -704
_EXISTS = -705
_LEASE_EXPIRED = -707
_TRANSFER_FAILED = -800
_MISSES = {
    _ABSENT: MissCause.ABSENT,
    _NOT_READY: MissCause.ABSENT,  # somebody is writing it
    _OTHER_SIZE: MissCause.DAMAGED,
    _LEASE_EXPIRED: MissCause.LATE,
    _TRANSFER_FAILED: MissCause.IO_ERROR,  # the machine that holds it is gone; the others are there
}
_NO_MASTER = {-900, -901}
_NOT_KEPT = {_NO_ROOM, _TRANSFER_FAILED, _NOT_READY}


class MooncakeStore:
    """A :class:`BlockStore` in a Mooncake cluster. Nothing is started before it is needed.

    Mooncake's client runs in a process of its own. It reads and writes memory that both processes map; a block is
    copied once between there and where it is to be, and verified there.

    Args:
        address: of the master. Options: ``segment_gib``, memory of this machine that is added to the pool (0: none);
            ``local_hostname``, by which the others reach this machine; ``protocol``, ``tcp`` or ``rdma``; ``device``,
            the RDMA devices.
        form: of the frames.
        timeout_s: for each batch of a call.

    Raises:
        ConfigError: an option is wrong, or Mooncake is not installed.
    """

    is_out = False
    tier = "remote"

    def __init__(self, address: RemoteAddress, form: FrameFormat, *, timeout_s: float = 1.0) -> None:
        address.only_options(_OPTIONS)
        protocol = address.options.get("protocol", _PROTOCOLS[0])
        if protocol not in _PROTOCOLS:
            msg = f"{address}: protocol={protocol} is none of {', '.join(_PROTOCOLS)}."
            raise ConfigError(msg, remedy="Leave it out for tcp.")
        if address.username or address.password or address.path:
            msg = f"{address}: a Mooncake master has no accounts and no databases."
            raise ConfigError(msg, remedy=f"Write it as mooncake://{address.host}:{address.port}.")
        segment_bytes = int(address.number("segment_gib", 0) * 2**30)
        if not sys.platform.startswith("linux") or find_spec("mooncake") is None:
            msg = f"{address}: Mooncake is not installed."
            raise ConfigError(msg, remedy="On Linux: pip install 'pagefold[mooncake]'.")
        self.address = address
        self._form = form
        self._timeout_s = timeout_s
        self._prefix = f"pagefold:{form.layout.hex()}:"
        self._num_batched = max(1, _BATCH_BYTES // form.frame_bytes)
        self._settings = {
            "host": address.host,
            "port": address.port,
            "local_hostname": address.options.get("local_hostname", ""),
            "segment_bytes": segment_bytes,
            "protocol": protocol,
            "device": address.options.get("device", ""),
        }
        self._lock = threading.Lock()
        self._process: MooncakeProcess | None = None
        self._closed = False

    def put(self, puts: Sequence[Put]) -> int:
        """Keep blocks; see :class:`BlockStore`."""
        known: list[int] = []
        for batch in _batches(puts, _BATCH_NAMES):
            known += self._ask("exist", [put.name.digest for put in batch])
        new = [put for put, is_known in zip(puts, known, strict=True) if is_known != 1]
        num_kept = len(puts) - len(new)
        for puts_together in _batches(new, self._num_batched):
            num_put = self._put(puts_together)
            num_kept += num_put
            if num_put < len(puts_together):  # there is no room, and would be asked in vain
                break
        return num_kept

    def get(self, gets: Sequence[Get]) -> list[bytes | MissCause]:
        """Bring blocks; see :class:`BlockStore`."""
        found: list[bytes | MissCause] = []
        for batch in _batches(gets, self._num_batched):
            found += self._get(batch)
            if isinstance(found[-1], MissCause):
                break
        wrong = [
            get.name.digest
            for get, got in zip(gets, found, strict=False)
            if isinstance(got, MissCause) and got not in {MissCause.ABSENT, MissCause.LATE}
        ]
        if wrong:
            with contextlib.suppress(StoreError):  # what was brought is right all the same
                self.delete(wrong)
        return found + [MissCause.ABSENT] * (len(gets) - len(found))

    def count(self, names: Sequence[BlockName]) -> int:
        """Return how many it holds in a row; see :class:`BlockStore`."""
        num = 0
        for batch in _batches(names, _BATCH_NAMES):
            for is_known in self._ask("exist", [name.digest for name in batch]):
                if is_known != 1:
                    return num
                num += 1
        return num

    def delete(self, digests: Sequence[bytes]) -> None:
        """Forget blocks, also those that somebody may be reading: what a reader gets then is seen to be wrong."""
        for batch in _batches(digests, _BATCH_NAMES):
            self._ask("remove", batch, fine={_ABSENT, _NOT_READY})

    def clear(self) -> int:
        """Forget all blocks of this layout; return how many."""
        with self._call() as (lane, deadline):
            return _checked(lane.ask("clear", [f"^{self._prefix}"], deadline))[0]

    def use(self) -> StoreUse:
        """See whether the master answers: what the pool holds, and may hold, is known to the master."""
        self._ask("exist", [b""])
        return StoreUse(-1, -1, 0)

    def known_use(self) -> None:
        """Return nothing: its master would have to be asked."""

    def self_test(self) -> SelfTest:
        """Try it out."""
        tested = run_self_test(self, self._form, str(self.address))
        if "kept 0 of" in tested.told:
            return tested._replace(told=tested.told + "; or no process has added memory to the pool (segment_gib)")
        return tested

    def close(self) -> None:
        """End the client: memory that it added to the pool goes with it. Again does nothing."""
        with self._lock:
            self._closed = True
            process, self._process = self._process, None
        if process is not None:
            process.end()

    # Inside.

    def _keys(self, digests: Sequence[bytes]) -> list[str]:
        return [self._prefix + digest.hex() for digest in digests]

    def _put(self, puts: Sequence[Put]) -> int:
        with self._call() as (lane, deadline):
            sizes = []
            for put, frame in zip(puts, lane.area, strict=False):
                header, payload = self._form.encode(put.name, put.payload, put.checksum, put.note)
                sizes.append(len(header) + len(payload))
                frame[: len(header)] = np.frombuffer(header, np.uint8)
                np.copyto(frame[len(header) : sizes[-1]], np.frombuffer(payload, np.uint8))
            answers = lane.ask("put", self._keys([put.name.digest for put in puts]), deadline, sizes)
            return sum(answer in {0, _EXISTS} for answer in _checked(answers, fine=_NOT_KEPT | {_EXISTS}))

    def _get(self, gets: Sequence[Get]) -> list[bytes | MissCause]:
        with self._call() as (lane, deadline):
            answers = lane.ask("get", self._keys([get.name.digest for get in gets]), deadline)
            _checked(answers, fine=_MISSES.keys())
            return [
                self._taken(get, frame, answer) for get, frame, answer in zip(gets, lane.area, answers, strict=False)
            ]

    def _taken(self, get: Get, frame: NDArray[np.uint8], answer: int) -> bytes | MissCause:
        if answer < 0:
            return _MISSES[answer]
        end = self._form.header_bytes
        return self._form.take(frame[: min(answer, end)].data, frame[end : max(answer, end)].data, get)

    def _ask(self, verb: str, digests: Sequence[bytes], *, fine: Container[int] = ()) -> list[int]:
        with self._call() as (lane, deadline):
            return _checked(lane.ask(verb, self._keys(digests), deadline), fine=fine)

    @contextmanager
    def _call(self) -> Iterator[tuple[Lane, Deadline]]:
        deadline = Deadline(self._timeout_s)
        try:
            process = self._running()
            process.wait_until_ready(deadline)
            with process.lane(deadline) as lane:
                yield lane, deadline
        except (StoreError, TimeoutError) as error:
            msg = f"{self.address}: {error}"
            raise StoreError(msg) from None

    def _running(self) -> MooncakeProcess:
        with self._lock:
            if self._closed:
                msg = "it was closed"
                raise StoreError(msg)
            if self._process is not None and self._process.has_ended():
                self._process.end(0)
                self._process = None
            if self._process is None:
                self._process = MooncakeProcess(self._settings, self._form.frame_bytes, self._num_batched)
            return self._process


def _batches(items: Sequence[_T], num: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), num):
        yield items[start : start + num]


def _checked(answers: list[int], *, fine: Container[int] = ()) -> list[int]:
    """Return what the client answered, if no answer means that the store cannot be used."""
    for answer in answers:
        if answer < 0 and answer not in fine:
            why = "its master does not answer" if answer in _NO_MASTER else "it cannot be used"
            msg = f"{why} (Mooncake's error {answer})"
            raise StoreError(msg)
    return answers
