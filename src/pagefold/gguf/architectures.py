"""The GGUF architectures that are known here, by GGUF's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.gguf.architecture import refusal
from pagefold.gguf.gemma2 import GEMMA2
from pagefold.gguf.gemma3 import GEMMA3
from pagefold.gguf.llama import LLAMA
from pagefold.gguf.phi3 import PHI3
from pagefold.gguf.qwen2 import QWEN2
from pagefold.gguf.qwen3 import QWEN3

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagefold.gguf.architecture import Architecture
    from pagefold.gguf.header import GgufHeader

__all__ = ["ARCHITECTURES", "find_architecture"]

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "phi3": PHI3,
}


def find_architecture(gguf: GgufHeader) -> Architecture:
    """Return how a file's architecture is read.

    Raises:
        GgufFormatError: it names none.
        UnsupportedModelError: one that is not known here, or the file is only a part of a model.
    """
    num_parts = gguf.value("split.count", int, 1)
    if num_parts > 1:
        raise refusal(gguf, f"it is one of {num_parts} parts of a model (join them: llama-gguf-split --merge)")
    name = gguf.value("general.architecture", str)
    if name not in ARCHITECTURES:
        raise refusal(gguf, f"its architecture is {name!r}, which is none of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]
