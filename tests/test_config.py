"""Settings: every range, and the memory that the machine and its cgroup leave."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from pagefold.config import EngineConfig, ServerConfig, available_memory_bytes, cache_dir
from pagefold.errors import ConfigError

GIB = 2**30


# Secrets.


def test_a_remote_url_is_never_shown():
    url = "redis://me:pa55@host"
    assert "pa55" not in repr(EngineConfig(model="m", kv_remote_url=url))
    with pytest.raises(ConfigError, match="kv_remote_url is set, but without prefix caching") as refused:
        EngineConfig(model="m", kv_remote_url=url, enable_prefix_caching=False)
    assert "pa55" not in str(refused.value)


# Ranges.


def test_defaults_are_valid_and_frozen():
    config = EngineConfig(model="m")
    assert (config.block_size, config.max_num_seqs, config.max_num_batched_tokens) == (16, 128, 512)
    with pytest.raises(FrozenInstanceError):
        config.block_size = 32


@pytest.mark.parametrize(
    "setting",
    [
        *({"dtype": dtype} for dtype in ("auto", "float32", "float64", "bfloat16", "float16")),
        *({"block_size": 2**power} for power in range(9)),
        *({"attention_backend": backend} for backend in ("auto", "cpu", "reference")),
        *({"eviction_policy": policy} for policy in ("default", "lru", "lfu", "fifo", "learned")),
        {"kv_cache_memory_bytes": 1},
        {"max_model_len": 2},
        {"max_model_len": "auto"},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_num_seqs": 512, "max_num_batched_tokens": 512},
    ],
    ids=str,
)
def test_what_is_in_range_is_taken(setting):
    config = EngineConfig(model="m", **setting)
    assert all(getattr(config, name) == value for name, value in setting.items())


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"model": ""}, "No model is named"),
        ({"dtype": "int8"}, "dtype is 'int8'. It must be one of auto, float32"),
        ({"attention_backend": "rocm"}, "attention_backend is 'rocm'. It must be one of auto, cpu, cuda, reference"),
        ({"device": "tpu"}, "device is 'tpu'. It must be one of auto, cpu, cuda"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization is 0.0. It must be above 0"),
        ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization is 1.01"),
        ({"eviction_policy": "random"}, "eviction_policy is 'random'. It must be one of default, lru, lfu, fifo"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": -16}, "block_size is -16"),
        ({"block_size": 24}, "block_size is 24. It must be a power of two up to 256"),
        ({"block_size": 512}, "block_size is 512"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes is 0"),
        ({"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes is -1"),
        ({"max_model_len": 1}, "max_model_len is 1. It must be at least 2 tokens, or auto"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_model_len": "long"}, "max_model_len is 'long'"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"priority_aging_s": 0.0}, "priority_aging_s is 0.0"),
        ({"priority_aging_s": float("inf")}, "priority_aging_s is inf"),
        ({"admission": "hope"}, "admission is 'hope'"),
        ({"max_num_partial_prefills": 0}, "max_num_partial_prefills is 0. It must be at least 1, or left out"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold is -1. It must be at least 1, or 0"),
        (
            {"long_prefill_token_threshold": 600, "max_model_len": 512},
            r"long_prefill_token_threshold is 600. It must be at most max_model_len \(512\)",
        ),
        ({"max_long_partial_prefills": 2}, "no prompt is long: long_prefill_token_threshold is 0"),
        (
            {"max_long_partial_prefills": 2, "max_num_partial_prefills": 1, "long_prefill_token_threshold": 9},
            r"max_long_partial_prefills is 2. It must be at least 1 and at most max_num_partial_prefills \(1\)",
        ),
        ({"target_ttft_ms": 0.0}, "target_ttft_ms is 0.0. It must be a positive number of milliseconds"),
        ({"target_ttft_ms": float("nan")}, "target_ttft_ms is nan"),
        ({"target_itl_ms": -1.0}, "target_itl_ms is -1.0"),
        ({"target_itl_ms": 1e9}, "target_itl_ms is 1000000000.0"),
        ({"max_num_batched_tokens": 127}, r"max_num_batched_tokens is 127. It must be at least max_num_seqs \(128\)"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused_with_what_would_work(setting, says):
    with pytest.raises(ConfigError, match=says):
        EngineConfig(**({"model": "m"} | setting))


@pytest.mark.parametrize("setting", [{"port": 0}, {"port": 65535}, {"max_body_bytes": 1}, {"drain_s": 0.0}], ids=str)
def test_the_door_takes_what_is_in_range(setting):
    config = ServerConfig(**setting)
    assert all(getattr(config, name) == value for name, value in setting.items())


@pytest.mark.parametrize(
    "setting",
    [{"port": -1}, {"port": 65536}, {"max_body_bytes": 0}, {"drain_s": -1.0}, {"drain_s": float("nan")}],
    ids=str,
)
def test_the_door_refuses_what_is_out_of_range(setting):
    (name,) = setting
    with pytest.raises(ConfigError, match=f"{name} is .* It must be"):
        ServerConfig(**setting)


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    for unset in (lambda: monkeypatch.setenv("PAGEFOLD_CACHE", ""), lambda: monkeypatch.delenv("PAGEFOLD_CACHE")):
        unset()
        assert cache_dir() == Path.home() / ".cache" / "pagefold"


# Memory.


class Machine:
    """A machine of files: /proc and /sys under a folder."""

    def __init__(self, root: Path):
        self.root = root

    def path(self, *parts: str) -> Path:
        path = Path(*parts)
        return self.root / path.relative_to("/") if path.is_absolute() else path

    def write(self, path: str, text: str) -> None:
        place = self.path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="ascii")

    def cgroup_v2(self, name: str, *, limit: str, used: int, inactive_file: int = 0) -> None:
        folder = f"/sys/fs/cgroup{name}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon {used}\ninactive_file {inactive_file}\nactive_file 7\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """8 GiB available, and no cgroup."""
    machine = Machine(tmp_path)
    machine.write("/proc/meminfo", f"MemTotal: {16 * 2**20} kB\nMemFree: 5 kB\nMemAvailable:    {8 * 2**20} kB\n")
    monkeypatch.setattr("pagefold.config.machine.Path", machine.path)
    return machine


def test_without_a_cgroup_it_is_what_the_machine_has(machine):
    assert available_memory_bytes() == 8 * GIB


def test_a_cgroup_without_a_limit_changes_nothing(machine):
    machine.write("/proc/self/cgroup", "0::/user.slice/me\n")
    machine.cgroup_v2("/user.slice/me", limit="max", used=5 * GIB)
    assert available_memory_bytes() == 8 * GIB


def test_a_limit_counts_what_is_used_but_not_file_cache_that_can_go(machine):
    machine.write("/proc/self/cgroup", "0::/user.slice/me\n")
    machine.cgroup_v2("/user.slice/me", limit=str(4 * GIB), used=3 * GIB, inactive_file=GIB)
    assert available_memory_bytes() == 2 * GIB


@pytest.mark.parametrize("name", ["", "/user.slice"])
def test_a_parent_limits_too(machine, name):
    machine.write("/proc/self/cgroup", "0::/user.slice/me\n")
    machine.cgroup_v2("/user.slice/me", limit="max", used=0)
    machine.cgroup_v2(name, limit=str(GIB), used=GIB // 4)
    assert available_memory_bytes() == GIB - GIB // 4


def test_inside_a_container_the_mount_itself_is_the_cgroup(machine):
    machine.write("/proc/self/cgroup", "0::/docker/0123abcd\n")  # a path of the host, which is not mounted here
    machine.cgroup_v2("", limit=str(2 * GIB), used=0)
    assert available_memory_bytes() == 2 * GIB


def test_a_limit_that_is_overdrawn_leaves_nothing(machine):
    machine.write("/proc/self/cgroup", "0::/\n")
    machine.cgroup_v2("", limit=str(GIB), used=2 * GIB)
    assert available_memory_bytes() == 0


def test_cgroup_v1_has_a_memory_controller(machine):
    machine.write("/proc/self/cgroup", "12:cpu,cpuacct:/job\n7:hugetlb,memory:/job\n1:name=systemd:/job\n")
    folder = "/sys/fs/cgroup/memory/job"
    machine.write(f"{folder}/memory.limit_in_bytes", f"{3 * GIB}\n")
    machine.write(f"{folder}/memory.usage_in_bytes", f"{GIB}\n")
    machine.write(f"{folder}/memory.stat", "cache 5\ninactive_file 0\n")
    assert available_memory_bytes() == 2 * GIB
    machine.write(f"{folder}/memory.limit_in_bytes", f"{2**63 - 4096}\n")  # what v1 says for no limit
    assert available_memory_bytes() == 8 * GIB


def test_a_kernel_without_the_line_is_told(machine):
    machine.write("/proc/meminfo", "MemTotal: 5 kB\n")
    with pytest.raises(ConfigError, match="Give kv_cache_memory_bytes"):
        available_memory_bytes()


def test_this_machine_has_memory():
    assert available_memory_bytes() > 2**20


def test_packing_is_for_blocks_that_go_over_a_network() -> None:
    EngineConfig(model="m", kv_transport_codec="lossy6", kv_remote_url="redis://host")
    with pytest.raises(ConfigError, match="no block goes over a network") as refused:
        EngineConfig(model="m", kv_transport_codec="lossless", kv_disk_path="d")
    assert "kv_remote_url" in refused.value.remedy
    with pytest.raises(ConfigError, match="none, lossless, lossy7, lossy6"):
        EngineConfig(model="m", kv_transport_codec="gzip", kv_remote_url="redis://host")
