"""The namespace of an engine's blocks: what must be equal for them to be shared, whatever their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.config import DROPPED_BITS, cache_dir
from pagefold.kv import Namespace

if TYPE_CHECKING:
    from pagefold.engine.blueprint import Blueprint
    from pagefold.kv import CacheGroup

__all__ = ["namespace_of"]


def namespace_of(blueprint: Blueprint) -> Namespace:
    """Return what all blocks of the model share, whoever computes: other weights or another decoder give other bytes.

    Formats of products tell by which arithmetic they compute: their constants are part of the name.

    What leaves this process is named by what the model's files hold, which is the same on every machine.
    """
    from pagefold.kernels.rows import LANES  # noqa: PLC0415 - Numba comes with it
    from pagefold.runner.codec_slab import codec_layout_on  # noqa: PLC0415 - torch comes with it
    from pagefold.runner.content import content_fingerprint  # noqa: PLC0415 - only with slow tiers
    from pagefold.runner.slab import layout_on  # noqa: PLC0415 - torch comes with it

    config, spec = blueprint.config, blueprint.spec
    who = "fused" if blueprint.is_fused else "transformers"
    arithmetic = blueprint.arithmetic
    decoder = f"{who}: {arithmetic}" if arithmetic else f"{who}, rows in {LANES} lanes"
    geometry = blueprint.geometry
    layout = layout_on(blueprint.device, in_pairs=blueprint.computes_pairs)
    if geometry.codec is not None:
        from pagefold.runner.codecs import CELL_CODECS  # noqa: PLC0415 - torch comes with it
        from pagefold.runner.sealed_slab import sealed_layout_on  # noqa: PLC0415

        arrangement_on = sealed_layout_on if CELL_CODECS[geometry.codec.name].seals else codec_layout_on
        arrangement = arrangement_on(blueprint.device)
        skipped = ",".join(map(str, geometry.skip_layers))
        from pagefold.engine.calibration import digest_of  # noqa: PLC0415

        layout = f"{arrangement}/{geometry.codec.name}/{skipped}/{digest_of(blueprint.constants)}"
    if geometry.keeps:
        layout += "/" + ",".join(map(_kept_by, geometry.groups))
    if DROPPED_BITS[config.kv_transport_codec]:  # then no block is sure to be what was computed
        layout += f"/{config.kv_transport_codec}"
    return Namespace(
        model=content_fingerprint(spec.folder, cache_dir()) if config.has_slow_tiers else spec.fingerprint,
        layout=f"{layout}/{geometry.block_size}/{decoder}",
        dtype=str(blueprint.dtype),
    )


def _kept_by(group: CacheGroup) -> str:
    """Return what tells a cache group from others: the K and V behind other masks are others."""
    keeps = group.keeps
    sinks = f":{keeps.num_sinks}" if keeps.num_sinks else ""
    packed = f":{keeps.num_before} before, packed" if keeps.packs else ""
    return f"{group.layers}:{keeps.window}:{keeps.is_chunked}{sinks}{packed}"
