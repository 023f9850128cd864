"""Vetting: a grammar is compiled and walked in a process of its own first, where it can do no harm.

The library is native code with bounds of its own, but a client can write a grammar that compiles for ever, or recurses
until the stack ends, and with it the process. Such a grammar ends the vetting process, and is refused. What passes
compiles here with twice the stack in as much time.

The two speak in lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.errors import EngineStoppedError, InvalidRequestError, PagefoldError
from pagefold.memory.native import allocated_bytes, give_back_memory
from pagefold.structured.params import FIELD

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.structured.grammar import Grammar, GrammarSource, GrammarTokenizer

__all__ = ["Vetted", "Vetter", "serve"]

TIME_LIMIT_S = 5.0
"""How long a grammar may take to be vetted."""

_STEP_LIMIT_S = 0.25
_WALK_LIMIT_S = 1.0
"""How long one step of the walk, and all of it, may take: every request of the batch would wait for each."""

_START_LIMIT_S = 120.0
_MAX_MEMORY_BYTES = 4 * 2**30
_MAX_GRAMMAR_BYTES = 32 * 2**20
_UNKNOWN_BYTES = 8 * 2**20
"""What a compiled grammar may take, and what it counts as where that cannot be told."""

_STACK_BYTES = 2**20  # threads of the server have at least twice as much
_NUM_STEPS = 48

_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from pagefold.structured.vetting import serve; serve()"


class Vetted(NamedTuple):
    """A grammar that does no harm.

    Attributes:
        source: as the library compiles it.
        num_bytes: that it takes, compiled.
    """

    source: GrammarSource
    num_bytes: int


class Vetter:
    """The vetting process, as the server sees it. It starts with the first grammar, and again after one that ended it.

    Args:
        tokenizer_json, vocab_size, eos_token_ids: see :class:`~pagefold.structured.grammar.GrammarTokenizer`.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._hello = {"tokenizer_json": tokenizer_json, "vocab_size": vocab_size, "eos_token_ids": eos_token_ids}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end_process: Callable[[], object] | None = None

    def vet(self, source: GrammarSource) -> Vetted:
        """Return ``source`` as the library compiles it, and what that takes. Blocks, with others before it.

        Each takes up to ``TIME_LIMIT_S``.

        Raises:
            InvalidRequestError: it is no grammar, or one that takes too much.
            EngineStoppedError: the process does not start.
        """
        from pagefold.structured.grammar import GrammarSource  # noqa: PLC0415 - native code, loaded when it is used

        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._end()  # somebody else ended it, between two grammars
            if self._process is None:
                self._start()
            answer = self._ask({"text": source.text, "is_gbnf": source.is_gbnf}, TIME_LIMIT_S)
            if answer is None:
                self._end()
        if answer is None:
            msg = f"The grammar is too complex: it takes more than {TIME_LIMIT_S:g} s to compile, or nests too deep."
            raise InvalidRequestError(msg, param=FIELD, remedy="Make it smaller.")
        if "error" in answer:
            raise InvalidRequestError(answer["error"], param=FIELD, remedy="Change it, or leave it out.")
        converted = GrammarSource(answer["text"]) if source.is_gbnf else source
        return Vetted(converted, answer["num_bytes"])

    def _start(self) -> None:
        self._process = process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-c", _PROGRAM, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._end_process = weakref.finalize(self, _end_process, process)
        if self._ask(self._hello, _START_LIMIT_S) is None:
            self._end()
            msg = "The process that vets grammars does not start."
            raise EngineStoppedError(msg, remedy="Try again; the server's log may tell more.")

    def _ask(self, question: dict[str, Any], limit_s: float) -> dict[str, Any] | None:
        """Return the answer, or None if the process has ended or takes too long."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return None
        deadline = time.monotonic() + limit_s
        line = b""
        with selectors.DefaultSelector() as selector:  # select() itself knows no file beyond the first 1,024
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                is_readable = selector.select(max(0.0, deadline - time.monotonic()))
                piece = os.read(process.stdout.fileno(), 2**16) if is_readable else b""
                if not piece:
                    return None
                line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        if self._end_process is not None:
            self._end_process()
        self._process = self._end_process = None


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not read any more
                pipe.close()


# The process itself.


def serve() -> None:
    """Be the process that vets, until nobody asks any more."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the server, also when all its processes get them:
        signal.signal(number, signal.SIG_IGN)  # it may still vet while it drains, and this ends with its pipe
    _limit_memory()
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_answer_all)
    thread.start()
    thread.join()


def _answer_all() -> None:
    from pagefold.structured.grammar import GrammarTokenizer  # noqa: PLC0415 - only in this process

    hello = json.loads(sys.stdin.buffer.readline() or "null")
    if hello is None:
        return
    tokenizer = GrammarTokenizer(**hello)
    _say({})
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, 2 * TIME_LIMIT_S)  # ends this process if the server could not
        _say(_vet(json.loads(line), tokenizer))
        give_back_memory()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _vet(question: dict[str, Any], tokenizer: GrammarTokenizer) -> dict[str, Any]:
    from pagefold.structured.grammar import Grammar, GrammarSource, first_line  # noqa: PLC0415 - as above

    try:
        source = GrammarSource(**question).converted()
    except Exception as error:  # noqa: BLE001 - the library's converter raises what it likes
        return {"error": f"The grammar is neither Lark nor GBNF: {first_line(str(error))}."}
    before = allocated_bytes()
    try:
        grammar = Grammar(source, tokenizer)
        num_bytes = _bytes_since(before)
        if num_bytes > _MAX_GRAMMAR_BYTES:
            return {"error": f"The grammar is too complex: it takes {num_bytes >> 20} MiB."}
        trouble = _walk(grammar)
        if trouble is not None:
            return {"error": f"The grammar is too complex: {trouble}."}
    except PagefoldError as error:
        return {"error": error.message}
    return {"text": source.text, "num_bytes": num_bytes}


def _bytes_since(before: int | None) -> int:
    """Return what was allocated since: in this process nothing else runs."""
    now = allocated_bytes()
    return _UNKNOWN_BYTES if before is None or now is None else max(0, now - before)


def _walk(grammar: Grammar) -> str | None:
    """Walk a few random tokens; return what is wrong with the grammar, if anything."""
    rng = random.Random(0)  # noqa: S311 - no secret
    matcher = grammar.matcher(ignore_eos=True)
    walk_s = 0.0
    for _ in range(_NUM_STEPS):
        token_id = _any_token(matcher.mask(), rng)
        start = time.perf_counter()
        matcher.accept(token_id)
        step_s = time.perf_counter() - start
        walk_s += step_s
        if matcher.error is not None:
            return matcher.error
        if step_s > _STEP_LIMIT_S or walk_s > _WALK_LIMIT_S:
            return "to tell which tokens may come next takes too long"
        if matcher.is_complete:
            break
    return None


def _any_token(mask: bytes, rng: random.Random) -> int:
    """Return a token of ``mask``: the first from a random place on."""
    bits = int.from_bytes(mask, "little")
    place = rng.randrange(len(mask) * 8)
    bits = bits >> place << place or bits
    return (bits & -bits).bit_length() - 1


def _limit_memory() -> None:
    try:
        import resource  # noqa: PLC0415 - not everywhere
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
