"""GuardedStore: a store that may be gone. While it is, it holds up nobody, and it comes back by itself."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pagefold.errors import ConfigError
from pagefold.kv.transfers import MissCause, StoreError
from pagefold.store.breaker import Breaker
from pagefold.store.protocol import BlockStore, StoreUse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.store.address import RemoteAddress
    from pagefold.store.breaker import Change
    from pagefold.store.frame import BlockName
    from pagefold.store.protocol import Get, Put, SelfTest

__all__ = ["GuardState", "GuardedStore", "RemoteStore"]


class RemoteStore(BlockStore, Protocol):
    """A store on another machine.

    Attributes:
        address: where the store is; as text it shows no password.
    """

    address: RemoteAddress

    def self_test(self) -> SelfTest:
        """Try it out. A store that does not answer fails the test."""


class GuardState(NamedTuple):
    """How a guarded store is.

    Attributes:
        is_out: whether it is left out.
        since: when that began, by the guard's clock.
        num_failures: calls that failed, since the start.
        last_error: in words; empty if none did.
    """

    is_out: bool
    since: float
    num_failures: int
    last_error: str


class GuardedStore:
    """A :class:`BlockStore` before another one, which is left out for a growing time after a call failed.

    While it is out, ``put`` keeps nothing, ``get`` and ``count`` find nothing, at once. A thread asks in the background
    whether it answers; there is one only while it is out. Calls that were under way when it went out end by themselves.

    ``delete`` and ``clear`` raise :class:`StoreError` while it is out: who wants something forgotten must know that it
    is not.

    Args:
        store: to guard.
        on_change: told when it goes out and when it comes back, on whatever thread saw it.
        clock: seconds, monotonic.
        first_wait_s, most_wait_s: how long it is left out before it is asked again, at first and at most.
    """

    def __init__(
        self,
        store: RemoteStore,
        *,
        on_change: Callable[[Change], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        first_wait_s: float = 1.0,
        most_wait_s: float = 60.0,
    ) -> None:
        self.tier = store.tier
        self.address = store.address
        self._store = store
        self._on_change = on_change
        self._clock = clock
        self._breaker = Breaker(clock(), first_wait_s=first_wait_s, most_wait_s=most_wait_s)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._probe: threading.Thread | None = None

    @property
    def state(self) -> GuardState:
        """How the store is now."""
        with self._lock:
            breaker = self._breaker
            return GuardState(breaker.is_out, breaker.since, breaker.num_failures, breaker.last_error)

    @property
    def is_out(self) -> bool:
        """See :class:`BlockStore`."""
        return self.state.is_out

    def put(self, puts: Sequence[Put]) -> int:
        """Keep blocks, if it answers."""
        if self._breaker.is_out:
            return 0
        try:
            return self._store.put(puts)
        except StoreError as error:
            self._failed(error)
            return 0

    def get(self, gets: Sequence[Get]) -> list[bytes | MissCause]:
        """Bring blocks, if it answers: ``IO_ERROR`` where it just failed, ``ABSENT`` while it is out."""
        if self._breaker.is_out:
            return [MissCause.ABSENT] * len(gets)
        try:
            return self._store.get(gets)
        except StoreError as error:
            self._failed(error)
            return [MissCause.IO_ERROR] * len(gets)

    def count(self, names: Sequence[BlockName]) -> int:
        """Return how many it holds in a row, if it answers."""
        if self._breaker.is_out:
            return 0
        try:
            return self._store.count(names)
        except StoreError as error:
            self._failed(error)
            return 0

    def delete(self, digests: Sequence[bytes]) -> None:
        """Forget blocks."""
        self._must_be_in()
        try:
            self._store.delete(digests)
        except StoreError as error:
            self._failed(error)
            raise

    def clear(self) -> int:
        """Forget all blocks of this layout."""
        self._must_be_in()
        try:
            return self._store.clear()
        except StoreError as error:
            self._failed(error)
            raise

    def use(self) -> StoreUse:
        """Return what it holds; while it is out, it cannot tell."""
        if self._breaker.is_out:
            return StoreUse(-1, -1, 0)
        try:
            return self._store.use()
        except StoreError as error:
            self._failed(error)
            return StoreUse(-1, -1, 0)

    def known_use(self) -> None:
        """Return nothing: what it holds is another machine's to say, and that would have to be asked."""

    def self_test(self) -> SelfTest:
        """Try it out. If it does not answer it is out, and is asked again until it does."""
        tested = self._store.self_test()
        if not tested.ok:
            try:
                self._store.use()
            except StoreError as error:
                self._failed(error)
        return tested

    def connect(self) -> None:
        """See that it answers now, for who cannot do without.

        Raises:
            ConfigError: it does not. It is out then, and is asked again until it does.
        """
        try:
            self._store.use()
        except StoreError as error:
            self._failed(error)
            where = str(self.address)
            msg = str(error) if where in str(error) else f"{where}: {error}"
            remedy = "Start it, correct the address, or leave out --kv-remote-required to begin without it."
            raise ConfigError(msg + ".", remedy=remedy) from None
        self._answered()

    def close(self) -> None:
        """Stop asking, and close the store. Again does nothing."""
        self._closed.set()
        with self._lock:
            probe, self._probe = self._probe, None
        if probe is not None and probe is not threading.current_thread():
            probe.join()  # no longer than the store's time limit
        self._store.close()

    # Inside.

    def _must_be_in(self) -> None:
        state = self.state
        if state.is_out:
            msg = f"{self.address} is out: {state.last_error}"
            raise StoreError(msg)

    def _failed(self, error: StoreError) -> None:
        if self._closed.is_set():  # while it was being closed
            return
        with self._lock:
            change = self._breaker.failed(self._clock(), str(error))
            if change is not None:
                self._probe = threading.Thread(target=self._ask_until_it_answers, name="store-probe", daemon=True)
                self._probe.start()
        self._tell(change)

    def _answered(self) -> None:
        with self._lock:
            change = self._breaker.answered(self._clock())
        self._tell(change)

    def _tell(self, change: Change | None) -> None:
        if change is not None and self._on_change is not None:
            self._on_change(change)

    def _ask_until_it_answers(self) -> None:
        while not self._closed.wait(self._breaker.wait_s):
            with self._lock:
                if not self._breaker.is_out or self._probe is not threading.current_thread():
                    return  # somebody else saw it answer
            try:
                self._store.use()
            except StoreError as error:
                with self._lock:
                    self._breaker.asked_in_vain(str(error))
                continue
            self._answered()
            return
