"""Bytes per token and block: every model of the table by formula, and the index of a cell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.kv import CODECS, KEEP_ALL, KV_CACHE_DTYPES, CacheGroup, KeepRule, KVGeometry, LayerKV, lay_out
from pagefold.kv.pool import BlockPool

MODELS = {
    # name: layers, KV heads, head_dim, bytes a token in fp16 (shared reference table)
    "Llama-3-70B": (80, 8, 128, 327_680),
    "70B with 64 KV heads": (80, 64, 128, 2_621_440),
    "Llama-2-7B": (32, 32, 128, 524_288),
    "Llama-2-13B": (40, 40, 128, 819_200),
    "Llama-3-8B": (32, 8, 128, 131_072),
    "Llama-3.2-1B": (16, 8, 64, 32_768),
    "Qwen3-8B": (36, 8, 128, 147_456),
    "Qwen3-0.6B": (28, 8, 128, 114_688),
    "Qwen2.5-7B": (28, 4, 128, 57_344),
    "Qwen2.5-1.5B": (28, 2, 128, 28_672),
    "Qwen2.5-0.5B": (24, 2, 64, 12_288),
    "SmolLM2-135M": (30, 3, 64, 23_040),
}


@pytest.mark.parametrize("name", MODELS)
def test_bytes_per_token(name: str) -> None:
    num_layers, num_kv_heads, head_dim, bytes_per_token = MODELS[name]
    geometry = KVGeometry(num_layers, num_kv_heads, head_dim, element_bytes=2)
    assert geometry.bytes_per_token == bytes_per_token
    assert geometry.bytes_per_block == 16 * bytes_per_token


def test_a_block_of_70b_is_5_mib_and_a_budget_is_whole_blocks() -> None:
    geometry = KVGeometry(80, 8, 128, element_bytes=2)
    assert geometry.bytes_per_block == 5 * 2**20
    assert geometry.num_blocks(45 * 10**9) == 8_583
    assert geometry.num_blocks(45 * 2**30) == 9_216
    assert geometry.num_blocks(5 * 2**20 - 1) == 0


@given(
    geometry=st.builds(
        KVGeometry,
        num_layers=st.integers(1, 100),
        num_kv_heads=st.integers(1, 128),
        head_dim=st.integers(1, 512),
        element_bytes=st.sampled_from((1, 2, 4, 8)),
        block_size=st.sampled_from((1, 4, 16, 32, 128)),
    ),
    budget_bytes=st.integers(0, 2**48),
)
def test_everything_follows_from_the_shape(geometry: KVGeometry, budget_bytes: int) -> None:
    num_cells = geometry.num_layers * geometry.num_kv_heads
    assert geometry.bytes_per_token == 2 * num_cells * geometry.head_dim * geometry.element_bytes
    assert geometry.bytes_per_block == geometry.bytes_per_token * geometry.block_size
    assert geometry.bytes_per_block == geometry.cell_bytes(0) * num_cells
    num_blocks = geometry.num_blocks(budget_bytes)
    assert num_blocks * geometry.bytes_per_block <= budget_bytes < (num_blocks + 1) * geometry.bytes_per_block


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (5000, 313)])
def test_blocks_for_a_sequence_are_a_ceiling(num_tokens: int, num_blocks: int) -> None:
    assert KVGeometry(1, 1, 1, 2).num_blocks_for(num_tokens) == num_blocks


def test_a_plain_model_has_one_group_with_all_cells() -> None:
    (group,) = KVGeometry(3, 2, 64, element_bytes=2, block_size=16).groups
    assert group == CacheGroup(layers=(0, 1, 2), num_kv_heads=2, block_size=16)
    assert group.num_cells == 6
    assert [group.cell(layer, head) for layer in range(3) for head in range(2)] == list(range(6))


def test_a_group_counts_cells_by_its_own_layers() -> None:
    group = CacheGroup(layers=(1, 4, 7), num_kv_heads=2, block_size=16)
    assert group.cell(4, 1) == 3
    with pytest.raises(ValueError, match=r"not in tuple"):
        group.cell(2, 0)


# Layers of several kinds, in groups of equal blocks.

KINDS = st.builds(
    LayerKV,
    num_kv_heads=st.sampled_from((1, 2, 4, 8)),
    key_dim=st.sampled_from((32, 64, 128, 576)),
    value_dim=st.sampled_from((0, 32, 64, 128)),
    keeps=st.builds(KeepRule, window=st.sampled_from((None, None, 64, 1024)), is_chunked=st.booleans()),
)


@given(
    layers=st.lists(KINDS, min_size=1, max_size=4, unique=True).flatmap(
        lambda kinds: st.lists(st.sampled_from(kinds), min_size=1, max_size=70)
    ),
    codec=st.sampled_from(sorted(CODECS)),
    block_size=st.sampled_from((1, 16, 64)),
    num_tokens=st.integers(0, 5000),
)
def test_groups_hold_every_layer_once_in_equal_blocks(layers, codec, block_size, num_tokens) -> None:
    layout = lay_out(layers, CODECS[codec], block_size=block_size)
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(layers)))
    for group in layout.groups:
        kinds = {layout.layers[layer] for layer in group.layers}
        assert len(kinds) == 1, "a group has layers of one kind"
        (kind,) = kinds
        assert (group.num_kv_heads, group.keeps) == (kind.num_kv_heads, kind.keeps)
        assert group.block_size >= block_size
        used = len(group.layers) * kind.bytes_per_token(layout.codec) * group.block_size
        assert used <= layout.bytes_per_block
    held = layout.num_blocks_for(num_tokens) * layout.bytes_per_block
    assert held >= layout.num_bytes_for(num_tokens)
    longest = layout.longest_in(layout.num_blocks_for(num_tokens), 6000)
    assert longest >= num_tokens
    assert longest == 6000 or layout.num_blocks_for(longest + 1) > layout.num_blocks_for(num_tokens)


@pytest.mark.parametrize(
    ("num_windowed", "num_full", "num_groups", "layers_each"),
    [(13, 13, 2, 13), (40, 8, 6, 8), (52, 10, 11, 6), (29, 5, 7, 5), (36, 12, 4, 12), (10, 0, 1, 10)],
)
def test_how_many_groups(num_windowed, num_full, num_groups, layers_each) -> None:
    windowed, full = LayerKV(4, 128, 128, keeps=KeepRule(1024)), LayerKV(4, 128, 128)
    layout = lay_out([windowed] * num_windowed + [full] * num_full, CODECS["float16"], max_len=8192)
    assert len(layout.groups) == num_groups
    assert max(len(group.layers) for group in layout.groups) == layers_each


@pytest.mark.parametrize(("num_windowed", "num_full"), [(22, 4), (52, 10), (15, 3), (5, 5)])
def test_what_is_packed_is_one_group_whatever_is_padding(num_windowed, num_full) -> None:
    packed = KeepRule(256, is_chunked=True, num_before=1, packs=True)
    layers = [LayerKV(4, 128, 128, keeps=KeepRule(512))] * num_windowed + [
        LayerKV(4, 128, 128, keeps=packed)
    ] * num_full
    layout = lay_out(layers, CODECS["float16"])
    (group,) = (group for group in layout.groups if group.keeps.packs)
    assert group.layers == tuple(range(num_windowed, num_windowed + num_full))
    assert {group.block_size for group in layout.groups} == {16}


def test_a_window_that_nothing_passes_is_none() -> None:
    layers = [LayerKV(4, 64, 64, keeps=KeepRule(4096)), LayerKV(4, 64, 64)]
    assert len(lay_out(layers, CODECS["float16"], max_len=4096).groups) == 1
    assert len(lay_out(layers, CODECS["float16"], max_len=4097).groups) == 2


def test_sinks_are_bytes_and_blocks_beside_a_window() -> None:
    layer = LayerKV(4, 64, 64, keeps=KeepRule(100, num_sinks=20))
    assert [layer.num_tokens(num) for num in (7, 120, 121, 5000)] == [7, 120, 120, 120]
    layers = [layer, LayerKV(4, 64, 64, keeps=KeepRule(100))]
    layout = lay_out(layers, CODECS["float16"])
    assert [group.keeps for group in layout.groups] == [KeepRule(100, num_sinks=20), KeepRule(100)]
    assert layout.num_bytes_for(5000) == (120 + 100) * layer.bytes_per_token(CODECS["float16"])
    assert [group.num_blocks_for(5000) for group in layout.groups] == [2 + 8, 8]
    assert [group.num_blocks_for(5000, 10) for group in layout.groups] == [2 + 9, 9]
    assert [group.num_blocks_for(40) for group in layout.groups] == [3, 3]
    assert layout.lasting_bytes_per_token == 0
    geometry = KVGeometry(2, 4, 64, 2, keeps=(KeepRule(100, num_sinks=20), KeepRule(100)))
    assert geometry.groups == layout.groups


def test_a_window_that_nothing_passes_beside_its_sinks_is_none() -> None:
    layers = [LayerKV(4, 64, 64, keeps=KeepRule(4000, num_sinks=96)), LayerKV(4, 64, 64)]
    assert [group.keeps for group in lay_out(layers, CODECS["float16"], max_len=4096).groups] == [KEEP_ALL]
    assert len(lay_out(layers, CODECS["float16"], max_len=4097).groups) == 2


def test_one_kind_is_one_group_as_the_slab_has_it() -> None:
    geometry = KVGeometry(30, 3, 64, element_bytes=4)
    layout = lay_out([LayerKV(3, 64, 64)] * 30, CODECS["float32"])
    assert layout.groups == geometry.groups == geometry.layout.groups
    assert layout.bytes_per_block == geometry.bytes_per_block == geometry.cell_bytes(29) * 90


def test_fewer_cells_have_more_tokens_a_block() -> None:
    wide, narrow = LayerKV(8, 128, 128), LayerKV(2, 128, 128)
    layout = lay_out([wide] * 4 + [narrow] * 4, CODECS["float16"], block_size=16)
    assert {group.block_size for group in layout.groups} == {16, 64}


@pytest.mark.parametrize(
    ("group", "num_tokens", "num_blocks"),
    [
        (CacheGroup((0,), 1, 16), 1000, 63),
        (CacheGroup((0,), 1, 16, keeps=KeepRule(64)), 48, 3),
        (CacheGroup((0,), 1, 16, keeps=KeepRule(64)), 64, 4),
        (CacheGroup((0,), 1, 16, keeps=KeepRule(64)), 65, 5),
        (CacheGroup((0,), 1, 16, keeps=KeepRule(64)), 10_000, 5),  # positions 9,936 to 9,999 touch so many at most
        (CacheGroup((0,), 1, 16, keeps=KeepRule(64, is_chunked=True)), 10_000, 4),
    ],
)
def test_blocks_of_a_window(group, num_tokens, num_blocks) -> None:
    assert group.num_blocks_for(num_tokens) == num_blocks


@given(window=st.integers(1, 200), block_size=st.sampled_from((1, 4, 16)), last=st.integers(0, 3000))
def test_a_window_never_touches_more_blocks_than_are_counted(window, block_size, last) -> None:
    first = max(0, last - window + 1)
    touched = last // block_size - first // block_size + 1
    assert touched <= CacheGroup((0,), 1, block_size, keeps=KeepRule(window)).num_blocks_for(last + 1)


def test_groups_of_different_cells_fill_a_pool_to_the_byte() -> None:
    """The blocks that sequences take from one pool, group by group, are as many as the layout counts."""
    layers = [LayerKV(8, 64, 64, keeps=KeepRule(96))] * 3 + [LayerKV(8, 64, 64)] * 2 + [LayerKV(2, 64, 64)] * 2
    layout = lay_out(layers, CODECS["float16"], block_size=16)
    budget = 10_000 * layout.bytes_per_token
    pool = BlockPool(layout.num_blocks(budget))
    slab = bytearray(pool.num_blocks * layout.bytes_per_block)
    length, held = 500, 0
    while pool.num_free >= layout.num_blocks_for(length):
        for group in layout.groups:
            kept = range(-(-length // group.block_size))
            if group.keeps.window is not None:  # what lies before the window has gone back
                kept = kept[(length - group.keeps.window) // group.block_size :]
            for _ in kept:
                block = pool.allocate()
                start = block.block_id * layout.bytes_per_block
                for cell in range(group.num_cells):
                    kind = layout.layers[group.layers[0]]
                    size = kind.bytes_per_token(layout.codec) // kind.num_kv_heads * group.block_size
                    place = slice(start + cell * size, start + (cell + 1) * size)
                    assert not any(slab[place]), "no cell lies on another"
                    slab[place] = b"\x01" * size
        held += 1
    num_written = sum(slab)
    per_sequence = sum(
        group.num_blocks_for(length) * group.num_cells * group.block_size * 2 * 64 * 2 for group in layout.groups
    )
    assert held == layout.num_blocks(budget) // layout.num_blocks_for(length) > 10
    assert num_written == held * per_sequence


@pytest.mark.parametrize("name", [None, "int8_per_token_head", "k8v4", "int4_per_token_head", "kivi2"])
def test_layers_of_several_groups_begin_where_those_before_them_in_their_block_end(name) -> None:
    """17 layers, two of which keep all, in groups of two: of the last one's block half is nobody's."""
    keeps = tuple(KEEP_ALL if layer in {3, 9} else KeepRule(8) for layer in range(17))
    geometry = KVGeometry(17, 2, 64, 4, codec=CODECS[name] if name else None, keeps=keeps)
    windowed = [layer for layer in range(17) if layer not in {3, 9}]
    pairs = [tuple(windowed[at : at + 2]) for at in range(0, 15, 2)]
    assert [group.layers for group in geometry.groups] == [*pairs, (3, 9)]
    assert [geometry.groups[index].keeps for index in geometry.group_of_layer] == list(keeps)
    assert all(layer in geometry.groups[index].layers for layer, index in enumerate(geometry.group_of_layer))
    places = [geometry.groups[index].layers.index(layer) for layer, index in enumerate(geometry.group_of_layer)]
    own = 2 * geometry.cell_bytes(0)
    assert geometry.layer_begins == tuple(place * own for place in places)
    assert geometry.layer_ends == tuple((place + 1) * own for place in places)
    assert geometry.bytes_per_block == 2 * own
    cells = [geometry.cell(layer, head) for layer in range(17) for head in range(2)]
    assert cells == ([*range(34)] if name else [2 * place + head for place in places for head in range(2)])
    of_one_group = KVGeometry(17, 2, 64, 4, codec=geometry.codec)
    assert geometry.residual_bytes == of_one_group.residual_bytes, "a sequence has one residual, of all layers"


@pytest.mark.parametrize("name", [None, "int8_per_token_head", "kivi2"])
def test_layers_that_read_what_others_keep_have_their_cells_and_no_bytes(name) -> None:
    """Of six layers the last three read the second and the third."""
    codec = CODECS[name] if name else None
    window, sources = KeepRule(8), (0, 1, 2, 1, 2, 1)
    keeps = window, window, KEEP_ALL, window, KEEP_ALL, window
    geometry = KVGeometry(6, 2, 64, 4, codec=codec, keeps=keeps, sources=sources)
    alone = KVGeometry(3, 2, 64, 4, codec=codec, keeps=keeps[:3])
    assert geometry.layout == alone.layout
    assert geometry.bytes_per_token == alone.bytes_per_token
    assert geometry.residual_bytes == alone.residual_bytes
    assert geometry.layer_begins == alone.layer_begins
    assert geometry.num_cells == alone.num_cells == 6
    for layer, source in enumerate(sources):
        assert geometry.source_of(layer) == source
        assert geometry.group_of_layer[layer] == alone.group_of_layer[source]
        assert [geometry.cell(layer, head) for head in range(2)] == [alone.cell(source, head) for head in range(2)]
        assert geometry.codec_of(layer) == alone.codec_of(source)
    assert KVGeometry(6, 2, 64, 4, codec=codec, sources=sources).layout == KVGeometry(3, 2, 64, 4, codec=codec).layout


@given(
    name=st.sampled_from(sorted(set(KV_CACHE_DTYPES.values()) - {"kivi2"})),
    layers=st.lists(st.tuples(st.sampled_from((None, None, 8, 24)), st.booleans()), min_size=1, max_size=30),
    num_kv_heads=st.sampled_from((1, 2, 3)),
)
def test_layers_of_two_codecs_lie_beside_each_other_in_groups_of_equal_blocks(name, layers, num_kv_heads) -> None:
    keeps = tuple(KeepRule(window) for window, _ in layers)
    skipped = tuple(layer for layer, (_, is_skipped) in enumerate(layers) if is_skipped)
    geometry = KVGeometry(len(layers), num_kv_heads, 64, 4, 16, CODECS[name], skipped, CODECS["float16"], keeps)
    assert sorted(layer for group in geometry.groups for layer in group.layers) == list(range(len(layers)))
    ends = []
    for group in geometry.groups:
        assert group.block_size == 16
        assert {keeps[layer] for layer in group.layers} == {group.keeps}
        ends.append(0)
        for layer in group.layers:
            assert geometry.layer_begins[layer] == ends[-1]
            is_plain = layer in skipped
            ends[-1] += num_kv_heads * (16 * 2 * 64 * 2 if is_plain else geometry.cell_bytes(layer))
            assert not is_plain or geometry.cell_bytes(layer) == 16 * 2 * 64 * 2
    assert max(ends) == geometry.bytes_per_block, "the largest group fills its blocks"
    used = geometry.bytes_per_token * 16
    assert used == sum(ends)
    alone = max(map(geometry.cell_bytes, range(len(layers)))) * num_kv_heads * len(layers)
    padding, most = (1 - used / size for size in (geometry.bytes_per_block * len(ends), max(alone, used)))
    assert padding <= most + 1 / 16
    if len(set(keeps)) == 1:
        assert len(ends) == 1


@pytest.mark.parametrize(
    ("skipped", "num_groups", "share"),
    [((), 13, 0.0), ((0, 25), 7, 0.0012), ((5, 11, 17, 23), 8, 0.065), ((0, 5, 25), 5, 0.035), (range(26), 13, 0.0)],
)
def test_what_layers_in_16_bit_cost_of_a_gemma_3_of_1b(skipped, num_groups, share) -> None:
    """26 layers, of which each sixth keeps all: no more than a sixteenth beyond what no cut avoids is padding."""
    keeps = tuple(KeepRule(512) if (layer + 1) % 6 else KEEP_ALL for layer in range(26))
    codecs = CODECS["int8_per_token_head"], tuple(skipped), CODECS["float16"]
    geometry = KVGeometry(26, 1, 256, 4, 16, *codecs, keeps)
    assert len(geometry.groups) == num_groups
    whole = num_groups * geometry.bytes_per_block
    assert 0 <= 1 - 16 * geometry.bytes_per_token / whole <= share


@pytest.mark.parametrize(("block_size", "per_token", "share"), [(16, 52, 0.22), (32, 44, 0.18)])
def test_bytes_of_kivi2_are_exact(block_size, per_token, share):
    """Of a head of 64: codes of 16 bytes each, K's 4 bytes a channel for a block, V's 4 bytes a token."""
    geometry = KVGeometry(30, 3, 64, 4, block_size, CODECS["kivi2"])
    assert geometry.bytes_per_token == 90 * per_token == 90 * (16 + 4 * 64 // block_size + 16 + 4)
    assert geometry.bytes_per_block == 90 * (block_size * (16 + 16 + 4) + 4 * 64)
    assert geometry.bytes_per_token <= share * KVGeometry(30, 3, 64, 2, block_size).bytes_per_token
    assert geometry.residual_bytes == block_size * KVGeometry(30, 3, 64, 2, block_size).bytes_per_token
    assert lay_out(geometry.layout.layers, CODECS["kivi2"], block_size=block_size) == geometry.layout


@pytest.mark.parametrize("name", sorted(set(CODECS) - {"kivi2"}))
def test_nothing_lies_beside_blocks_that_are_not_sealed(name):
    assert KVGeometry(2, 2, 64, 4, 16, CODECS[name]).residual_bytes == 0
