"""What runs Mooncake's client: a process of its own, started by ``mooncake_process.py`` as a script.

The client is native code. While it looks for its master it holds the interpreter, for minutes if need be, and its calls
cannot be interrupted; so none of it is in the server's process. This file imports nothing of Pagefold.

It is given its settings as JSON, a memory file that both processes map, and pipes. The first pipe says when it is
ready, or why it cannot be; each of the others is a lane: it takes a request, reads or writes its own part of the
memory, and answers with what the client returned.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import socket
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

__all__: list[str] = []


def main() -> None:
    """Serve the lanes until the first pipe ends."""
    settings = json.loads(sys.argv[1])
    control = Connection(settings["control_fd"])
    lanes = [Connection(fd) for fd in settings["lane_fds"]]
    memory = mmap.mmap(settings["memory_fd"], 0)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    try:
        store = _open(settings, address, len(memory))
    except Exception as error:  # noqa: BLE001  # whatever it is, it is told to who can tell it to a user
        control.send(str(error) or type(error).__name__)
        os._exit(1)
    lane_bytes = len(memory) // len(lanes)
    for index, lane in enumerate(lanes):
        begin = address + index * lane_bytes
        threading.Thread(target=_serve, args=(store, lane, begin, settings["frame_bytes"]), daemon=True).start()
    control.send("")
    with contextlib.suppress(EOFError, OSError):
        control.recv()  # the server wishes it to end, or is gone
    if settings["segment_bytes"]:
        store.close()  # takes its memory out of the pool: nobody will look for blocks in it
    os._exit(0)


def _open(settings: dict[str, Any], address: int, num_bytes: int) -> Any:  # noqa: ANN401  # of a library without types
    from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415  # its failure is told like any other

    store = MooncakeDistributedStore()
    code = store.setup(
        settings["local_hostname"] or _own_address(settings["host"], settings["port"]),
        "P2PHANDSHAKE",
        settings["segment_bytes"],
        0,  # buffers of its own: it reads and writes ours
        settings["protocol"],
        settings["device"],
        f"{settings['host']}:{settings['port']}",
    )
    if code:
        msg = f"Mooncake's client cannot be set up (code {code})"
        raise RuntimeError(msg)
    code = store.register_buffer(address, num_bytes)
    if code:
        msg = f"Mooncake's client cannot use our memory (code {code})"
        raise RuntimeError(msg)
    return store


def _own_address(host: str, port: int) -> str:
    """Return the address of this machine that faces the master."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as facing:
        facing.connect((host, port))  # sends nothing
        return str(facing.getsockname()[0])


def _serve(store: Any, lane: Connection, begin: int, frame_bytes: int) -> None:  # noqa: ANN401
    while True:
        try:
            verb, keys, sizes = lane.recv()
        except (EOFError, OSError):
            return
        places = [begin + index * frame_bytes for index in range(len(keys))]
        if verb == "put":
            answer = store.batch_put_from(keys, places, sizes)
        elif verb == "get":
            answer = store.batch_get_into(keys, places, [frame_bytes] * len(keys))
        elif verb == "exist":
            answer = store.batch_is_exist(keys)
        elif verb == "remove":
            answer = store.batch_remove(keys, True)  # noqa: FBT003  # forced: else what was just read cannot be removed
        else:
            answer = [store.remove_by_regex(keys[0], True)]  # noqa: FBT003
        lane.send(list(answer))


if __name__ == "__main__":
    main()
