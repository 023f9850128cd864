"""Sessions: what agents' clients say by naming them, and what follows for their blocks.

A session is a row of requests that go on from each other: of an agent, which calls a tool after each answer and comes
back with what that said. Naming it tells

- that its last path is gone on from, after a pause that its client has said, or that was learned: its blocks are kept
  accordingly (``kv/expectations.py``);
- what the new prompt no longer contains of the last path, when a client has edited or compacted it: those blocks are
  *superseded*, and go before all others;
- when it is over: then all that it had for itself goes so.

A sub-agent's session has a parent. It shares the parent's path, and ends with it.

A request of several samples leaves as many paths, until the next prompt goes on from one of them. Where several
requests of a session are there at once, nobody knows which of them is its history: then nothing is superseded, until a
request comes when none is there.

Sessions are looked up by tenant and digest, and nothing is done for all of them at once: what a request costs does not
hang on how many there are.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from pagefold.events import Emit, PathSuperseded, SessionClosed
from pagefold.kv.expectations import ExpectedPath
from pagefold.kv.pause_forecast import said
from pagefold.kv.tree import TOKEN_BYTES
from pagefold.request import EndedSession
from pagefold.scheduler.compactions import Compactions
from pagefold.scheduler.pauses import Pauses, forecast_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.events import SupersedeCause
    from pagefold.kv import KVCore, SequenceCache
    from pagefold.kv.block import Node
    from pagefold.kv.pause_forecast import PauseForecast
    from pagefold.request import Request, SessionRef

__all__ = ["MAX_SESSIONS_PER_TENANT", "SessionCounts", "Sessions"]

MAX_SESSIONS_PER_TENANT = 4096
"""How many sessions of one tenant are remembered. Where there are more, the one that was idle longest is forgotten."""

_MOST_PATHS = 64
"""Of one session. Where there are more, the oldest is like any other path."""

_LOOKED_AT = 8
_OWN_FADE, _TENANT_FADE = 0.45, 0.99


class SessionCounts(NamedTuple):
    """How many sessions there are.

    Attributes:
        num_running: that have a request.
        num_paused: that have none.
    """

    num_running: int
    num_paused: int


class _Session:
    """One session.

    Attributes:
        ref: its name.
        owner: who it and its relatives are: claims of blocks are by that.
        parent, children: whose sub-agent it is, and its own.
        paths: from which it may go on; of another namespace too.
        open: requests of it that have not ended, by their first samples, with how many of their samples have not.
        paused_s: when the last of them ended; None while any is there, or none has come.
        pauses: those that it made.
        num_turns: prompts of its history since that was begun, or compacted.
        num_prompt_tokens: of the last of them.
        num_sure: blocks that its history begins with whatever is compacted: those of its first prompt, or what was left
            of it last time.
        is_over: it has ended, or is forgotten.
        is_ended: it has ended.
    """

    __slots__ = (
        "children",
        "is_ended",
        "is_over",
        "num_prompt_tokens",
        "num_sure",
        "num_turns",
        "open",
        "owner",
        "parent",
        "paths",
        "paused_s",
        "pauses",
        "ref",
    )

    def __init__(self, ref: SessionRef, parent: _Session | None) -> None:
        self.ref = ref
        self.parent = parent
        self.owner: object = object() if parent is None else parent.owner
        self.children: dict[_Session, None] = {}
        self.paths: list[ExpectedPath] = []
        self.open: dict[Request, int] = {}
        self.paused_s: float | None = None
        self.pauses = Pauses(_OWN_FADE)
        self.num_turns = self.num_prompt_tokens = self.num_sure = 0
        self.is_over = self.is_ended = False
        if parent is not None:
            parent.children[self] = None

    @property
    def is_alone(self) -> bool:
        """Whether it has no parent and no sub-agents, as far as they are there yet."""
        return self.parent is None and not self.children


class _Tenant:
    """The sessions of one tenant, the longest idle first, their pauses, and how they compact."""

    __slots__ = ("compactions", "pauses", "sessions")

    def __init__(self) -> None:
        self.sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self.pauses = Pauses(_TENANT_FADE)
        self.compactions = Compactions()


class _Open(NamedTuple):
    """A sample that has not ended: its session, the first of its samples, and of that the path that it goes on from."""

    session: _Session
    first: Request
    path: ExpectedPath | None


class Sessions:
    """All sessions, and what they expect of the core.

    Args:
        core: the KV core.
        emit: where events go.
        max_per_tenant: how many are remembered of one tenant; at least 1.
    """

    def __init__(self, core: KVCore, emit: Emit, max_per_tenant: int = MAX_SESSIONS_PER_TENANT) -> None:
        self._core = core
        self._expectations = core.blocks.expectations
        self._emit = emit
        self._max_per_tenant = max_per_tenant
        self._tenants: dict[bytes, _Tenant] = {}
        self._open: dict[Request, _Open] = {}
        self._num_sessions = self._num_running = 0

    @property
    def counts(self) -> SessionCounts:
        """How many there are, by what they do."""
        return SessionCounts(self._num_running, self._num_sessions - self._num_running)

    def arrived(self, request: Request) -> None:
        """Note a request that has come, with those that will fork from it."""
        ref = request.session
        if ref is None:
            return
        now_s = request.arrival_s
        session = self._find(ref)
        path = ExpectedPath(session.owner)
        if session.open:
            self._expectations.put(path, self._deepest(session, request))
        else:
            if session.paused_s is not None:
                self._learn(session, now_s - session.paused_s)
                session.paused_s = None
            self._take_turn(session, request)
            self._go_on(session, request, path)
            self._num_running += 1
        self._expectations.expect_at(path, now_s)
        self._add_path(session, path)
        self._open[request] = _Open(session, request, path)
        for fork in request.forks:
            self._open[fork] = _Open(session, request, None)
        session.open[request] = request.num_seqs

    def owner_of(self, request: Request) -> object | None:
        """Return for whom the blocks of ``request`` are used; None if it has no session."""
        found = self._open.get(request)
        return None if found is None else found.session.owner

    def preempted(self, request: Request) -> None:
        """Note that a request which runs lets go of its blocks, and waits again. To be told before it does."""
        found = self._open.get(request)
        if found is None or request.cache is None or found.session.is_over:
            return
        tail = self._take(request.cache, found.session.owner)
        if tail is not None and found.path is not None:
            self._expectations.put(found.path, tail)

    def finished(self, request: Request) -> None:
        """Note that a sample ends. To be told before it lets go of its blocks, and when its reason is known."""
        found = self._open.pop(request, None)
        if found is None:
            if request.cache is not None and self._expectations.has_claims:
                self._take(request.cache, None)
            return
        session, first, path = found
        session.open[first] -= 1
        if not session.open[first]:
            del session.open[first]
        tail = None if request.cache is None else self._take(request.cache, session.owner)
        if session.is_over:
            if session.is_ended and tail is not None:
                self._supersede(session, tail, 0, "ended")
            return
        self._num_running -= not session.open
        if path is None:
            path = ExpectedPath(session.owner)
            self._add_path(session, path)
        if tail is not None:
            self._expectations.put(path, tail)
        now_s = self._core.now_s
        returns_in_s = request.returns_in_s if request.has_answer else None
        if session.open:
            self._expectations.expect(path, self._forecast(session, returns_in_s), now_s)
        else:
            self._pause(session, now_s, returns_in_s)

    def end(self, ref: SessionRef) -> EndedSession | None:
        """End a session, with those of its sub-agents. None if there is none of that name, or it has ended before."""
        tenant = self._tenants.get(ref.tenant)
        first = None if tenant is None else tenant.sessions.get(ref.session)
        if first is None:
            return None
        family = [first]
        for session in family:  # it grows
            family += session.children
        tails: list[tuple[_Session, Node]] = []
        for session in family:
            tails += [(session, path.tail) for path in session.paths if path.tail is not None]
            self._remove(session)
            session.is_ended = True
        num_blocks = sum(self._supersede(session, tail, 0, "ended") for session, tail in reversed(tails))
        num_running = sum(len(session.open) for session in family)
        ended = EndedSession(len(family), num_blocks, num_running)
        self._emit(SessionClosed(ref.tenant, ref.session, *ended))
        return ended

    # Inside.

    def _find(self, ref: SessionRef) -> _Session:
        """Return the session of that name: a new one, if there is none."""
        tenant = self._tenants.get(ref.tenant)
        if tenant is None:
            tenant = self._tenants[ref.tenant] = _Tenant()
        sessions = tenant.sessions
        session = sessions.get(ref.session)
        if session is None:
            session = _Session(ref, sessions.get(ref.parent) if ref.parent else None)
            if len(sessions) >= self._max_per_tenant:
                self._remove(self._longest_idle(tenant))
            sessions[ref.session] = session
            self._num_sessions += 1
        else:
            sessions.move_to_end(ref.session)
        return session

    @staticmethod
    def _longest_idle(tenant: _Tenant) -> _Session:
        """Return who is forgotten next: of the first few the first without a request, or the very first."""
        first: _Session | None = None
        for _, session in zip(range(_LOOKED_AT), tenant.sessions.values(), strict=False):
            if not session.open:
                return session
            first = first or session
        assert first is not None, "somebody has to go where nobody is"
        return first

    def _remove(self, session: _Session) -> None:
        """Do not find a session any more. Its paths are like all others."""
        del self._tenants[session.ref.tenant].sessions[session.ref.session]
        self._num_sessions -= 1
        self._num_running -= bool(session.open)
        session.is_over = True
        for path in session.paths:
            self._expectations.drop(path)
        session.paths = []
        if session.parent is not None:
            session.parent.children.pop(session, None)
        for child in session.children:
            child.parent = None
        session.children = {}

    def _pause(self, session: _Session, now_s: float, said_s: float | None) -> None:
        """Expect a session back that has no request any more: as its client says, or as it was away before."""
        session.paused_s = now_s
        session.paths = [each for each in session.paths if each.tail is not None]
        forecast = self._forecast(session, said_s)
        risk = self._tenants[session.ref.tenant].compactions.risk(session.num_turns)
        for each in session.paths:
            self._expectations.expect(each, forecast, now_s, num_sure=session.num_sure, risk=risk)

    def _forecast(self, session: _Session, said_s: float | None) -> PauseForecast:
        """Return how long a pause of ``session`` will be: as its client says, or as it was away before."""
        if said_s is not None:
            return said(said_s)
        return forecast_of(session.pauses, self._tenants[session.ref.tenant].pauses)

    def _learn(self, session: _Session, pause_s: float) -> None:
        pause_s = max(0.0, pause_s)
        session.pauses.see(pause_s)
        self._tenants[session.ref.tenant].pauses.see(pause_s)

    def _take_turn(self, session: _Session, request: Request) -> None:
        """Note that a session goes on with ``request``, and whether its client has compacted the history before."""
        num_tokens = request.num_prompt_tokens
        if session.num_turns:
            is_cut = num_tokens < session.num_prompt_tokens
            self._tenants[session.ref.tenant].compactions.see(session.num_turns, is_cut=is_cut)
            session.num_turns = 1 if is_cut else session.num_turns + 1
        else:
            session.num_turns = 1
            session.num_sure = num_tokens // self._core.block_size
        session.num_prompt_tokens = num_tokens

    def _add_path(self, session: _Session, path: ExpectedPath) -> None:
        session.paths.append(path)
        if len(session.paths) > _MOST_PATHS:
            self._expectations.drop(session.paths.pop(0))

    def _go_on(self, session: _Session, request: Request, path: ExpectedPath) -> None:
        """Let ``path`` end where ``request`` parts from the paths of its session. What lies behind is superseded."""
        before = [each for each in session.paths if _is_in(each.tail, request.namespace)]
        if not before:
            if session.parent is not None and not session.paths:
                self._expectations.put(path, self._deepest(session.parent, request))
            return
        packed = request.packed()
        partings: list[tuple[Node, int]] = []
        best: Node | None = None
        for each in before:
            assert each.tail is not None
            common = _common(each.tail, packed, self._core.block_size * TOKEN_BYTES)
            partings.append((each.tail, len(common)))
            if common and (best is None or best.depth < common[-1].depth):
                best = common[-1]
        self._expectations.put(path, best)
        gone = set(before)
        session.paths = [each for each in session.paths if each not in gone]
        for each in before:
            self._expectations.drop(each)
        if session.num_turns == 1 and any(num_kept <= tail.depth for tail, num_kept in partings):
            session.num_sure = 0 if best is None else best.depth + 1
        for tail, num_kept in partings:
            if num_kept <= tail.depth:
                self._supersede(session, tail, num_kept, "edited")
            self._supersede_behind(session, tail, num_kept, packed)

    def _deepest(self, session: _Session, request: Request) -> Node | None:
        """Return the last node that ``request`` has in common with any path of ``session``; None for none."""
        packed, best = request.packed(), None
        for each in session.paths:
            tail = each.tail
            if tail is None or not _is_in(tail, request.namespace):
                continue
            common = _common(tail, packed, self._core.block_size * TOKEN_BYTES)
            if common and (best is None or best.depth < common[-1].depth):
                best = common[-1]
        return best

    def _take(self, cache: SequenceCache, owner: object | None) -> Node | None:
        """Note who has used the path of ``cache``, which ends; return its last node, or None for no path."""
        tail = cache.tail
        if not cache.has_path or tail is None or not tail.committed:
            return None
        num_loaded = sum(cache.num_loaded_tokens.values()) // self._core.block_size
        self._expectations.claim(tail, max(0, cache.num_begun - num_loaded), owner)
        return tail

    def _supersede(self, session: _Session, tail: Node, num_kept: int, cause: SupersedeCause) -> int:
        """Let the blocks of a path go first, but for the first ones. Return how many."""
        nodes = self._expectations.supersede(tail, session.owner, num_kept, stops=cause == "ended")
        if cause == "ended":
            self._supersede_behind(session, tail, tail.depth + 1)
        if not nodes:
            return 0
        if session.is_alone:
            self._core.blocks.supersede_copies(nodes, session.owner)
        self._core.pins.remove_at(nodes, session.owner)
        num_blocks = sum(block is not None for node in nodes for block in node.all_blocks)
        self._emit(PathSuperseded(num_blocks, cause, tuple(nodes)))
        return num_blocks

    def _supersede_behind(self, session: _Session, tail: Node, num_kept: int, packed: bytes = b"") -> None:
        """Let go first on the host what has left the device of a path, but for what ``packed`` goes on with.

        Args:
            session: whose path it is. While it has relatives nothing is done: theirs may lie there too.
            tail: the last node on the device.
            num_kept: how many of its first nodes ``packed`` begins with.
            packed: a prompt of the session; empty for none.
        """
        if not session.is_alone:
            return
        kept = tail
        while kept.depth >= num_kept and kept.parent is not None:
            kept = kept.parent
        stride = self._core.block_size * TOKEN_BYTES
        self._core.blocks.supersede_behind(kept, packed[num_kept * stride :], session.owner)
        if kept is not tail:
            self._core.blocks.supersede_behind(tail, b"", session.owner)


def _is_in(tail: Node | None, namespace: bytes) -> bool:
    return tail is not None and tail.root.key == namespace


def _path(tail: Node) -> Iterator[Node]:
    """Yield the nodes of a path, the last first."""
    node = tail
    while node.parent is not None:
        yield node
        node = node.parent


def _common(tail: Node, packed: bytes, stride: int) -> list[Node]:
    """Return the first nodes of the path up to ``tail`` that ``packed`` begins with."""
    nodes = list(_path(tail))
    nodes.reverse()
    for index, node in enumerate(nodes):
        if packed[index * stride : (index + 1) * stride] != node.key:
            return nodes[:index]
    return nodes
