"""What the recorder keeps in memory while it records."""

from __future__ import annotations

import threading
from array import array

from pagefold.events import RequestAdded
from pagefold.observe import recorder as recorder_module
from pagefold.observe.recorder import TraceRecorder


def test_a_recording_that_cannot_keep_up_ends_instead_of_growing(tmp_path, monkeypatch, caplog):
    """A disk that hangs, or namespaces without number: what waits or is known is bounded, and the log says it."""
    goes_on = threading.Event()
    monkeypatch.setattr(TraceRecorder, "_write_all", lambda _: goes_on.wait(60))
    monkeypatch.setattr(recorder_module, "_MAX_WAITING_TOKENS", 1000)
    monkeypatch.setattr(recorder_module, "_MAX_NAMESPACES", 5)

    def added(number: int, num_tokens: int) -> RequestAdded:
        how = {"has_prompt_logprobs": False, "returns_in_s": None, "pin": None}
        tokens = array("i", range(num_tokens))
        return RequestAdded((f"{number}",), (tokens,), num_tokens, 2 * num_tokens, b"%d" % number, 0.0, None, 0, **how)

    hung = TraceRecorder(tmp_path / "hung.jsonl", lambda: 0.0)
    for number in range(3):
        hung(added(number, 300))
    assert not hung._is_broken
    assert hung._lines.qsize() == 3
    for number in range(3, 50):
        hung(added(number % 3 + 100 * number, 300))
    assert hung._lines.qsize() == 3
    assert "the disk is too slow" in caplog.text
    many = TraceRecorder(tmp_path / "many.jsonl", lambda: 0.0)
    for number in range(50):
        many(added(number, 1))
    assert len(many._namespaces) == 5
    assert many._lines.qsize() == 5
    assert "5 namespaces came" in caplog.text
    goes_on.set()
    for recorder in (hung, many):
        recorder._writer.join(60)
        recorder._out.close()
