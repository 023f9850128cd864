"""What an engine takes of a card beside its KV, measured by one pass at the largest step."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from pagefold.memory.card import CardUse

if TYPE_CHECKING:
    from pagefold.runner.card import Card
    from pagefold.runner.torch_runner import TorchRunner

__all__ = ["measure_use"]


def measure_use(runner: TorchRunner, card: Card, *, num_tokens: int, num_seqs: int) -> CardUse:
    """Run the largest step, and return what weights, activations and CUDA itself take.

    Args:
        runner: over a slab that holds that step, which is not counted.
        card: as it was before the weights came.
        num_tokens: of the step.
        num_seqs: rows that sample in it.
    """
    slab_bytes = runner.slab.num_bytes
    weight_bytes = torch.cuda.memory_allocated() - slab_bytes
    torch.cuda.reset_peak_memory_stats()
    runner.run_largest(num_tokens, num_seqs)
    torch.cuda.synchronize()
    peak_bytes = torch.cuda.max_memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    other_bytes = max(0, card.free_bytes - free_bytes - torch.cuda.memory_reserved())
    return CardUse(weight_bytes, peak_bytes - weight_bytes - slab_bytes, other_bytes)
