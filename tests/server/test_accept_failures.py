"""What an event loop's exceptions become where no more files can be opened, and where a socket has gone meanwhile."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from pagefold.server.listener import AcceptFailures


def test_a_socket_that_went_before_asyncio_tries_again_is_no_error(caplog):
    """asyncio's own callback, as a server that is ended within a second of its last failure has it."""
    said: list[str] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(AcceptFailures(said.append))
        gone = socket.create_server(("127.0.0.1", 0))
        gone.close()
        loop.call_soon(loop._start_serving, asyncio.Protocol, gone)
        await asyncio.sleep(0.01)

    with caplog.at_level(logging.ERROR, "asyncio"):
        asyncio.run(run())
    assert not said
    assert not caplog.records


def test_other_errors_are_logged_and_files_are_told_of_once(caplog):
    said: list[str] = []

    def fail(error: Exception) -> None:
        raise error

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(AcceptFailures(said.append))
        for error in (
            ValueError("Invalid file descriptor: -1"),
            OSError(errno.EMFILE, "x"),
            OSError(errno.EMFILE, "x"),
        ):
            loop.call_soon(fail, error)
        await asyncio.sleep(0.01)

    with caplog.at_level(logging.ERROR, "asyncio"):
        asyncio.run(run())
    assert len(said) == 1
    assert [type(record.exc_info[1]) for record in caplog.records] == [ValueError]
