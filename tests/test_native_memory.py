"""What is asked of the C library about memory, in processes of their own. Elsewhere than on glibc there is nothing."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not on glibc")

_COUNT_ARENAS = """
import ctypes, sys, threading
from pagefold.memory.native import have_few_arenas
if sys.argv[1] == "few":
    have_few_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
begun, told = threading.Barrier(9), threading.Barrier(9)
def allocate():
    libc.malloc(ctypes.c_size_t(50_000))
    begun.wait()
    told.wait()
threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
begun.wait()
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
told.wait()
"""


def num_arenas(tmp_path, mode, **environment):
    told = tmp_path / "malloc.xml"
    others = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    command = [sys.executable, "-c", _COUNT_ARENAS, mode, str(told)]
    subprocess.run(command, check=True, env=others | environment)
    return told.read_text().count("<heap nr=")


def test_threads_share_two_arenas(tmp_path):
    assert num_arenas(tmp_path, "few") <= 2
    assert num_arenas(tmp_path, "many") > 4


def test_what_the_environment_says_is_heeded(tmp_path):
    assert num_arenas(tmp_path, "few", MALLOC_ARENA_MAX="4") == 4
