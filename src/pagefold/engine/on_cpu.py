"""A runner on CPUs: what fits in the machine's memory, blocks, and who computes the layers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pagefold.config import available_cpus, available_memory_bytes
from pagefold.engine.blocks import allocate_blocks, host_bytes_for
from pagefold.engine.draft_model import line_of_draft
from pagefold.engine.hardware import Ready
from pagefold.masks.rule import CHUNK
from pagefold.memory.capacity import NO_SHARE, Capacity, DraftShare, check_room, human_bytes, plan_capacity

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.engine.blueprint import Blueprint
    from pagefold.kv import KVGeometry
    from pagefold.runner.fused.decoder import FusedDecoder
    from pagefold.runner.slab import AnySlab
    from pagefold.runner.torch_runner import OnQueries
    from pagefold.runner.transformers_decoder import TransformersDecoder

__all__ = ["OnCpu"]


class OnCpu:
    """CPUs: see :class:`~pagefold.engine.hardware.Hardware`. Kernels have all of them busy while a step is computed."""

    computes_apart = False

    def capacity(self, blueprint: Blueprint) -> Capacity:
        """Decide what fits into the machine's memory, and see that the attention that was asked for can be had."""
        import torch  # noqa: PLC0415 - heavy; only when it is needed

        from pagefold.runner.attention import choose_backend  # noqa: PLC0415

        config, spec, geometry = blueprint.config, blueprint.spec, blueprint.geometry
        available_bytes = available_memory_bytes() - _draft_bytes(blueprint)
        share = NO_SHARE
        if blueprint.draft is not None and config.speculative_config is not None:
            draft_bytes = _weight_bytes(blueprint.draft)
            check_room(draft_bytes, available_bytes)
            available_bytes -= draft_bytes
            share = DraftShare(blueprint.draft.geometry.layout, config.speculative_config.kv_cache_memory_bytes)
        capacity = plan_capacity(
            layout=geometry.layout,
            weight_bytes=_weight_bytes(blueprint) + _adapter_bytes(blueprint),
            limit=blueprint.limit,
            max_model_len=config.max_model_len,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            max_num_seqs=config.max_num_seqs,
            available_bytes=available_bytes,
            host_bytes=host_bytes_for(config, geometry, available_bytes),
            allow_streaming=config.allow_streaming,
            max_num_batched_tokens=config.max_num_batched_tokens,
            draft=share,
        )
        choose_backend(
            config.attention_backend,
            torch.float32 if blueprint.is_fused else blueprint.dtype,  # that decoder has attention of its own
            block_size=config.block_size,
            head_dim=spec.head_dim,
            codes_a_byte=_codes_a_byte(geometry),
            in_pairs=blueprint.computes_pairs,
        )
        return capacity

    def lines(self, blueprint: Blueprint) -> list[str]:
        """Return what fits, and in which formats layers are computed."""
        lines = blueprint.capacity.lines() + _lines_of_sinks(blueprint)
        if blueprint.mask is not None:
            shares = " or ".join(f"{share:.0%}" for share in blueprint.config.masks)
            what = f"{shares} of what is older than {CHUNK} to {2 * CHUNK} tokens: outputs are not the model's"
            also = "; or all, as a request asks" if 1 in blueprint.config.kv_keep else ""
            lines.append(f"keeps      {what}{also}")
        if blueprint.draft is not None:
            lines.append(line_of_draft(blueprint.draft, _weight_bytes(blueprint.draft)))
        if blueprint.adapters is not None:
            num_loaded, num_bytes = len(blueprint.adapters.folders), _adapter_bytes(blueprint)
            most = f"up to {blueprint.config.max_loras}, of rank {blueprint.config.max_lora_rank} at most"
            lines.append(f"adapters   {most}; {num_loaded} from the start, {human_bytes(num_bytes)}")
        if blueprint.is_fused:
            products, others, stored = blueprint.formats
            lines.append(f"computes   {products.name}, by {products.means}")
            if stored:
                kinds = Counter(form.name for form in stored.values())
                told = ", ".join(f"{num} tensor{'s' * (num > 1)} in {name}" for name, num in sorted(kinds.items()))
                lines[-1] += f"; {told}, by {next(iter(stored.values())).means}"
            if blueprint.computes_pairs and blueprint.geometry.codec is None and others != products:
                lines[-1] += f"; attention in {others.name}, by {others.means}"
        else:
            dtype = str(blueprint.dtype).removeprefix("torch.")
            lines.append(f"computes   {dtype}, by transformers; ours does not go with {blueprint.not_fused}")
            if blueprint.packs:
                products = blueprint.formats.products
                lines.append(f"layers     packed in {products.name}, by {products.means}")
        return lines

    def decoder(
        self, blueprint: Blueprint, slab: AnySlab, on_queries: OnQueries | None = None
    ) -> FusedDecoder | TransformersDecoder:
        """Load the weights. transformers is imported for its own decoder only."""
        config, spec, max_model_len = blueprint.config, blueprint.spec, blueprint.capacity.max_model_len
        if blueprint.is_fused:
            from pagefold.runner.fused.decoder import FusedDecoder  # noqa: PLC0415 - compiles
            from pagefold.runner.fused.weights import pack_model  # noqa: PLC0415

            assert spec.fused is not None, "a fused decoder of a model that it does not compute"
            mask = blueprint.mask
            keeping = None if mask is None else mask.keeping
            packed = pack_model(spec.fused, spec.folder, max_model_len, blueprint.formats, keeping)
            num_threads = config.threads or available_cpus()
            adapters = None
            if blueprint.adapters is not None and on_queries is None:
                from pagefold.runner.fused.adapters import FusedAdapters  # noqa: PLC0415 - compiles

                adapters = FusedAdapters(spec.num_layers, config.max_loras, config.max_lora_rank)
            return FusedDecoder(
                spec.fused,
                packed,
                slab,
                num_threads=num_threads,
                keeps_sinks=any(keep.num_sinks for keep in blueprint.geometry.keeps),
                chunk_size=0 if mask is None else CHUNK,
                on_queries=on_queries,
                adapters=adapters,
            )
        from pagefold.runner.attention import choose_backend  # noqa: PLC0415
        from pagefold.runner.loader import load_model  # noqa: PLC0415
        from pagefold.runner.transformers_decoder import TransformersDecoder, told_queries  # noqa: PLC0415

        attention = choose_backend(
            config.attention_backend,
            blueprint.dtype,
            block_size=slab.block_size,
            head_dim=spec.head_dim,
            codes_a_byte=_codes_a_byte(blueprint.geometry),
            in_pairs=blueprint.computes_pairs,
        )
        if on_queries is not None:
            attention = told_queries(attention, on_queries)
        if blueprint.packs:
            from pagefold.runner.packed.experts import register_experts  # noqa: PLC0415 - kernels come with it
            from pagefold.runner.packed.layers import pack_layers  # noqa: PLC0415

            model = load_model(spec.folder, blueprint.dtype, experts=register_experts())
            pack_layers(model, blueprint.dtype, blueprint.formats.of, config.threads or available_cpus())
        else:
            model = load_model(spec.folder, blueprint.dtype)
        hooked = None
        if blueprint.adapters is not None and on_queries is None:
            from pagefold.runner.hooked_adapters import HookedAdapters  # noqa: PLC0415 - only with adapters

            hooked = HookedAdapters(model)
        return TransformersDecoder(model, slab, attention, max_model_len=max_model_len, adapters=hooked)

    def ready(self, blueprint: Blueprint, say: Callable[[str], None]) -> Ready:  # noqa: ARG002 - nothing to say
        """Load weights and allocate blocks. Where sequences may stream, the arena lies behind the blocks."""
        from pagefold.runner.torch_runner import TorchRunner  # noqa: PLC0415 - torch comes with it

        config, capacity = blueprint.config, blueprint.capacity
        num_held = capacity.num_host_blocks
        num_read = capacity.num_blocks + (num_held if config.allow_streaming else 0)  # blocks that attention reads
        slab = allocate_blocks(blueprint, num_read, capacity.num_residuals)
        arena = None
        if num_held:
            from pagefold.store import HostArena  # noqa: PLC0415 - only here

            behind: Any = slab.as_bytes()[capacity.num_blocks :] if config.allow_streaming else None
            arena = HostArena(num_held, capacity.host_bytes // num_held, behind)
        decoder = self.decoder(blueprint, slab)
        runner = TorchRunner(decoder, blueprint.geometry, slab, arena)
        if config.streaming_llm is not None and not blueprint.is_fused:
            from pagefold.runner.transformers_decoder import TransformersDecoder  # noqa: PLC0415 - only here

            assert isinstance(decoder, TransformersDecoder), "the other one is fused"
            decoder.learn_turns(runner.decoding_step())
        return Ready(runner, capacity, arena, adapters=decoder.adapters)


def _lines_of_sinks(blueprint: Blueprint) -> list[str]:
    """Return the line that says what is not as the model has it, where that is so."""
    keeps, config = blueprint.geometry.keeps, blueprint.config
    num_layers = sum(keep.num_sinks > 0 for keep in keeps)
    if not num_layers or config.streaming_llm is None:
        return []
    num_sinks, window = config.streaming_llm_sinks, config.streaming_llm
    what = f"the first {num_sinks:,} and the last {window:,} tokens, in {num_layers} of {len(keeps)} layers"
    return [f"streaming  {what}: beyond {num_sinks + window:,} tokens outputs are not the model's"]


def _draft_bytes(blueprint: Blueprint) -> int:
    """Return what logits of drafts take: as they are computed, and once more where they are adjusted.

    Those of a draft model are computed for no more requests than there may be drafts.
    """
    num_bytes = 2 * 4 * blueprint.config.max_draft_tokens * blueprint.spec.vocab_size
    if blueprint.draft is not None:
        num_bytes += 4 * blueprint.config.max_draft_tokens * blueprint.draft.spec.vocab_size
    return num_bytes


def _adapter_bytes(blueprint: Blueprint) -> int:
    """Return what the adapters take that are there from the start."""
    if blueprint.adapters is None:
        return 0
    folders = [folder for _, folder in blueprint.adapters.folders]
    if not blueprint.is_fused:
        return sum(folder.num_bytes for folder in folders)
    from pagefold.runner.fused.adapters import adapter_bytes  # noqa: PLC0415 - kernels come with it

    return sum(map(adapter_bytes, folders))


def _weight_bytes(blueprint: Blueprint) -> int:
    """Return the bytes of the weights as they will be in memory, with tables of all positions that may be served."""
    if blueprint.packs:
        from pagefold.runner.packed.outline import outline_of  # noqa: PLC0415 - transformers comes with it

        spec = blueprint.spec
        return outline_of(spec.folder, spec.fingerprint, blueprint.dtype).num_bytes(blueprint.formats.of)
    if not blueprint.is_fused:
        return blueprint.spec.num_parameters * blueprint.dtype.itemsize
    from pagefold.runner.fused.weights import packed_bytes  # noqa: PLC0415 - kernels come with it

    assert blueprint.spec.fused is not None, "a fused decoder of a model that it does not compute"
    asked, longest = blueprint.config.max_model_len, blueprint.limit.length
    num_positions = asked if isinstance(asked, int) else longest
    has_scores = blueprint.mask is not None
    return packed_bytes(blueprint.spec.fused, num_positions, blueprint.formats, has_scores=has_scores)


def _codes_a_byte(geometry: KVGeometry) -> int:
    """Return how many of a head's numbers have their codes in one byte of a block, at most."""
    from pagefold.runner.codecs import CELL_CODECS  # noqa: PLC0415 - torch comes with it

    return 1 if geometry.codec is None else CELL_CODECS[geometry.codec.name].codes_a_byte
