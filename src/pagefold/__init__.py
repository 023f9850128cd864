"""Pagefold: KV-cache management for LLM serving. Importing it imports no torch; its names are loaded when used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefold.adapters.lora_request import LoRARequest
    from pagefold.beams.offline import BeamSearchParams
    from pagefold.kv import KVCore
    from pagefold.llm import LLM
    from pagefold.sampling import SamplingParams
    from pagefold.sim import SimConfig, simulate
    from pagefold.structured.params import StructuredOutputsParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "KVCore",
    "LoRARequest",
    "SamplingParams",
    "SimConfig",
    "StructuredOutputsParams",
    "__version__",
    "simulate",
]

__version__ = "0.1.0"

_HOMES = {
    "LLM": "pagefold.llm",
    "LoRARequest": "pagefold.adapters.lora_request",
    "BeamSearchParams": "pagefold.beams.offline",
    "SamplingParams": "pagefold.sampling",
    "StructuredOutputsParams": "pagefold.structured.params",
    "KVCore": "pagefold.kv",
    "SimConfig": "pagefold.sim",
    "simulate": "pagefold.sim",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    msg = f"module 'pagefold' has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return __all__
