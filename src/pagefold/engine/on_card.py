"""A runner on a card: what fits there, before and after it is measured; blocks in the rest, decoding steps captured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pagefold.config import available_memory_bytes
from pagefold.engine.blocks import allocate_blocks, host_bytes_for
from pagefold.engine.hardware import Ready
from pagefold.errors import ConfigError, DoesNotFitError
from pagefold.files.json_object import read_json_object
from pagefold.memory.capacity import Capacity, human_bytes, plan_capacity
from pagefold.memory.card import CardBudget, CardUse, bound_use, budget_on_card

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pagefold.config import EngineConfig
    from pagefold.engine.blueprint import Blueprint
    from pagefold.kv import Arbiter, KVGeometry
    from pagefold.runner.attention.cuda.attention import CudaAttention
    from pagefold.runner.slab import AnySlab
    from pagefold.runner.torch_runner import Decoder, OnQueries, TorchRunner
    from pagefold.store import HostArena
    from pagefold.store.card_arena import CardArena

__all__ = ["OnCard", "bound_use_of", "build_runner", "capacity_on_card", "measure_link", "ran_out"]

_MAX_WHY = 200
_TABLE_ENTRY_BYTES = 4
"""Bytes of a block's id in a table of a card."""


class OnCard:
    """A card: see :class:`~pagefold.engine.hardware.Hardware`. It computes by itself."""

    computes_apart = True

    def capacity(self, blueprint: Blueprint) -> Capacity:
        """Decide what fits on the card, by bounds; it is decided again when the rest is measured."""
        _check(blueprint.config)
        host_bytes = _page_locked_bytes(blueprint.config, blueprint.geometry)
        return capacity_on_card(blueprint, bound_use_of(blueprint), host_bytes)

    def lines(self, blueprint: Blueprint) -> list[str]:
        """Return which card it is: what fits there is said when it has been measured."""
        assert blueprint.card is not None, "a card's name without one"
        return [f"card       {blueprint.card.name}"]

    def decoder(self, blueprint: Blueprint, slab: AnySlab, on_queries: OnQueries | None = None) -> Decoder:
        """Load the weights onto the card, for the reference attention."""
        from pagefold.runner.cuda_decoder import CudaDecoder  # noqa: PLC0415 - only here

        longest = blueprint.capacity.max_model_len
        return CudaDecoder(_load(blueprint), slab, None, max_model_len=longest, on_queries=on_queries)

    def ready(self, blueprint: Blueprint, say: Callable[[str], None]) -> Ready:
        """Load weights, measure what a step takes, and allocate blocks in the rest."""
        num_held = blueprint.capacity.num_host_blocks
        arena = _arena(blueprint, num_held) if num_held else None
        model = _load(blueprint)
        runner, capacity = build_runner(blueprint, model, say, arena)
        if arena is None:
            return Ready(runner, capacity, None)
        return Ready(runner, capacity, arena, partial(measure_link, arena, runner))


def bound_use_of(blueprint: Blueprint) -> CardUse:
    """Return a bound of what an engine takes of its card beside KV, from the model's shape."""
    from pagefold.engine.calibration import bound_constants  # noqa: PLC0415 - torch comes with it

    config, spec = blueprint.config, blueprint.spec
    raw = read_json_object(spec.folder / "config.json")
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    hidden = int(raw.get("hidden_size") or heads)
    inner = _widest(raw.get("intermediate_size")) or 4 * hidden
    # Residuals, norms in float32, projections before and after rope, and what the MLP multiplies.
    row_bytes = blueprint.dtype.itemsize * (4 * hidden + 3 * heads + 3 * inner) + 8 * hidden
    return bound_use(
        weight_bytes=spec.num_parameters * blueprint.dtype.itemsize + bound_constants(blueprint),
        vocab_size=spec.vocab_size,
        row_bytes=row_bytes,
        num_tokens=config.max_num_batched_tokens,
        num_seqs=config.max_num_seqs + config.max_draft_tokens,
    )


def _widest(sizes: int | list[int] | None) -> int:
    """Return the largest size that a config has: some families give one for each layer. 0 without any."""
    return max(sizes, default=0) if isinstance(sizes, list) else sizes or 0


def capacity_on_card(blueprint: Blueprint, use: CardUse, host_bytes: int = 0) -> Capacity:
    """Decide what fits on the card beside ``use``, and how many blocks ``host_bytes`` of the host's memory hold.

    Raises:
        ConfigError: ``max_model_len`` is beyond the model.
        DoesNotFitError, BudgetTooSmallError: with how much is missing, and settings that do.
    """
    config, card, layout = blueprint.config, blueprint.card, blueprint.geometry.layout
    assert card is not None, "a card's capacity without one"
    use = replace(use, activation_bytes=use.activation_bytes + _table_bytes(blueprint))
    longest, asked_len = blueprint.limit.length, config.max_model_len
    kv_bytes = budget_on_card(
        CardBudget(card.total_bytes, card.free_bytes, config.gpu_memory_utilization),
        use,
        layout,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        min_len=min(asked_len, longest) if isinstance(asked_len, int) else 2 if asked_len == "auto" else longest,
        max_len=longest,
    )
    return plan_capacity(
        layout=layout,
        weight_bytes=use.weight_bytes,
        limit=blueprint.limit,
        max_model_len=asked_len,
        kv_cache_memory_bytes=kv_bytes,
        max_num_seqs=config.max_num_seqs,
        available_bytes=use.weight_bytes + kv_bytes + host_bytes,
        host_bytes=host_bytes,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )


def _table_bytes(blueprint: Blueprint) -> int:
    """Return what tables of all cache groups take of the longest sequences: of a step, and where graphs have theirs.

    The step that is measured has few blocks, so they are added to what it took, too.
    """
    from pagefold.runner.cuda_graphs import Longest  # noqa: PLC0415 - torch comes with it

    config, limit = blueprint.config, blueprint.limit.length
    num_tokens = min(config.max_model_len, limit) if isinstance(config.max_model_len, int) else limit
    longest = Longest(num_tokens, blueprint.geometry.block_size)
    width = sum(longest.width_of(group.keeps) for group in blueprint.geometry.groups)
    return _TABLE_ENTRY_BYTES * config.max_num_seqs * width * (1 if config.enforce_eager else 2)


def build_runner(
    blueprint: Blueprint,
    model: Any,  # noqa: ANN401 - transformers' models have no common type
    say: Callable[[str], None],
    arena: HostArena | None = None,
) -> tuple[TorchRunner, Capacity]:
    """Return a runner whose blocks are on the card, and what fits there.

    Args:
        blueprint: what was decided.
        model: on the card, with our attention in it.
        say: takes the lines that a start prints.
        arena: where evicted blocks are; None without a host tier.

    Raises:
        DoesNotFitError, BudgetTooSmallError: the measured rest is too little, or others took it meanwhile.
    """
    import torch  # noqa: PLC0415 - heavy; only when it is needed

    from pagefold.runner.card_profile import measure_use  # noqa: PLC0415
    from pagefold.runner.cuda_decoder import CudaDecoder  # noqa: PLC0415
    from pagefold.runner.torch_runner import TorchRunner  # noqa: PLC0415

    config, geometry, card = blueprint.config, blueprint.geometry, blueprint.card
    assert card is not None, "a runner on a card without one"
    num_tokens, num_seqs = config.max_num_batched_tokens, config.max_num_seqs

    def decoder_with(num_blocks: int, num_residuals: int, max_model_len: int) -> tuple[CudaDecoder, AnySlab]:
        slab = allocate_blocks(blueprint, num_blocks, num_residuals)
        kernels = _kernels(blueprint)  # each slab has its own: they keep what they know of it, and it with that
        return CudaDecoder(model, slab, kernels, max_model_len=max_model_len), slab

    try:
        planned = blueprint.capacity  # in the step that is measured all rows have the first residual
        num_blocks = -(-num_tokens // geometry.block_size)  # which all of its cache groups have
        probe = decoder_with(num_blocks, min(1, planned.num_residuals), planned.max_model_len)
        num_rows = min(num_seqs + config.max_draft_tokens, num_tokens)
        use = measure_use(TorchRunner(probe[0], geometry, probe[1]), card, num_tokens=num_tokens, num_seqs=num_rows)
        del probe
        torch.cuda.empty_cache()
        capacity = capacity_on_card(blueprint, use, blueprint.capacity.host_bytes)
        for line in capacity.lines():
            say(line)
        decoder, slab = decoder_with(capacity.num_blocks, capacity.num_residuals, capacity.max_model_len)
        runner = TorchRunner(decoder, geometry, slab, arena)
        if decoder.kernels is not None and not config.enforce_eager:
            runner.warm_up()  # a model that cannot work is found out before its steps are captured
            decoder.capture(runner.decoding_step(), num_seqs)
    except torch.OutOfMemoryError as error:
        raise ran_out(error) from error
    return runner, capacity


def measure_link(arena: CardArena, runner: TorchRunner, arbiter: Arbiter, say: Callable[[str], None]) -> None:
    """Let ``arbiter`` know the link to the host's memory: measured before any block is in use, then by each restore.

    Args:
        arena: the host's blocks.
        runner: has the card's.
        arbiter: knows what computing takes.
        say: takes the lines that a start prints.
    """
    from pagefold.kv import LinkModel  # noqa: PLC0415 - as below
    from pagefold.kv.held_block import HOST  # noqa: PLC0415

    latency_s, bytes_per_s = arena.measure(runner.slab.as_bytes())
    link = arbiter.links[HOST] = LinkModel(latency_s, bytes_per_s)
    arena.on_restored = link.learn
    load_ms, compute_ms = 1e3 * arbiter.place_bytes / bytes_per_s, 1e3 * arbiter.compute_s(1)
    say(f"host       {bytes_per_s / 1e9:.1f} GB/s: restores a block in {load_ms:.2f} ms, computed in {compute_ms:.2f}")


def ran_out(error: torch.OutOfMemoryError) -> DoesNotFitError:
    """Return what a user is told of memory that ran out during a start."""
    msg = f"The card's memory ran out while the engine was started: {' '.join(str(error).split())[:_MAX_WHY]}"
    remedy = "Use a smaller gpu_memory_utilization, kv_cache_memory_bytes or max_num_batched_tokens, or device=cpu."
    return DoesNotFitError(msg, remedy=remedy)


def _kernels(blueprint: Blueprint) -> CudaAttention | None:
    """Return the attention; None for the reference, where that was asked for or only it can."""
    from pagefold.runner.attention.cuda.configs import DTYPES, MAX_HEAD_DIM, Reads  # noqa: PLC0415 - torch comes with it

    spec, card = blueprint.spec, blueprint.card
    assert card is not None, "kernels of no card"
    can = blueprint.dtype in DTYPES and spec.head_dim <= MAX_HEAD_DIM
    if blueprint.config.attention_backend == "reference" or not can:
        return None
    from pagefold.runner.attention.cuda.attention import CudaAttention, HeadShape  # noqa: PLC0415 - imports Triton
    from pagefold.runner.attention.cuda.blocks import reads_of  # noqa: PLC0415
    from pagefold.runner.codecs import CELL_CODECS  # noqa: PLC0415

    codec = blueprint.geometry.codec
    heads = HeadShape(
        blueprint.dtype,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        card.capability,
        card.num_processors,
        Reads.NUMBERS if codec is None else reads_of(CELL_CODECS[codec.name]),
    )
    return CudaAttention(heads)


def _check(config: EngineConfig) -> None:
    """Refuse what only a CPU can do yet.

    Raises:
        ConfigError: with what to leave out.
    """
    if config.allow_streaming:
        msg = "allow_streaming is set, and a card does not read the host's memory yet."
        raise ConfigError(msg, remedy="Leave it out, or use device=cpu.")


def _page_locked_bytes(config: EngineConfig, geometry: KVGeometry) -> int:
    """Return how much of the host's memory is page-locked for a card's blocks.

    Raises:
        DoesNotFitError: the host has not so much.
    """
    available_bytes = available_memory_bytes()
    host_bytes = host_bytes_for(config, geometry, available_bytes)
    if host_bytes > available_bytes:
        msg = f"kv_offloading_size is {human_bytes(host_bytes)}, and {human_bytes(available_bytes)} of memory are free."
        raise DoesNotFitError(msg, missing_bytes=host_bytes - available_bytes, remedy="Give less: it is page-locked.")
    return host_bytes


def _arena(blueprint: Blueprint, num_blocks: int) -> CardArena:
    """Return page-locked host memory for a card's blocks."""
    import torch  # noqa: PLC0415

    from pagefold.store.card_arena import CardArena  # noqa: PLC0415 - only here

    return CardArena(num_blocks, blueprint.capacity.host_bytes // num_blocks, torch.device(blueprint.device))


def _load(blueprint: Blueprint) -> Any:  # noqa: ANN401 - transformers' models have no common type
    """Load the weights onto the card.

    Raises:
        DoesNotFitError: others took its memory meanwhile.
    """
    import torch  # noqa: PLC0415

    from pagefold.runner.loader import load_model  # noqa: PLC0415

    try:
        return load_model(blueprint.spec.folder, blueprint.dtype, blueprint.device)
    except torch.OutOfMemoryError as error:
        raise ran_out(error) from error
