"""Blocks that leave vLLM are named by all that K and V follow from, and refused where that has no name."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from pagefold.errors import ConfigError
from pagefold.integrations.vllm.connector_layout import layout_of
from pagefold.integrations.vllm.connector_settings import ConnectorSettings
from pagefold.integrations.vllm.model_names import check_names, digest_of_folder, weights_of

ABOUT = {
    "model": {"revision": None, "dtype": "torch.float32", "quantization": None, "max_model_len": 512},
    "cache": {"block_size": 32, "prefix_caching_hash_algo": "sha256", "cache_dtype": "auto"},
    "parallel": {"tensor_parallel_size": 1},
    "load": {"load_format": "auto", "download_dir": None},
}
CONFIG = {"architectures": ["Some"], "rope_theta": 10_000.0, "layers": [{"norm_eps": 1e-5}], 1: None}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(bytes(2**20))
    return made


def vllm_of(folder, *, config=None, top=None, **about):
    """Stands for vLLM's settings: what is read of them."""
    parts = {part: SimpleNamespace(**fields | about.get(part, {})) for part, fields in ABOUT.items()}
    parts["model"].model = about.get("model", {}).get("model", str(folder))
    parts["model"].hf_config = SimpleNamespace(to_dict=lambda: CONFIG | (config or {}))
    return SimpleNamespace(**{f"{part}_config": one for part, one in parts.items()} | (top or {}))


def caches_of(*, layers=("a", "b"), shape=(4, 2, 8), strides=(16, 8, 1), dtype="torch.float32", device="cuda"):
    """Stands for vLLM's tensors."""
    one = SimpleNamespace(shape=shape, stride=lambda: strides, dtype=dtype, device=SimpleNamespace(type=device))
    return dict.fromkeys(layers, one)


def key_of(folder, kv=None, version="0.32.0", **about):
    return layout_of(vllm_of(folder, **about), kv or caches_of(), version, leaves=True).key()


@pytest.mark.parametrize(
    "other",
    [
        {"config": {"rope_theta": 500_000.0}},  # as --hf-overrides leaves it
        {"config": {"layers": [{"norm_eps": 1e-6}]}},
        {"config": {"rope_scaling": {"type": "yarn"}}},
        {"model": {"max_model_len": 1024}},
        {"model": {"quantization": "fp8"}},
        {"model": {"quantization": "fp8", "quantization_config": {"ignore": ["lm_head"]}}},
        {"model": {"dtype": "torch.bfloat16"}},
        {"model": {"model_impl": "transformers"}},
        {"model": {"code_revision": "main"}},
        {"model": {"disable_sliding_window": True}},
        {"model": {"multimodal_config": SimpleNamespace(mm_processor_kwargs={"max_pixels": 1})}},
        {"cache": {"cache_dtype": "fp8"}},
        {"cache": {"kv_cache_dtype_skip_layers": ["0"]}},
        {"cache": {"block_size": 16}},
        {"cache": {"prefix_caching_hash_algo": "sha256_cbor"}},
        {"parallel": {"tensor_parallel_size": 2}},
        {"version": "0.31.0"},
        {"kv": caches_of(layers=("a", "c"))},
        {"kv": caches_of(shape=(4, 8, 2))},
        {"kv": caches_of(strides=(16, 1, 2))},
        {"kv": caches_of(device="xpu")},
        {"kv": caches_of(dtype="torch.float16")},
        {"top": {"attention_config": SimpleNamespace(backend="FLASH_ATTN")}},
        {"top": {"additional_config": {"a": 1}}},
        {"top": {"speculative_config": SimpleNamespace(method="mtp")}},
    ],
)
def test_whatever_k_and_v_follow_from_is_in_the_name(folder, other):
    assert key_of(folder, **other) != key_of(folder)


def test_where_a_config_was_read_from_is_not_in_the_name(folder):
    assert key_of(folder, config={"_name_or_path": "/here"}) == key_of(folder, config={"_name_or_path": "/there"})
    assert key_of(folder, config=dict(reversed(CONFIG.items()))) == key_of(folder)


def test_the_same_files_have_the_same_name_wherever_they_lie(folder, tmp_path):
    there = tmp_path / "there"
    shutil.copytree(folder, there)
    assert key_of(folder) == key_of(there)
    (there / "README.md").write_text("other words")
    (there / "tokenizer_config.json").write_text("{}")
    assert key_of(folder) == key_of(there)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "more.bin", "modeling.py", "hf_quant_config.json"]
)
def test_every_byte_of_what_a_model_is_loaded_from_is_in_its_name(folder, name):
    before = key_of(folder)
    file = folder / name
    held = bytearray(file.read_bytes() if file.exists() else b"{}")
    for at in range(0, len(held), max(1, len(held) // 3 - 7)):  # pieces of a file would miss some of these
        held[at] ^= 1
        file.write_bytes(held)
        assert key_of(folder) != before
        held[at] ^= 1
    file.write_bytes(held)


def test_a_digest_is_kept_until_the_file_is_another(folder, tmp_path):
    first = digest_of_folder(folder)
    notes = (tmp_path / "cache" / "digests").iterdir()
    (note,) = [one for one in notes if "safetensors" in one.read_text()]
    told = note.read_text()
    weights = folder / "model.safetensors"
    note.write_text(told.replace('"xxh3_128": "', '"xxh3_128": "known'))
    assert digest_of_folder(folder) != first, "what is kept was not asked"
    moved = folder / "moved"
    moved.write_bytes(weights.read_bytes())
    moved.replace(weights)  # the same bytes, another inode
    assert digest_of_folder(folder) == first


def test_a_file_of_weights_is_a_model(folder):
    assert key_of(folder, model={"model": str(folder / "model.safetensors")}) != key_of(folder)


@pytest.mark.parametrize("revision", [None, "v1"])
def test_a_name_of_the_hub_means_the_files_that_the_hub_has_brought(folder, tmp_path, revision):
    pytest.importorskip("huggingface_hub")
    about = {"model": {"model": "org/model", "revision": revision}, "load": {"download_dir": str(tmp_path / "hub")}}
    with pytest.raises(ConfigError, match=r"org/model is a name.*give --model the folder"):
        key_of(folder, **about)
    home = tmp_path / "hub" / "models--org--model"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / (revision or "main")).write_text("c0ffee")
    shutil.copytree(folder, home / "snapshots" / "c0ffee")
    assert key_of(folder, **about) == key_of(folder)
    (home / "snapshots" / "c0ffee" / "model.safetensors").write_bytes(b"other")
    assert key_of(folder, **about) != key_of(folder)


def test_a_tier_knows_the_files_of_a_folder_and_warns_of_what_it_cannot_know(folder, caplog):
    first = weights_of(str(folder), "")
    assert first
    assert not caplog.text
    (folder / "model.safetensors").write_bytes(b"other")
    assert weights_of(str(folder), "") != first
    assert weights_of(str(folder), "fp8") != weights_of(str(folder), "")
    assert weights_of("org/model", "v1") == "v1"
    assert not caplog.text
    assert not weights_of("org/model", "")
    assert all(word in caplog.text for word in ("org/model", "revision", "--quantization", "--hf-overrides"))


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        key_of(folder)


DRAFTER = SimpleNamespace(method="eagle", draft_model_config=SimpleNamespace(model="some/drafter"))


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"load": {"load_format": "dummy"}}, "load_format is 'dummy'.*leave disk_path"),
        ({"load": {"load_format": "tensorizer"}}, "load_format is 'tensorizer'"),
        ({"top": {"lora_config": object()}}, "--enable-lora"),
        ({"top": {"speculative_config": DRAFTER}}, "some/drafter"),
        ({"cache": {"calculate_kv_scales": True}}, "calculate_kv_scales"),
        ({"cache": {"prefix_caching_hash_algo": "xxhash"}}, "xxhash.*PYTHONHASHSEED"),
        ({"cache": {"prefix_caching_hash_algo": "xxhash_cbor"}}, "xxhash_cbor.*PYTHONHASHSEED"),
        ({"cache": {"prefix_caching_hash_algo": "builtin"}}, "builtin.*PYTHONHASHSEED"),
    ],
)
def test_what_has_no_name_is_refused_with_slow_tiers(folder, about, says):
    with pytest.raises(ConfigError, match=says):
        check_names(vllm_of(folder, **about), has_fixed_seed=True)


def test_what_has_a_name_is_not_refused(folder, monkeypatch):
    check_names(vllm_of(folder), has_fixed_seed=True)
    ngram = SimpleNamespace(method="ngram", draft_model_config=None)
    own = SimpleNamespace(method="mtp", draft_model_config=SimpleNamespace(model=str(folder)))
    for drafts in (ngram, own):
        check_names(vllm_of(folder, top={"speculative_config": drafts}), has_fixed_seed=True)
    with pytest.raises(ConfigError, match=r"sha256 from a seed.*PYTHONHASHSEED"):
        check_names(vllm_of(folder), has_fixed_seed=False)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for algorithm in ("sha256", "xxhash"):
        check_names(vllm_of(folder, cache={"prefix_caching_hash_algo": algorithm}), has_fixed_seed=False)


def test_each_replica_of_vllms_has_a_folder_of_its_own():
    settings = ConnectorSettings(host_bytes=1, disk_path="/var/kv", disk_bytes=1)
    folders = [
        settings.of_replica(SimpleNamespace(data_parallel_index=index, data_parallel_size=size)).disk_path
        for index, size in ((0, 1), (1, 1), (0, 2), (1, 2))  # of a dense model vLLM tells each that it is alone
    ]
    assert folders == ["/var/kv", "/var/kv-replica-1", "/var/kv/replica-0", "/var/kv/replica-1"]
    alone = ConnectorSettings(host_bytes=1)
    assert alone.of_replica(SimpleNamespace(data_parallel_index=1, data_parallel_size=1)) == alone
