"""The key file: which key belongs to which tenant and customer class.

It is TOML::

    [classes]              # optional: the priority that requests of a class have unless they bring one
    gold = -10
    batch = 10

    [[keys]]
    key = "sk-3fd9..."
    tenant = "acme"
    class = "gold"         # optional; one of [classes]
    weight = 2             # optional; the tenant's share beside others' weights, where the server shares by them
    tokens_per_s = 500     # optional; what the tenant may use, prompts and outputs together
    burst_tokens = 20000   # optional; and at once, behind a pause
    kv_floor = 0.1         # optional; so large a share of the cache others cannot have evicted
    kv_cap = 0.5           # optional; and the tenant never has more than this share of it

Several keys may belong to one tenant. Nothing here ever shows a key, nor a line of the file, which may hold one.
"""

from __future__ import annotations

import math
import re
import stat
import sys
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagefold.config import MAX_PRIORITY, Account, is_key
from pagefold.errors import ConfigError
from pagefold.request import MAX_WEIGHT, MIN_WEIGHT

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["read_key_file"]

_ENTRY = re.compile(r"\s*\[\[\s*[\"']?keys[\"']?\s*\]\]")
_AT_LINE = re.compile(r"at line (\d+)")
_TABLES = ("classes", "keys")
_OF_TENANT = ("kv_keep", "weight", "tokens_per_s", "burst_tokens", "kv_floor", "kv_cap")
_FIELDS = ("key", "tenant", "class", *_OF_TENANT)
_MOST_TOKENS = 1e12
_RANGES = {
    "weight": (MIN_WEIGHT, MAX_WEIGHT, "such as 1, or 2 for twice as much as those with 1"),
    "tokens_per_s": (1e-3, _MOST_TOKENS, "or leave it out for any number"),
    "burst_tokens": (1.0, _MOST_TOKENS, "or leave it out for what comes in a minute"),
    "kv_floor": (0.0, 0.99, "such as 0.25 for a quarter of the cache's blocks, or leave it out for none"),
    "kv_cap": (1e-6, 1.0, "such as 0.25 for a quarter of the cache's blocks, or leave it out for any number"),
}
"""What numbers may be, and what to write, by field."""


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
    terms: dict[str, tuple[float | None, ...]] = {}
    accounts: list[Account] = []
    for index, entry in enumerate(tables["keys"]):
        line = starts[index] if len(starts) == len(tables["keys"]) else index + 1
        account = _account(path, line, entry, classes)
        if account.key in line_of:
            raise _bad(path, line, f"repeats the key of line {line_of[account.key]}")
        line_of[account.key] = line
        _check_terms(path, line, account, terms)
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
    unknown = next((name for name in entry if name not in _FIELDS), None)
    if unknown is not None:  # it is named only if it is nearly one: who knows what else it is
        near = get_close_matches(unknown, _FIELDS, n=1, cutoff=0.7) if unknown.isprintable() else []
        said = f'the field "{unknown}", which may be meant for {near[0]}: there are' if near else "other fields than"
        raise _bad(path, line, f"begins an entry with {said} {', '.join(_FIELDS)}")
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
    weight, tokens_per_s, burst_tokens, kv_floor, kv_cap = (
        _number(path, line, tenant, entry, name) for name in _RANGES
    )
    if burst_tokens is not None and tokens_per_s is None:
        raise _bad(path, line, f'gives tenant "{tenant}" burst_tokens {burst_tokens:g}, and no tokens_per_s beside it')
    if kv_floor is not None and kv_cap is not None and kv_floor > kv_cap:
        what = f'gives tenant "{tenant}" kv_floor {kv_floor:g}, and kv_cap {kv_cap:g}, which is less'
        raise _bad(path, line, what)
    return Account(
        key=key,
        tenant=tenant,
        customer_class=customer_class,
        priority=classes.get(customer_class, 0),
        kv_keep=None if keep is None else float(keep),
        weight=weight,
        tokens_per_s=tokens_per_s,
        burst_tokens=burst_tokens,
        kv_floor=kv_floor,
        kv_cap=kv_cap,
    )


def _number(path: str, line: int, tenant: str, entry: dict[str, Any], name: str) -> float | None:
    """Return a number of an entry, if it is there."""
    value = entry.get(name)
    if value is None:
        return None
    least, most, hint = _RANGES[name]
    if type(value) not in (int, float):
        raise _bad(path, line, f'gives tenant "{tenant}" a {name} that is no number; write one, {hint}')
    if not least <= value <= most:  # nor is NaN
        if abs(value) > sys.float_info.max:  # an integer has no end
            value = math.inf if value > 0 else -math.inf
        raise _bad(path, line, f'gives tenant "{tenant}" {name} {value:g}; write {least:g} to {most:g}, {hint}')
    return float(value)


def _check_terms(path: str, line: int, account: Account, terms: dict[str, tuple[float | None, ...]]) -> None:
    """Refuse an entry that gives a tenant other terms than one before."""
    own = tuple(getattr(account, name) for name in _OF_TENANT)
    before = terms.setdefault(account.tenant, own)
    for name, value, other in zip(_OF_TENANT, own, before, strict=True):
        if value != other:
            raise _bad(path, line, f"gives a tenant another {name} than an entry before")


def _bad(path: str, line: int, what: str) -> ConfigError:
    remedy = "The server's documentation shows what a key file looks like."
    return ConfigError(f"Line {line} of the key file {path} {what}.", remedy=remedy)
