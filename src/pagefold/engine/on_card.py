"""A runner on a card: load weights there, measure what is taken, give the rest to KV, capture decoding steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.errors import DoesNotFitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.capacity import Capacity
    from pagefold.card_memory import CardUse
    from pagefold.engine.build import Blueprint
    from pagefold.runner.attention.cuda.attention import CudaAttention
    from pagefold.runner.card import Card
    from pagefold.runner.torch_runner import TorchRunner

__all__ = ["build_runner"]


def build_runner(
    blueprint: Blueprint, card: Card, capacity_beside: Callable[[CardUse], Capacity], say: Callable[[str], None]
) -> tuple[TorchRunner, Capacity]:
    """Return a runner whose blocks are on the card, and what fits there.

    Args:
        blueprint: what was decided.
        card: as it was before.
        capacity_beside: decides what fits beside what is measured.
        say: takes the lines that a start prints.

    Raises:
        DoesNotFitError, BudgetTooSmallError: the measured rest is too little, or others took it meanwhile.
    """
    import torch  # noqa: PLC0415 - heavy rooms are entered when they are needed

    from pagefold.runner.card_profile import measure_use  # noqa: PLC0415
    from pagefold.runner.cuda_decoder import CudaDecoder  # noqa: PLC0415
    from pagefold.runner.loader import load_model  # noqa: PLC0415
    from pagefold.runner.slab import Slab  # noqa: PLC0415
    from pagefold.runner.torch_runner import TorchRunner  # noqa: PLC0415

    config, geometry, dtype = blueprint.config, blueprint.geometry, blueprint.dtype
    kernels = _kernels(blueprint, card)

    def runner_with(num_blocks: int, max_model_len: int) -> TorchRunner:
        slab = Slab.allocate(geometry, num_blocks, dtype, blueprint.device)
        decoder = CudaDecoder(model, slab, kernels, max_model_len=max_model_len)
        return TorchRunner(decoder, geometry, slab)

    try:
        model = load_model(blueprint.spec.folder, dtype, blueprint.device)
        num_tokens, num_seqs = config.max_num_batched_tokens, config.max_num_seqs
        runner = runner_with(geometry.num_blocks_for(num_tokens), blueprint.capacity.max_model_len)
        use = measure_use(runner, card, num_tokens=num_tokens, num_seqs=num_seqs)
        del runner
        torch.cuda.empty_cache()
        capacity = capacity_beside(use)
        for line in capacity.lines():
            say(line)
        runner = runner_with(capacity.num_blocks, capacity.max_model_len)
        if kernels is not None and not config.enforce_eager:
            assert isinstance(runner.decoder, CudaDecoder)
            runner.warm_up()  # a model that cannot work is found out before its steps are captured
            runner.decoder.capture(runner.decoding_step(), num_seqs)
    except torch.OutOfMemoryError as error:
        msg = f"The card's memory ran out while the engine was started: {' '.join(str(error).split())[:200]}"
        remedy = "Use a smaller gpu_memory_utilization, kv_cache_memory_bytes or max_num_batched_tokens, or device=cpu."
        raise DoesNotFitError(msg, remedy=remedy) from error
    return runner, capacity


def _kernels(blueprint: Blueprint, card: Card) -> CudaAttention | None:
    """Return the attention; None for the reference, where that was asked for or only it can."""
    from pagefold.runner.attention.cuda.configs import DTYPES, MAX_HEAD_DIM  # noqa: PLC0415

    spec, can = blueprint.spec, blueprint.dtype in DTYPES and blueprint.spec.head_dim <= MAX_HEAD_DIM
    if blueprint.config.attention_backend == "reference" or not can:
        return None
    from pagefold.runner.attention.cuda.attention import CudaAttention, HeadShape  # noqa: PLC0415 - imports Triton

    heads = HeadShape(
        blueprint.dtype, spec.num_heads, spec.num_kv_heads, spec.head_dim, card.capability, card.num_processors
    )
    return CudaAttention(heads)
