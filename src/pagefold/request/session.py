"""SessionRef: which session a request belongs to, as the scheduler knows it: by digests, never by the client's text."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import NamedTuple

__all__ = ["MAX_SESSION_ID", "NO_SESSION_ID", "EndedSession", "SessionRef", "session_ref"]

MAX_SESSION_ID = 256
"""Characters of a session's id, at most."""

NO_SESSION_ID = re.compile(r"[\x00-\x1f\x7f-\x9f]|\A\.{1,2}\Z")
"""What no session's id may be: clients and routers drop it from a URL that names the session."""

_DIGEST_BYTES = 16


class SessionRef(NamedTuple):
    """A session, by digests: equal ones are one session, and those of different tenants never are.

    Attributes:
        tenant: whose it is.
        session: the session of that tenant.
        parent: the session whose agent called this one; empty for none.
    """

    tenant: bytes
    session: bytes
    parent: bytes = b""


class EndedSession(NamedTuple):
    """What ended with a session.

    Attributes:
        num_sessions: itself and its sub-agents.
        num_blocks: blocks that lost their value by it.
        num_running: requests of theirs that are still there; what they have loses its value when they end.
    """

    num_sessions: int
    num_blocks: int
    num_running: int


def session_ref(tenant: str, session_id: str, parent_session_id: str = "") -> SessionRef:
    """Return what names a session of ``tenant``.

    Args:
        tenant: who authenticated; a body never says it.
        session_id: the client's name for it; not empty.
        parent_session_id: that of its parent; empty for none.
    """
    key = blake2b(tenant.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest()

    def named(text: str) -> bytes:
        return blake2b(text.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES, key=key).digest()

    return SessionRef(key, named(session_id), named(parent_session_id) if parent_session_id else b"")
