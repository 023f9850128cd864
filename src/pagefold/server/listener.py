"""The socket that listens, how it deals with clients that fall silent, and how many connections there can be."""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
import socket
import time
from typing import TYPE_CHECKING, Any

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["AcceptFailures", "is_beyond_this_machine", "listen", "raise_open_files"]

_BACKLOG = 2048

_SILENCE_S = 120
_FIRST_PROBE_S = 60
_PROBE_S = 15

_SPARE_FILES = 64
"""Besides connections: the model's files while it loads, the log, the event loop's own."""

_SAY_AGAIN_S = 60.0


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; connections wait in its backlog until somebody accepts them.

    The kernel ends a connection whose client has for ``_SILENCE_S`` taken nothing of what is there for it, or does not
    answer any more. (A server that only waits for its own buffer to empty would wait for such a client for ever.)

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        # Python's own text of a system error repeats the address; errors of name lookup have negative numbers.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        msg = f"Cannot listen on {host} port {port}: {reason}."
        raise ConfigError(msg, remedy="Choose another --host or --port; port 0 takes a free one.") from error
    # Linux; connections inherit them. What is written is sent at once: asyncio sees to that only for sockets that were
    # made with their protocol named, as create_server does not. Else an answer waits for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _FIRST_PROBE_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    return listener


def is_beyond_this_machine(host: str) -> bool:
    """Whether others than this machine reach an address that a socket listens on."""
    return not ipaddress.ip_address(host.partition("%")[0]).is_loopback


def raise_open_files(num_connections: int) -> int:
    """Let this process open as many files as it may; return how many of ``num_connections`` there can be.

    Every connection is an open file. The usual soft limit of 1,024 is there for programs that cannot deal with more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return num_connections
    return max(0, min(num_connections, hard - _SPARE_FILES))


class AcceptFailures:
    """Handler of an event loop's exceptions: says in one line, now and then, that no more connections can be accepted.

    asyncio tries again every second, and would log a traceback each time; and one more if the server has let go of its
    socket meanwhile, of which asyncio does not ask.

    Args:
        say: takes the line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said_s = -_SAY_AGAIN_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """See ``loop.set_exception_handler``."""
        error = context.get("exception")
        if isinstance(error, ValueError) and "_start_serving" in context["message"]:
            return
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._said_s >= _SAY_AGAIN_S:
            self._said_s = time.monotonic()
            num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            self._say(
                f"All {num_files} files that this process may open are open: new connections wait until others end. "
                "Start the server with a higher limit (ulimit -n)."
            )
