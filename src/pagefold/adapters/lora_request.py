"""LoRARequest: which adapter a request of the library wants, in vLLM's form."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LoRARequest"]


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by its name, and where it is if it is not loaded yet. Names and order of fields are vLLM's.

    Attributes:
        lora_name: its name.
        lora_int_id: any number; vLLM wants one. It means nothing here.
        lora_path: its folder; empty for one that is loaded.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
