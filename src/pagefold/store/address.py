"""RemoteAddress: where a remote store is, from its URL. It never shows a password."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RemoteAddress"]

_MASK = "***"


@dataclass(frozen=True)
class RemoteAddress:
    """Where a remote store is, and as whom to speak to it. As text it is its URL with a masked password.

    Attributes:
        scheme: the kind of the store.
        host, port: of the server.
        username, password: of the account; empty where there is none.
        path: behind the port, without its slash.
        options: of the query.
    """

    scheme: str
    host: str
    port: int
    username: str = ""
    password: str = field(default="", repr=False)
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str, *, default_port: int) -> RemoteAddress:
        """Read a URL.

        Raises:
            ConfigError: it is none, or has no host or no legal port. The message shows no password.
        """
        try:
            parts = urlsplit(url)
            if "@" in parts.path + parts.query + parts.fragment:  # or a password would be shown as a path
                msg = "of a password, the characters / ? # @ are written as %2F %3F %23 %40"
                raise ValueError(msg)  # noqa: TRY301  # told as all that is wrong with a URL
            port = parts.port or default_port
            hostname = parts.hostname
        except ValueError as error:
            msg = f"{masked(url)!r} is not a URL of a remote store: {error}."
            raise ConfigError(msg, remedy=_remedy(url)) from None
        if not hostname:
            msg = f"{masked(url)!r} names no host."
            raise ConfigError(msg, remedy=_remedy(url))
        return cls(
            parts.scheme,
            hostname,
            port,
            unquote(parts.username or ""),
            unquote(parts.password or ""),
            parts.path.strip("/"),
            dict(parse_qsl(parts.query, keep_blank_values=True)),
        )

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        account = f"{self.username}:{_MASK}@" if self.password else f"{self.username}@" if self.username else ""
        return f"{self.scheme}://{account}{host}:{self.port}" + (f"/{self.path}" if self.path else "")

    def without_secrets(self, text: str) -> str:
        """Return ``text`` with the password masked: servers may repeat what they were sent."""
        return text.replace(self.password, _MASK) if self.password else text

    def only_options(self, known: frozenset[str]) -> None:
        """Refuse options that are not among ``known``."""
        unknown = sorted(set(self.options) - known)
        if unknown:
            msg = f"{self}: unknown options {', '.join(unknown)}."
            raise ConfigError(msg, remedy=f"There are: {', '.join(sorted(known))}.")

    def number(self, option: str, default: float) -> float:
        """Return an option that is a number, not negative."""
        given = self.options.get(option)
        if given is None:
            return default
        try:
            value = float(given)
        except ValueError:
            value = -1
        if not 0 <= value < float("inf"):
            msg = f"{self}: {option}={given} is not a number that is 0 or more."
            raise ConfigError(msg, remedy=f"Give {option} as a plain number.")
        return value


def masked(url: str) -> str:
    """Return a URL, even a broken one, without what may be a password: all between scheme and the last ``@``."""
    scheme, there, rest = url.partition("://")
    if not there:
        return _MASK + url.rpartition("@")[2] if "@" in url else url
    account, at, place = rest.rpartition("@")
    name = account.partition(":")[0]
    return f"{scheme}://{name}:{_MASK}@{place}" if at else url


def _remedy(url: str) -> str:
    scheme = url.partition("://")[0] if "://" in url else "redis"
    return f"Write it as {scheme}://HOST:PORT."
