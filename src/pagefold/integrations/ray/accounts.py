"""Whose a request is, by the key that it brings: the router looks for its prompt in that tenant's blocks alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.server.key_file import read_key_file
from pagefold.server.keys import account_with

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["tenants_of"]


def tenants_of(api_key_file: str | None) -> Callable[[Sequence[tuple[str, str]]], str]:
    """Return what finds the tenant of a request's headers: empty where its key is nobody's, who will be refused.

    Raises:
        ConfigError: the key file is none.
    """
    accounts = () if api_key_file is None else read_key_file(api_key_file, lambda _: None)

    def tenant_of(headers: Sequence[tuple[str, str]]) -> str:
        as_sent = {name.encode("latin-1"): value.encode("latin-1") for name, value in headers}
        account = account_with(as_sent, accounts)
        return "" if account is None else account.tenant

    return tenant_of
