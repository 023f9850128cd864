"""Pagefold inside vLLM: classes that vLLM loads by the path of this module. Importing it imports no vLLM."""

from __future__ import annotations

from importlib import import_module

__all__ = ["PagefoldConnector", "PagefoldPolicy", "PagefoldTier"]

_HOMES = {
    "PagefoldConnector": "pagefold.integrations.vllm.connector",
    "PagefoldPolicy": "pagefold.integrations.vllm.policy",
    "PagefoldTier": "pagefold.integrations.vllm.tier",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None and name.startswith("Pagefold"):
        home = _HOMES["PagefoldPolicy"]  # which names policies, and says of others why they are refused
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(home), name)
