"""Attention over blocks: one op, several implementations that a test holds equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.runner.attention.inputs import AttentionBackend, AttentionInputs, GroupInputs
from pagefold.runner.attention.reference import reference_attention

if TYPE_CHECKING:
    import torch

__all__ = ["AttentionBackend", "AttentionInputs", "GroupInputs", "choose_backend"]


def choose_backend(  # noqa: PLR0913 - settings, by name
    name: str, dtype: torch.dtype, *, block_size: int, head_dim: int, codes_a_byte: int = 1, in_pairs: bool = False
) -> AttentionBackend:
    """Return the implementation of that name; ``auto`` is the fastest that can do this dtype and shape.

    Args:
        name: ``auto``, ``cpu`` or ``reference``.
        dtype: of queries, keys and values.
        block_size: tokens a block.
        head_dim: numbers of a head.
        codes_a_byte: how many of a head's numbers have their codes in one byte of a block, at most.
        in_pairs: whether blocks have bfloat16 in pairs, which ``cpu`` multiplies as such.

    Raises:
        ConfigError: ``cpu`` was asked for and cannot.
    """
    import torch  # noqa: PLC0415 - the one thing needed of it

    multiple = 4 * codes_a_byte
    can_cpu = (in_pairs or dtype == torch.float32) and block_size % 4 == 0 and head_dim % multiple == 0
    if name == "reference" or (name == "auto" and not can_cpu):
        return reference_attention
    if not can_cpu:
        msg = (
            f"The cpu attention backend computes in float32, with block_size divisible by 4 and head_dim by {multiple}"
        )
        msg += f": not {dtype}, {block_size} and {head_dim}."
        raise ConfigError(msg, remedy="Use attention_backend=auto or reference.")
    from pagefold.runner.attention.cpu import CpuAttention  # noqa: PLC0415 - numba takes a second to import

    return CpuAttention(torch.get_num_threads())
