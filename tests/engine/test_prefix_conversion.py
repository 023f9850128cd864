"""A prefix that one engine computed is another's: also in blocks of another size, to the bit."""

from __future__ import annotations

import pytest
from store.memory_store import always_load

from pagefold import LLM, SamplingParams
from pagefold.config import EngineConfig
from pagefold.engine.prefix_layout import find_prefix_layout
from pagefold.errors import ConfigError, PrefixMismatchError
from pagefold.hub.progress import silent
from pagefold.store.cache_folder import read_path
from pagefold.store.prefix_blocks import PrefixBlocks
from pagefold.store.prefix_file import open_prefix
from pagefold.store.prefix_folder import WantedPrefix, export_prefix, import_prefix

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TOKENS = [1000 + 7 * position % 997 for position in range(700)]
"""More than two splits of attention."""
PROMPT = [{"prompt_token_ids": [*TOKENS, 5, 6, 7]}]
LIMIT_GIB = 0.03


def llm_of(model, folder, **settings):
    llm = LLM(
        model=str(model),
        kv_cache_memory_bytes=2**21,
        kv_offloading_size=2**21 / 2**30,
        kv_disk_path=str(folder),
        kv_disk_size=LIMIT_GIB,
        max_model_len=1024,
        max_num_seqs=4,
        **settings,
    )
    always_load(llm.engine)
    return llm


def computed(model, folder, **settings):
    """Compute the prompt, write what is cached to the folder, and return what follows it."""
    llm = llm_of(model, folder, **settings)
    (result,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    llm.close()
    return result


def layout_of(model, **settings):
    return find_prefix_layout(EngineConfig(model=str(model), kv_disk_path=".", **settings), silent, print)[0]


def exported(folder, file, layout):
    export_prefix(folder, file, WantedPrefix(layout, layout.root(), TOKENS), lambda *_: None)


def blocks_in(folder, layout, names):
    frames = list(read_path(folder, layout.digest, [name.digest for name in names]))
    assert [frame.name for frame in frames] == names
    return [frame.payload for frame in frames]


@pytest.mark.parametrize(
    ("dtype", "size", "other"),
    [
        ("float32", 16, 64),
        pytest.param("float32", 32, 8, marks=pytest.mark.long),
        pytest.param("bfloat16", 16, 32, marks=pytest.mark.long),
        pytest.param("bfloat16", 64, 16, marks=pytest.mark.long),
    ],
)
def test_blocks_of_another_size_are_those_that_would_have_been_computed(tiny_chat_model, tmp_path, dtype, size, other):
    settings = {"dtype": dtype}
    first = computed(tiny_chat_model, tmp_path / "first", block_size=size, **settings)
    second = computed(tiny_chat_model, tmp_path / "second", block_size=other, **settings)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    source, target = (layout_of(tiny_chat_model, block_size=one, **settings) for one in (size, other))
    exported(tmp_path / "first", tmp_path / "prefix.kv", source)
    with open_prefix(tmp_path / "prefix.kv") as prefix:
        prefix.check(lambda *_: None)
        blocks = PrefixBlocks(prefix, target)
        assert import_prefix(blocks, tmp_path / "third", int(LIMIT_GIB * 2**30), lambda *_: None) == len(blocks.names)
    assert len(blocks.names) == 700 // max(size, other) * max(size, other) // other
    converted, own = (blocks_in(tmp_path / folder, target, blocks.names) for folder in ("third", "second"))
    assert converted == own
    third = computed(tiny_chat_model, tmp_path / "third", block_size=other, **settings)
    assert third.outputs[0].token_ids == first.outputs[0].token_ids
    assert third.num_cached_tokens >= blocks.num_tokens


@pytest.mark.long
def test_codes_go_by_file_too(tiny_chat_model, tmp_path):
    """What a codec knows of the model is part of the layout, which the command line finds as a server does."""
    settings = {"dtype": "float32", "kv_cache_dtype": "int8_per_token_head", "force_kv_cache_dtype": True}
    first = computed(tiny_chat_model, tmp_path / "first", **settings)
    layout = layout_of(tiny_chat_model, **settings)
    exported(tmp_path / "first", tmp_path / "prefix.kv", layout)
    with open_prefix(tmp_path / "prefix.kv") as prefix:
        prefix.check(lambda *_: None)
        blocks = PrefixBlocks(prefix, layout)
        assert import_prefix(blocks, tmp_path / "second", int(LIMIT_GIB * 2**30), lambda *_: None) == 43
        with pytest.raises(PrefixMismatchError, match="cannot be used here"):
            PrefixBlocks(prefix, layout_of(tiny_chat_model, block_size=32, **settings))
    second = computed(tiny_chat_model, tmp_path / "second", **settings)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert second.num_cached_tokens >= 688


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "float32", "model_impl": "transformers"}, "its decoder is fused.*, and here transformers"),
        ({"dtype": "float32", "quantization": "int8"}, "its decoder is fused"),
        ({"dtype": "float64", "attention_backend": "reference"}, "its dtype is torch.float32, and here torch.float64"),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, "its codec and arrangement is panels-v1, and here codec-"),
    ],
)
def test_other_engines_are_told_by_name(tiny_chat_model, settings, said):
    from pagefold.store.prefix_conversion import conversion_of

    source, target = (layout_of(tiny_chat_model, **one) for one in ({"dtype": "float32"}, settings))
    with pytest.raises(PrefixMismatchError, match=said):
        conversion_of(source, target, "prefix.kv")


def test_a_model_with_windows_has_no_prefix_files(windowed_chat_model):
    with pytest.raises(ConfigError, match="keep windows of their own"):
        layout_of(windowed_chat_model)
