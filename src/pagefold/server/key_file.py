"""The key file: which key belongs to which tenant and customer class.

It is TOML::

    [classes]              # optional: the priority that requests of a class have unless they bring one
    gold = -10
    batch = 10

    [[keys]]
    key = "sk-3fd9..."
    tenant = "acme"
    class = "gold"         # optional; one of [classes]

Several keys may belong to one tenant. Nothing here ever shows a key, nor a line of the file, which may hold one.
"""

from __future__ import annotations

import re
import stat
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagefold.config import MAX_PRIORITY, Account, is_key
from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["read_key_file"]

_ENTRY = re.compile(r"\s*\[\[\s*[\"']?keys[\"']?\s*\]\]")
_AT_LINE = re.compile(r"at line (\d+)")
_TABLES = ("classes", "keys")
_FIELDS = ("key", "tenant", "class", "kv_keep")


def read_key_file(path: str, warn: Callable[[str], None]) -> tuple[Account, ...]:
    """Return the accounts of a key file.

    Args:
        path: of the file.
        warn: told in one line if others on the machine can read it.

    Raises:
        ConfigError: it cannot be read, or is not as it should be; with the line.
    """
    try:
        mode = Path(path).stat().st_mode
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        msg = f"The key file {path} cannot be read: {reason}."
        raise ConfigError(msg, remedy="Give a TOML file that this user may read.") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        said = f"others on this machine can read the key file {path} (mode {stat.S_IMODE(mode):04o})"
        warn(f"warning: {said}. Run: chmod 600 {path} (or give --fix-permissions)")
    return _accounts(path, text)


def _accounts(path: str, text: str) -> tuple[Account, ...]:
    lines = text.splitlines()
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # its message may quote the file
        at = _AT_LINE.search(str(error))
        raise _bad(path, int(at[1]) if at else len(lines), "is not valid TOML") from None
    unknown = [name for name in tables if name not in _TABLES]
    if unknown or not isinstance(tables.get("classes", {}), dict) or not isinstance(tables.get("keys"), list):
        raise _bad(path, 1, "does not hold [[keys]], or holds something else than these and [classes]")
    classes = _classes(path, tables.get("classes", {}), lines)
    starts = [number for number, line in enumerate(lines, 1) if _ENTRY.match(line)]
    line_of: dict[str, int] = {}
    kept: dict[str, float | None] = {}
    accounts: list[Account] = []
    for index, entry in enumerate(tables["keys"]):
        line = starts[index] if len(starts) == len(tables["keys"]) else index + 1
        account = _account(path, line, entry, classes)
        if account.key in line_of:
            raise _bad(path, line, f"repeats the key of line {line_of[account.key]}")
        line_of[account.key] = line
        if kept.setdefault(account.tenant, account.kv_keep) != account.kv_keep:
            raise _bad(path, line, "gives a tenant another kv_keep than an entry before")
        accounts.append(account)
    if not accounts:
        raise _bad(path, 1, "holds no keys")
    return tuple(accounts)


def _classes(path: str, classes: dict[str, Any], lines: list[str]) -> dict[str, int]:
    for name, priority in classes.items():
        if type(priority) is not int or abs(priority) > MAX_PRIORITY:
            line = next((number for number, line in enumerate(lines, 1) if line.lstrip(" \"'").startswith(name)), 1)
            raise _bad(path, line, "holds a class whose priority is not an integer within 32 bits")
    return classes


def _account(path: str, line: int, entry: object, classes: dict[str, int]) -> Account:
    if not isinstance(entry, dict):
        raise _bad(path, line, "holds an entry that is no table")
    if any(name not in _FIELDS for name in entry):
        raise _bad(path, line, f"begins an entry with other fields than {', '.join(_FIELDS)}")
    key, tenant, customer_class = entry.get("key"), entry.get("tenant"), entry.get("class", "")
    if not isinstance(key, str) or not is_key(key):
        raise _bad(path, line, "begins an entry whose key is missing, or is not printable ASCII without spaces")
    if not isinstance(tenant, str) or not tenant or not tenant.isprintable():
        raise _bad(path, line, "begins an entry whose tenant is missing, or is not a printable text")
    if not isinstance(customer_class, str) or (customer_class and customer_class not in classes):
        raise _bad(path, line, "begins an entry whose class is not in [classes]")
    keep = entry.get("kv_keep")
    if keep is not None and (type(keep) not in (int, float) or not 0 < keep <= 1):
        raise _bad(path, line, "begins an entry whose kv_keep is not a share above 0, or 1 for all")
    return Account(
        key=key,
        tenant=tenant,
        customer_class=customer_class,
        priority=classes.get(customer_class, 0),
        kv_keep=None if keep is None else float(keep),
    )


def _bad(path: str, line: int, what: str) -> ConfigError:
    remedy = "The server's documentation shows what a key file looks like."
    return ConfigError(f"Line {line} of the key file {path} {what}.", remedy=remedy)
