"""The self-test: whether a store does what it says, found out by doing it once, at the start of a server."""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING

from pagefold.kv.transfers import MissCause, StoreError
from pagefold.store.frame import BlockName, checksum_of
from pagefold.store.protocol import Get, Put, SelfTest

if TYPE_CHECKING:
    from pagefold.store.frame import FrameFormat
    from pagefold.store.protocol import BlockStore

__all__ = ["run_self_test"]

_NUM_BLOCKS = 4
_NUM_ROUND_TRIPS = 5


class _NotDoneError(Exception):
    """What a store did not do."""


def run_self_test(store: BlockStore, form: FrameFormat, where: str) -> SelfTest:
    """Write blocks, read them, compare, look for a damaged one and one that is not there, delete; and take the times.

    The blocks are random, of a random namespace: nobody else's, and gone afterwards.

    Args:
        store: to try out.
        form: of its frames.
        where: it is, for people; without secrets.
    """
    try:
        return _tried(store, form, where)
    except (StoreError, _NotDoneError) as error:
        told = str(error)
        told = told if where in told else f"{where}: {told}"
        return SelfTest(store.tier, ok=False, read_bytes_per_s=0, write_bytes_per_s=0, latency_s=0, told=told)


def _tried(store: BlockStore, form: FrameFormat, where: str) -> SelfTest:
    whole, damaged, absent = [_random_put(form) for _ in range(_NUM_BLOCKS)], _random_put(form), _random_put(form)
    turned = bytearray(damaged.payload)
    turned[len(turned) // 2] ^= 1
    damaged = damaged._replace(payload=memoryview(turned))
    names = [put.name for put in whole]
    packed = form.encode(*whole[0])  # what is done once, compiling, is no part of the times
    form.decode(*packed, memoryview(bytearray(form.block_bytes)), names[0])
    store.count([absent.name])  # what is done once, connecting, is no part of the times
    try:
        begin = time.perf_counter()
        num_kept = store.put(whole)
        write_s = time.perf_counter() - begin
        if num_kept < len(whole):
            msg = f"kept {num_kept} of {len(whole)} blocks: it may be full, and not allowed to make room"
            raise _NotDoneError(msg)
        if (num := store.count([*names, absent.name])) != len(names):
            msg = f"says that it holds {num} of {len(names)} blocks that it kept"
            raise _NotDoneError(msg)
        read_s = min(_read_s(store, whole) for _ in range(2))
        if store.put([damaged]) and store.get([_get(damaged)])[0] is not MissCause.DAMAGED:
            msg = "did not see that a block was damaged"
            raise _NotDoneError(msg)
        latency_s = statistics.median(_round_trip_s(store, absent.name) for _ in range(_NUM_ROUND_TRIPS))
    finally:
        _delete(store, [put.name.digest for put in (*whole, damaged)])
    num_bytes = len(whole) * form.frame_bytes
    read, write = num_bytes / read_s, num_bytes / write_s
    told = f"{where}: reads {_speed(read)}, writes {_speed(write)}, answers in {latency_s * 1e3:.2g} ms"
    return SelfTest(store.tier, ok=True, read_bytes_per_s=read, write_bytes_per_s=write, latency_s=latency_s, told=told)


def _read_s(store: BlockStore, puts: list[Put]) -> float:
    gets = [_get(put) for put in puts]
    begin = time.perf_counter()
    found = store.get(gets)
    taken = time.perf_counter() - begin
    for put, get, got in zip(puts, gets, found, strict=True):
        if isinstance(got, MissCause):
            msg = f"did not return a block that it kept ({got})"
            raise _NotDoneError(msg)
        if get.into != put.payload:
            msg = "returned a block with other bytes, and did not see it"
            raise _NotDoneError(msg)
    return taken


def _round_trip_s(store: BlockStore, name: BlockName) -> float:
    begin = time.perf_counter()
    store.count([name])
    return time.perf_counter() - begin


def _delete(store: BlockStore, digests: list[bytes]) -> None:
    try:
        store.delete(digests)
    except StoreError:  # then what was found before is what to tell
        return


def _random_put(form: FrameFormat) -> Put:
    payload = form.trial_block()
    name = BlockName(os.urandom(32), os.urandom(32), os.urandom(32), os.urandom(form.key_bytes))
    return Put(name, memoryview(payload), checksum_of(payload))


def _get(put: Put) -> Get:
    return Get(put.name, memoryview(bytearray(len(put.payload))))


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.3g} MB/s"  # noqa: PLR2004
