"""open_remote: from a URL to the remote store that it names, guarded. Only here is known which kinds there are."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.store.address import RemoteAddress, masked
from pagefold.store.guarded import GuardedStore
from pagefold.store.mooncake_store import DEFAULT_PORT as MOONCAKE_PORT
from pagefold.store.mooncake_store import MooncakeStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.store.breaker import Change
    from pagefold.store.frame import FrameFormat
    from pagefold.store.guarded import RemoteStore

__all__ = ["SCHEMES", "open_remote"]

_REDIS_PORT = 6379


def _redis(url: str, form: FrameFormat, timeout_s: float) -> RemoteStore:
    address = RemoteAddress.parse(url, default_port=_REDIS_PORT)
    if find_spec("redis") is None:
        msg = f"{address}: redis-py is not installed."
        raise ConfigError(msg, remedy="pip install 'pagefold[redis]'.")
    from pagefold.store.redis_store import RedisStore  # noqa: PLC0415 - it needs redis-py

    return RedisStore(address, form, timeout_s=timeout_s)


def _mooncake(url: str, form: FrameFormat, timeout_s: float) -> RemoteStore:
    return MooncakeStore(RemoteAddress.parse(url, default_port=MOONCAKE_PORT), form, timeout_s=timeout_s)


SCHEMES = {"redis": _redis, "rediss": _redis, "valkey": _redis, "valkeys": _redis, "mooncake": _mooncake}
"""What a URL may begin with, and what it opens."""


def open_remote(
    url: str, form: FrameFormat, *, timeout_s: float = 1.0, on_change: Callable[[Change], None] | None = None
) -> GuardedStore:
    """Return the store at ``url``. Nothing is connected yet: see :meth:`GuardedStore.connect` and ``self_test``.

    Args:
        url: ``redis://``, ``rediss://`` or ``mooncake://``, then ``HOST:PORT``, then what the kind of store knows.
        form: of the frames.
        timeout_s: for each batch of a call.
        on_change: told when the store goes out and when it comes back.

    Raises:
        ConfigError: the URL cannot work, or what it needs is not installed. The message shows no password.
    """
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        msg = f"{masked(url)!r} is no remote store."
        raise ConfigError(msg, remedy=f"Begin it with one of {', '.join(f'{known}://' for known in SCHEMES)}.")
    return GuardedStore(SCHEMES[scheme](url, form, timeout_s), on_change=on_change)
