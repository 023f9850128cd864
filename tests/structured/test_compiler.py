"""The compiler keeps what was used last, and what would harm the process is refused by another."""

from __future__ import annotations

import os
import resource
import threading

import pytest
from grammar_walks import EOS

from pagefold import StructuredOutputsParams
from pagefold.errors import InvalidRequestError
from pagefold.structured import compiler as compiler_module
from pagefold.structured import vetting
from pagefold.structured.compiler import GrammarCompiler

CHAIN = {
    "$defs": {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(5000)} | {"d5000": {}},
    "$ref": "#/$defs/d0",
}
"""In a process with the usual stack, the library recurses until it ends, and the process with it."""

SLOW = {"allOf": [{"type": "string", "pattern": f".*{at}b{at}c.*"} for at in range(60)]}
"""Takes minutes, or more."""


def regex(number):
    return StructuredOutputsParams(regex=f"a{{{number}}}")


@pytest.fixture
def fresh(tokenizer):
    return GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, (EOS,))


def test_equal_grammars_are_compiled_once_and_old_ones_are_forgotten(fresh, monkeypatch):
    monkeypatch.setattr(compiler_module, "_MAX_GRAMMARS", 3)
    one, two, three = (fresh.compile(regex(number)) for number in (1, 2, 3))
    assert fresh.compile(regex(1)) is one
    fresh.compile(regex(4))  # takes the place of the second, which was used longest ago
    assert fresh.compile(regex(1)) is one
    assert fresh.compile(regex(3)) is three
    assert fresh.compile(regex(2)) is not two
    monkeypatch.setattr(compiler_module, "_MAX_CHARACTERS", 1)
    last = fresh.compile(regex(5))
    assert fresh.compile(regex(5)) is last
    assert list(fresh._grammars.values()) == [last]


def test_what_ends_the_vetting_process_is_refused_and_the_next_one_compiles(fresh, monkeypatch):
    good = fresh.compile(regex(1))
    first = fresh._vetter._process
    with pytest.raises(InvalidRequestError, match="too complex") as caught:
        fresh.compile(StructuredOutputsParams(json=CHAIN))
    assert caught.value.param == "structured_outputs"
    assert first.returncode is not None, "it has ended"
    fresh.compile(regex(2))
    monkeypatch.setattr(vetting, "TIME_LIMIT_S", 0.5)
    with pytest.raises(InvalidRequestError, match="too complex"):
        fresh.compile(StructuredOutputsParams(json=SLOW))
    monkeypatch.undo()
    fresh.compile(regex(3))
    assert fresh.compile(regex(1)) is good


def test_threads_compile_at_once(fresh):
    found = {}

    def compile_some(thread):
        for number in range(1, 9):
            found[thread, number] = fresh.compile(regex(number))

    threads = [threading.Thread(target=compile_some, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 32
    assert len(fresh._grammars) == 8


def test_a_server_with_many_connections_vets_too(fresh):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("this machine lets no process open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    connections = []
    try:
        connections += (os.dup(0) for _ in range(1050))
        fresh.compile(regex(1))
        assert fresh._vetter._process.stdout.fileno() > 1024
    finally:
        for connection in connections:
            os.close(connection)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_signal_to_all_processes_leaves_the_vetting_to_the_server(fresh):
    fresh.compile(regex(1))
    process = fresh._vetter._process
    process.terminate()
    fresh.compile(regex(2))
    assert fresh._vetter._process is process


def test_the_vetting_process_ends_with_the_compiler(fresh):
    fresh.compile(regex(1))
    process = fresh._vetter._process
    del fresh._vetter
    assert process.poll() is not None


def test_a_tokenizer_that_does_not_work_is_said_so():
    with pytest.raises(InvalidRequestError, match="this model's tokenizer"):
        GrammarCompiler("{}", 10, (EOS,)).compile(regex(1))
