"""LateStream: a copying stream without a card, whose copies come as late as they may.

A copy is made when somebody waits for a mark behind it, and not before. So who reads without waiting reads what was
there before. What a card's own streams do is theirs.
"""

from __future__ import annotations

import contextlib

import torch

__all__ = ["LateStream"]


class LateStream:
    """A :class:`CopyStream` whose copies are made when they are waited for.

    Attributes:
        log: what happened: marks that were held, and marks that the host waited for, by number.
    """

    def __init__(self, monkeypatch):
        self.log = []
        self._queue = []  # copies and marks, in order
        self._num_marks = 0
        self._is_entered = False
        copy = torch.Tensor.copy_

        def later(to, source, non_blocking=False):
            if self._is_entered:
                self._queue.append(lambda: copy(to, source))
                return to
            return copy(to, source, non_blocking)

        monkeypatch.setattr(torch.Tensor, "copy_", later)

    @contextlib.contextmanager
    def behind_current(self):
        self.log.append("behind current")
        self._is_entered = True
        yield
        self._is_entered = False

    def mark(self):
        mark = Mark(self, self._num_marks)
        self._num_marks += 1
        self._queue.append(mark)
        return mark

    def go_to(self, mark):
        while mark in self._queue:
            one = self._queue.pop(0)
            if one is mark:
                break
            if not isinstance(one, Mark):
                one()


class Mark:
    def __init__(self, stream, number):
        self.stream, self.number = stream, number

    def hold(self):
        self.stream.log.append(("hold", self.number))
        self.stream.go_to(self)

    def wait(self):
        self.stream.log.append(("wait", self.number))
        self.stream.go_to(self)

    def seconds_since(self, begin):
        return float(self.number - begin.number)
