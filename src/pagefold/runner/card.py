"""Card: the NVIDIA card that torch would use, and whether it will do. Decided before weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.runner.attention.cuda.configs import DTYPES, MAX_HEAD_DIM, MIN_CAPABILITY

if TYPE_CHECKING:
    import torch

    from pagefold.config import EngineConfig

__all__ = ["Card", "check_attention", "choose_device", "find_card", "why_unfit"]


@dataclass(frozen=True, slots=True)
class Card:
    """An NVIDIA card.

    Attributes:
        name: its maker's.
        capability: its compute capability.
        num_processors: its multiprocessors.
        total_bytes: its memory.
        free_bytes: how much of that nobody uses.
        has_triton: whether what compiles its kernels is installed.
    """

    name: str
    capability: tuple[int, int]
    num_processors: int
    total_bytes: int
    free_bytes: int
    has_triton: bool = True


def find_card() -> Card | None:
    """Return the card that torch uses by default, or None where there is none, or torch was built without CUDA."""
    import torch  # noqa: PLC0415 - heavy

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    capability = properties.major, properties.minor
    return Card(
        properties.name,
        capability,
        properties.multi_processor_count,
        total_bytes,
        free_bytes,
        has_triton=find_spec("triton") is not None,
    )


def why_unfit(card: Card | None) -> str:
    """Return why the kernels cannot run on ``card``; empty where they can."""
    if card is None:
        return "torch finds no NVIDIA card"
    if card.capability < MIN_CAPABILITY:
        has, needs = (".".join(map(str, numbers)) for numbers in (card.capability, MIN_CAPABILITY))
        return f"{card.name} has compute capability {has}, and the kernels need {needs}"
    if not card.has_triton:
        return "Triton is not installed"
    return ""


def choose_device(asked: str, card: Card | None) -> str:
    """Return ``cpu`` or ``cuda``; ``auto`` takes a card that will do.

    Raises:
        ConfigError: ``cuda`` was asked for and cannot be had.
    """
    why = why_unfit(card)
    if asked == "auto":
        return "cpu" if why else "cuda"
    if asked == "cuda" and why:
        msg = f"device is cuda, but {why}."
        raise ConfigError(msg, remedy=_remedy(card))
    return asked


def _remedy(card: Card | None) -> str:
    if card is None:
        return "Install a torch that is built with CUDA, check that nvidia-smi shows a card, or use device=cpu."
    if card.capability < MIN_CAPABILITY:
        return "Use a newer card, or device=cpu."
    return 'pip install "pagefold[gpu]", or use device=cpu.'


def check_attention(config: EngineConfig, device: str, dtype: torch.dtype, head_dim: int) -> None:
    """Refuse what no attention on this device computes.

    Raises:
        ConfigError: with the settings that do not go together.
    """
    asked = config.attention_backend
    if device == "cpu":
        if asked == "cuda":
            msg = "attention_backend is cuda, and the model runs on the CPU."
            raise ConfigError(msg, remedy="Use device=cuda, or attention_backend=auto.")
        return
    if asked == "cpu":
        msg = "attention_backend is cpu, and the model runs on a card."
        raise ConfigError(msg, remedy="Use device=cpu, or attention_backend=auto.")
    can = dtype in DTYPES and head_dim <= MAX_HEAD_DIM
    if asked == "cuda" and not can:
        msg = f"The cuda attention backend computes float16, bfloat16 and float32 with head_dim up to {MAX_HEAD_DIM}, "
        msg += f"not {dtype} and {head_dim}."
        raise ConfigError(msg, remedy="Use attention_backend=auto, which takes the slow reference then.")
