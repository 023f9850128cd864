"""What a line of the log looks like."""

from __future__ import annotations

import io
import json
import logging
import os
import time
from typing import TYPE_CHECKING

import pytest

from pagefold.observe import line_handler
from pagefold.observe.logs import current_request_id, set_up_logs

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("pagefold.test")


@pytest.fixture(autouse=True)
def _logging_is_as_before() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger("pagefold")
    before = root.handlers, root.level, own.level
    yield
    root.handlers = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])


def written(capsys) -> str:
    logging.getLogger().handlers[0].flush()
    return capsys.readouterr().err


@pytest.fixture
def _in_request() -> Iterator[None]:
    token = current_request_id.set("req-1")
    yield
    current_request_id.reset(token)


def test_text_has_its_fields_behind_it(capsys):
    set_up_logs("text", "info")
    _log.info("done", extra={"status": 200, "seconds": 0.123456789, "nothing": None, "path": "/a b", "empty": ""})
    line = written(capsys)
    assert line.endswith('INFO pagefold.test: done status=200 seconds=0.123457 path="/a b" empty=""\n')


@pytest.mark.parametrize("value", ["a\nINFO pagefold: forged", "a status=500", 'a" status="500', "\x1b[31m", "é\u2028"])
def test_a_value_cannot_be_taken_for_more(capsys, value):
    set_up_logs("text", "info")
    _log.info("done", extra={"path": value})
    (line,) = written(capsys).splitlines()
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line[line.index("path=") + 5 :]) == value


def test_json_is_an_object_a_line(capsys):
    set_up_logs("json", "info")
    _log.info("done %d", 7, extra={"status": 200, "path": "/a\nb"})
    (line,) = written(capsys).splitlines()
    said = json.loads(line)
    assert said.pop("time").endswith("+00:00")
    assert said == {"level": "INFO", "logger": "pagefold.test", "message": "done 7", "status": 200, "path": "/a\nb"}


def test_json_holds_a_traceback_in_one_line(capsys):
    set_up_logs("json", "info")
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        _log.exception("failed")
    (line,) = written(capsys).splitlines()
    assert "ZeroDivisionError" in json.loads(line)["exc_info"]


@pytest.mark.usefixtures("_in_request")
@pytest.mark.parametrize("form", ["text", "json"])
def test_every_line_names_its_request(capsys, form):
    set_up_logs(form, "info")
    _log.info("one")
    logging.getLogger("some.library").warning("two")
    _log.info("three", extra={"request_id": "its-own"})
    one, two, three = written(capsys).splitlines()
    for line, request_id in ((one, "req-1"), (two, "req-1"), (three, "its-own")):
        assert (f"request_id={request_id}" if form == "text" else f'"request_id": "{request_id}"') in line


def test_libraries_are_quiet_and_levels_hold(capsys):
    set_up_logs("text", "debug")
    logging.getLogger("uvicorn.error").info("started")
    _log.debug("heard")
    assert written(capsys).count("\n") == 1
    set_up_logs("text", "error")
    logging.getLogger("uvicorn.error").warning("odd")
    _log.warning("odd")
    assert written(capsys) == ""


def test_a_log_that_nobody_reads_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(line_handler, "_MAX_LINES", 100)
    monkeypatch.setattr(line_handler, "_FLUSH_S", 0.01)
    reading, writing = os.pipe()
    with io.FileIO(reading) as reader, io.FileIO(writing, "w") as writer:
        monkeypatch.setattr("sys.stderr", io.TextIOWrapper(writer))
        set_up_logs("text", "info")
        handler = logging.getLogger().handlers[0]
        for number in range(5000):
            _log.info("a line of a hundred characters or so %05d %s", number, "x" * 50)
        handler.flush()  # gives up
        os.set_blocking(reading, False)
        text, told, num_lost = b"", [], 0
        deadline = time.monotonic() + 60
        while len(told) + num_lost < 5000:
            assert time.monotonic() < deadline, f"{len(told)} lines told and {num_lost} lost"
            text += reader.read(2**16) or b""
            lines = text.decode().splitlines()[: text.count(b"\n")]
            told = [int(line.split()[-2]) for line in lines if "a line of" in line]
            num_lost = sum(int(line.split()[4]) for line in lines if "are lost" in line)
    assert told == sorted(set(told))
    assert num_lost > 0
