"""Host memory: as many bytes as were asked for, where direct I/O can go, and taken as it is written."""

from __future__ import annotations

import resource

import numpy as np
import pytest

from pagefold.memory.host import host_memory


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 2**21 + 5])
def test_memory_begins_at_a_page(num_bytes):
    memory = host_memory(num_bytes)
    assert memory.shape == (num_bytes,)
    assert not num_bytes or memory.ctypes.data % 4096 == 0
    memory[:] = 7
    assert np.all(memory == 7)


def test_what_is_not_written_takes_nothing():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = host_memory(2**34)
    memory[:: 2**32] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB: of 16 GiB
