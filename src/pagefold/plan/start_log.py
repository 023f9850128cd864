"""What a start's log says: of which engine and model it is, how it was started, and what it found of its memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.plan.span import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["StartLog", "read_start_log"]

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"(\d[\d,]{0,18}(?:\.\d{1,9})?)"
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB, "GB": 10**9, "B": 1}

_VLLM = re.compile(r"LLM engine \(v(\d+\.\d+(?:\.\d+)?)|\bvLLM (?:API server )?version v?(\d+\.\d+(?:\.\d+)?)")
_OWN = re.compile(r"^(?:.* )?KV budget +(\d{1,9}(?:\.\d{1,9})?) (GiB|MiB|KiB|B)\b", re.MULTILINE)
_SIZES: Mapping[str, tuple[str, ...]] = {
    "memory": (rf"total_memory={_NUMBER} ?GiB", rf"Free memory on device (?:\S+ )?\([\d.]+/{_NUMBER} GiB\)"),
    "weights": (
        rf"Model loading took {_NUMBER} (?:GiB|GB)",
        rf"Loading model weights took {_NUMBER} (?:GiB|GB)",
        rf"Actual usage is {_NUMBER} GiB for weight",
    ),
    "activations": (
        rf"torch peak memory increase: {_NUMBER} ?GiB",
        rf"{_NUMBER} GiB for peak activation",
        rf"PyTorch activation peak memory takes {_NUMBER} ?GiB",
    ),
    "outside": (
        rf"non-torch forward increase memory: {_NUMBER} ?GiB",
        rf"{_NUMBER} GiB for non-torch memory",
        rf"non_torch_memory takes {_NUMBER} ?GiB",
    ),
    "graphs": (
        rf"Graph capturing finished in .{{1,20}}, took {_NUMBER} GiB",
        rf"Estimated CUDA graph memory: {_NUMBER} GiB",
    ),
    "kv": (
        rf"Available KV cache memory: {_NUMBER} GiB",
        rf"memory reserved for KV Cache is {_NUMBER} ?GiB",
    ),
}
"""How versions of vLLM say each size, the newest first."""
_COUNTS: Mapping[str, tuple[str, ...]] = {
    "num_tokens": (r"GPU KV cache size: (\d[\d,]{0,18}) tokens",),
    "concurrency": (rf"Maximum concurrency for [\d,]+ tokens per request: {_NUMBER}x",),
}
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "model": (r"with config: model='([^']+)'", r"'model(?:_tag)?': '([^']+)'"),
    "dtype": (r"[( ,]dtype=torch\.(\w+)",),
    "kv_cache_dtype": (r"kv_cache_dtype='?(\w+)'?",),
    "quantization": (r"[ ,]quantization='?(\w[\w-]*)'?",),
    "max_model_len": (r"max_seq_len=(\d{1,9})", r"Using max model len (\d{1,9})"),
    "tensor_parallel_size": (r"tensor_parallel_size=(\d{1,9})",),
    "pipeline_parallel_size": (r"pipeline_parallel_size=(\d{1,9})",),
    "enforce_eager": (r"enforce_eager=(True|False)",),
    "max_num_batched_tokens": (r"max_num_batched_tokens=(\d{1,9})", r"'max_num_batched_tokens': (\d{1,9})"),
    "max_num_seqs": (r"'max_num_seqs': (\d{1,9})", r"Defaulting max_num_seqs to (\d{1,9})"),
    "gpu_memory_utilization": (
        r"'gpu_memory_utilization': (\d{1,9}(?:\.\d{1,9})?)",
        r"Requested memory: (\d{1,9}(?:\.\d{1,9})?) \(util\)",
        r"Desired GPU memory utilization is \((\d{1,9}(?:\.\d{1,9})?)",
        r"gpu_memory_utilization \((\d{1,9}(?:\.\d{1,9})?)\)",
    ),
}
_FAILURES = (
    r"No available memory for the cache blocks",
    r"is needed, which is larger than the available KV cache memory",
    r"is less than desired GPU memory utilization",
    r"(?:CUDA|HIP) out of memory",
    r"Engine core initialization failed",
)
_OWN_SIZES: Mapping[str, str] = {
    "weights": r"weights +(\d{1,9}(?:\.\d{1,9})?) (GiB|MiB|KiB|B)\b",
    "kv": r"KV budget +(\d{1,9}(?:\.\d{1,9})?) (GiB|MiB|KiB|B)\b",
}
_OWN_COUNTS: Mapping[str, str] = {
    "num_tokens": r"KV budget .* = (\d[\d,]{0,18}) tokens",
    "concurrency": r"fits +(\d[\d,]{0,18}(?:\.\d{1,9})?) requests of max_model_len",
}


@dataclass(frozen=True, slots=True)
class StartLog:
    """What a start said.

    Attributes:
        engine: as ``--engine`` takes it.
        options: how it was started, by the names of flags, as far as it says.
        sizes: bytes by name: memory, weights, activations, outside, graphs, kv. Of several workers the most, of KV and
            of the device's memory the least.
        counts: tokens and blocks that KV has, and requests of the longest length at once.
        failure: why it did not start; empty where it did.
    """

    engine: str
    options: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether it is of Pagefold's own server."""
        return self.engine == "pagefold"


def read_start_log(text: str, name: str) -> StartLog:
    """Return what the log of a start says, of vLLM or of Pagefold.

    Raises:
        ConfigError: it is of neither, or says nothing of its memory.
    """
    text = _COLOURS.sub("", text)
    found = _VLLM.search(text)
    if found is not None:
        log = _of_vllm(text, found[1] or found[2])
    elif _OWN.search(text) is not None:
        log = _of_ours(text)
    else:
        message = f"{name} is no log of a start that is known here: neither vLLM's version nor our KV budget is in it."
        raise ConfigError(message, remedy="Give all that the server printed, from its start on.")
    if not log.sizes and not log.failure:
        message = f"{name} is a start's log, and says nothing of its memory."
        raise ConfigError(message, remedy="Wait until it is ready; VLLM_LOGGING_LEVEL=DEBUG has every part.")
    return log


def _of_vllm(text: str, version: str) -> StartLog:
    options = {}
    for option, patterns in _OPTIONS.items():
        value = _first(text, patterns)
        if value and value not in {"None", "auto"}:
            options[option] = value
    sizes = {}
    for part, patterns in _SIZES.items():
        values = _all(text, patterns)
        if values:  # each worker says its own
            sizes[part] = round((min(values) if part in {"kv", "memory"} else max(values)) * GIB)
    counts = {each: min(values) for each, patterns in _COUNTS.items() if (values := _all(text, patterns))}
    failure = "" if counts else _first(text, tuple(f"({pattern})" for pattern in _FAILURES))
    return StartLog(f"vllm=={version}", options, sizes, counts, failure)


def _of_ours(text: str) -> StartLog:
    sizes = {}
    for part, pattern in _OWN_SIZES.items():
        found = re.search(pattern, text)
        if found is not None:
            sizes[part] = round(float(found[1]) * _UNITS[found[2]])
    counts = {
        each: _number(found[1])
        for each, pattern in _OWN_COUNTS.items()
        if (found := re.search(pattern, text)) is not None
    }
    options = {}
    length = re.search(r"max_model_len = (\d[\d,]{0,18})", text)
    if length is not None:
        options["max_model_len"] = length[1].replace(",", "")
    computes = re.search(r"computes +(\w+)", text)
    if computes is not None:
        options["dtype"] = computes[1]
    return StartLog("pagefold", options, sizes, counts)


def _first(text: str, patterns: tuple[str, ...]) -> str:
    return next((found[1] for pattern in patterns if (found := re.search(pattern, text)) is not None), "")


def _all(text: str, patterns: tuple[str, ...]) -> list[float]:
    """Return every number that the first pattern finds which finds any."""
    return next(
        (values for pattern in patterns if (values := [_number(each) for each in re.findall(pattern, text)])), []
    )


def _number(text: str) -> float:
    return float(text.replace(",", ""))
