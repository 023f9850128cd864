"""CopyStream: where an arena's copies are queued, and how others wait for them. On a CPU what is queued is done."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

__all__ = ["CopyStream", "CudaCopyStream", "Mark", "NoCopyStream"]


class Mark(Protocol):
    """A moment on a copying stream: all that was queued there before."""

    def hold(self) -> None:
        """Let what is queued on the current stream from now on wait for it. The host does not wait."""

    def wait(self) -> None:
        """Let the host wait for it."""

    def seconds_since(self, begin: Mark) -> float:
        """Return what lay between ``begin`` and this, which have both come to pass."""
        ...


class CopyStream(Protocol):
    """A stream of copies."""

    def behind_current(self) -> AbstractContextManager[None]:
        """Inside, copies are queued here, behind all that is queued on the current stream."""
        ...

    def mark(self) -> Mark:
        """Mark what was queued here so far."""
        ...


class NoCopyStream:
    """On a CPU: a copy is done when it is queued."""

    def behind_current(self) -> AbstractContextManager[None]:
        """See :class:`CopyStream`."""
        return contextlib.nullcontext()

    def mark(self) -> _Passed:
        """See :class:`CopyStream`."""
        return _Passed()


class _Passed:
    """A moment that has passed."""

    def __init__(self) -> None:
        self.now_s = time.perf_counter()

    def hold(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def seconds_since(self, begin: Mark) -> float:
        assert isinstance(begin, _Passed), "a mark of another stream"
        return self.now_s - begin.now_s


class CudaCopyStream:
    """A stream of a card beside the one that computes.

    Args:
        device: the card.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def behind_current(self) -> Iterator[None]:
        """See :class:`CopyStream`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> _CudaMark:
        """See :class:`CopyStream`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaMark(event, self._device)


class _CudaMark:
    """An event of CUDA."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self._device = device

    def hold(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, begin: Mark) -> float:
        assert isinstance(begin, _CudaMark), "a mark of another stream"
        return float(begin.event.elapsed_time(self.event)) / 1e3
