"""The compiler keeps what was used last, and what would harm the process is refused by another."""

from __future__ import annotations

import gc
import os
import random
import resource
import threading

import pytest
from grammar_walks import EOS

from pagefold import StructuredOutputsParams
from pagefold.errors import InvalidRequestError
from pagefold.memory.native import allocated_bytes
from pagefold.structured import compiler as compiler_module
from pagefold.structured import grammar as grammar_module
from pagefold.structured import vetting
from pagefold.structured.compiler import GrammarCompiler

GROWTH = grammar_module._MAX_LEXER_STATES * grammar_module._LEXER_STATE_BYTES

CHAIN = {
    "$defs": {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(5000)} | {"d5000": {}},
    "$ref": "#/$defs/d0",
}
"""In a process with the usual stack, the library recurses until it ends, and the process with it."""

SLOW = {"allOf": [{"type": "string", "pattern": f".*{at}b{at}c.*"} for at in range(60)]}
"""Takes minutes, or more."""


def size(compiler, name):
    (found,) = (one for one in compiler.sizes() if one.name == name)
    return found


def walk(matcher, seed, num_steps=60):
    """Walk random tokens; return how it failed, if it did."""
    rng = random.Random(seed)
    for _ in range(num_steps):
        matcher.accept(vetting._any_token(matcher.mask(), rng))
        if matcher.error is not None or matcher.is_complete:
            break
    return matcher.error


def regex(number):
    return StructuredOutputsParams(regex=f"a{{{number}}}")


@pytest.fixture
def fresh(tokenizer):
    return GrammarCompiler(tokenizer.to_json(), tokenizer.vocab_size, (EOS,))


def test_equal_grammars_are_compiled_once_and_old_ones_are_forgotten(fresh, monkeypatch):
    monkeypatch.setattr(compiler_module, "_MAX_GRAMMAR_BYTES", int(3.5 * GROWTH))
    one, two, three = (fresh.compile(regex(number)) for number in (1, 2, 3))
    assert fresh.compile(regex(1)) is one
    fresh.compile(regex(4))  # takes the place of the second, which was used longest ago
    assert fresh.compile(regex(1)) is one
    assert fresh.compile(regex(3)) is three
    assert fresh.compile(regex(2)) is not two
    assert 3 * GROWTH < size(fresh, "grammars").num_bytes <= size(fresh, "grammars").max_bytes


def test_what_is_kept_of_grammars_has_a_bound_in_bytes_and_reaches_it(fresh):
    """Grammars of all sizes, more than are kept: what is counted is what is there, and never more than the bound."""
    for number in range(1, 40):
        choice = [f"{number} {at}" for at in range(20 * number)]
        fresh.compile(StructuredOutputsParams(choice=choice))
        told = size(fresh, "grammars")
        assert told.num_bytes == sum(grammar.max_bytes for grammar in fresh._grammars.values()) <= told.max_bytes
    assert told.num_bytes + 2 * GROWTH > told.max_bytes, "it is full"
    assert 4 <= len(fresh._grammars) < 9


def test_that_a_grammar_was_vetted_is_known_for_longer(fresh, monkeypatch):
    monkeypatch.setattr(compiler_module, "_MAX_GRAMMAR_BYTES", int(1.5 * GROWTH))
    monkeypatch.setattr(compiler_module, "_MAX_VETTED", 3)
    vetted = []
    vet = fresh._vetter.vet
    monkeypatch.setattr(fresh._vetter, "vet", lambda source: (vetted.append(source), vet(source))[1])
    for number in (1, 2, 3, 1, 2, 3):
        fresh.compile(regex(number))
    assert len(vetted) == 3
    for number in (4, 1):  # whose place the fourth took
        fresh.compile(regex(number))
    assert len(vetted) == 5
    assert len(fresh._vetted) == 3
    monkeypatch.setattr(compiler_module, "_MAX_VETTED_BYTES", 20_000)
    for number in range(10, 30):
        fresh.compile(StructuredOutputsParams(choice=[f"{number}" * 100, "b" * 500]))
        told = size(fresh, "vetted_grammars")
        assert told.num_bytes == sum(map(compiler_module._entry_bytes, *zip(*fresh._vetted.items(), strict=True)))
        assert told.num_bytes <= told.max_bytes == 20_000
    assert told.num_bytes > 10_000


@pytest.mark.skipif(allocated_bytes() is None, reason="only glibc tells")
def test_a_grammar_that_grew_as_far_as_it_may_is_compiled_anew_for_those_that_come_then(fresh):
    """Its states are shared by all outputs that ever had it: without this, it would fail all that come."""
    hungry = StructuredOutputsParams(regex="(.{1,40}x.{1,40}y)*z")
    grammar = fresh.compile(hungry)
    assert fresh.compile(hungry) is grammar
    failed = None
    before = allocated_bytes()
    for seed in range(200):
        failed = walk(grammar.matcher(ignore_eos=True), seed)
        if failed is not None:
            break
    assert failed is not None
    assert "states" in failed
    assert allocated_bytes() - before < GROWTH, "all that a grammar grows by"
    assert grammar.is_worn
    anew = fresh.compile(hungry)
    assert anew is not grammar
    assert walk(anew.matcher(ignore_eos=True), 0) is None
    assert len(fresh._grammars) == 1
    assert size(fresh, "grammars").num_bytes == anew.max_bytes


def test_a_grammar_that_was_used_for_long_is_compiled_anew(fresh, monkeypatch):
    monkeypatch.setattr(grammar_module, "_WORN_STEPS", 100)
    words = StructuredOutputsParams(regex=r"(\w+ )*")
    grammar = fresh.compile(words)
    for seed in range(2):
        assert walk(grammar.matcher(ignore_eos=True), seed) is None
    assert fresh.compile(words) is not grammar


@pytest.mark.skipif(allocated_bytes() is None, reason="only glibc tells")
def test_a_grammar_weighs_what_it_takes(fresh):
    """The vetting process, where nothing else runs, says what this one allocates for it."""
    choice = StructuredOutputsParams(choice=[f"option {at} of many" for at in range(900)])
    fresh.compile(regex(1))
    gc.collect()
    before = allocated_bytes()
    grammar = fresh.compile(choice)
    taken = allocated_bytes() - before
    assert taken > 2**20
    assert grammar.max_bytes - GROWTH == pytest.approx(taken, rel=0.2)


@pytest.mark.skipif(allocated_bytes() is None, reason="only glibc tells")
def test_a_grammar_that_takes_too_much_memory_is_refused(fresh):
    """A complement of counted repetitions: 60 MB once compiled, of 200 characters."""
    heavy = r"start: (A|B)+" + "\n" + r"A: /(?:é)*/ & ~/(?:(?:(?:.|\n)){1,55}){1,30}/" + "\nB: /é/"
    with pytest.raises(InvalidRequestError, match="too complex") as caught:
        fresh.compile(StructuredOutputsParams(grammar=heavy))
    assert caught.value.param == "structured_outputs"
    assert not fresh._grammars


@pytest.mark.long
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
        for number in range(1, 6):
            found[thread, number] = fresh.compile(regex(number))

    threads = [threading.Thread(target=compile_some, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    assert len(fresh._grammars) == 5


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


def test_a_vetting_process_that_was_killed_between_two_grammars_costs_none_of_them(fresh):
    fresh.compile(regex(1))
    fresh._vetter._process.kill()
    os.waitid(os.P_PID, fresh._vetter._process.pid, os.WEXITED | os.WNOWAIT)
    fresh.compile(regex(2))


def test_the_vetting_process_ends_with_the_compiler(fresh):
    fresh.compile(regex(1))
    process = fresh._vetter._process
    del fresh._vetter
    assert process.poll() is not None


def test_a_tokenizer_that_does_not_work_is_said_so():
    with pytest.raises(InvalidRequestError, match="this model's tokenizer"):
        GrammarCompiler("{}", 10, (EOS,)).compile(regex(1))
