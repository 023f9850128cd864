"""What a line of the log looks like."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest

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


@pytest.fixture
def _in_request() -> Iterator[None]:
    token = current_request_id.set("req-1")
    yield
    current_request_id.reset(token)


def test_text_has_its_fields_behind_it(capsys):
    set_up_logs("text", "info")
    _log.info("done", extra={"status": 200, "seconds": 0.123456789, "nothing": None, "path": "/a b", "empty": ""})
    line = capsys.readouterr().err
    assert line.endswith('INFO pagefold.test: done status=200 seconds=0.123457 path="/a b" empty=""\n')


@pytest.mark.parametrize("value", ["a\nINFO pagefold: forged", "a status=500", 'a" status="500', "\x1b[31m", "é\u2028"])
def test_a_value_cannot_be_taken_for_more(capsys, value):
    set_up_logs("text", "info")
    _log.info("done", extra={"path": value})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line[line.index("path=") + 5 :]) == value


def test_json_is_an_object_a_line(capsys):
    set_up_logs("json", "info")
    _log.info("done %d", 7, extra={"status": 200, "path": "/a\nb"})
    (line,) = capsys.readouterr().err.splitlines()
    said = json.loads(line)
    assert said.pop("time").endswith("+00:00")
    assert said == {"level": "INFO", "logger": "pagefold.test", "message": "done 7", "status": 200, "path": "/a\nb"}


def test_json_holds_a_traceback_in_one_line(capsys):
    set_up_logs("json", "info")
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        _log.exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert "ZeroDivisionError" in json.loads(line)["exc_info"]


@pytest.mark.usefixtures("_in_request")
@pytest.mark.parametrize("form", ["text", "json"])
def test_every_line_names_its_request(capsys, form):
    set_up_logs(form, "info")
    _log.info("one")
    logging.getLogger("some.library").warning("two")
    _log.info("three", extra={"request_id": "its-own"})
    one, two, three = capsys.readouterr().err.splitlines()
    for line, request_id in ((one, "req-1"), (two, "req-1"), (three, "its-own")):
        assert (f"request_id={request_id}" if form == "text" else f'"request_id": "{request_id}"') in line


def test_libraries_are_quiet_and_levels_hold(capsys):
    set_up_logs("text", "debug")
    logging.getLogger("uvicorn.error").info("started")
    _log.debug("heard")
    assert capsys.readouterr().err.count("\n") == 1
    set_up_logs("text", "error")
    logging.getLogger("uvicorn.error").warning("odd")
    _log.warning("odd")
    assert capsys.readouterr().err == ""
