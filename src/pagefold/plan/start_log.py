"""What a start's log says: of which engine and model it is, how it was started, and what it found of its memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pagefold.errors import ConfigError
from pagefold.plan.span import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RUNS", "Outcome", "StartLog", "read_start_log"]

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"(\d[\d,]{0,18}(?:\.\d{1,9})?)"
_SHARE = r"(\d{1,9}(?:\.\d{1,20})?)"
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB, "GB": 10**9, "B": 1}

_VLLM = re.compile(r"LLM engine \(v(\d+\.\d+(?:\.\d+)?)|\bvLLM (?:API server )?version v?(\d+\.\d+(?:\.\d+)?)")
_OWN_SIZE = r" {1,20}(\d{1,9}(?:\.\d{1,9})?) (GiB|MiB|KiB|B)\b"
_OWN = re.compile(rf"\bKV budget{_OWN_SIZE}")
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
    "model": (r"with config: model='([^'\n]{1,4096})'", r"'model(?:_tag)?': '([^'\n]{1,4096})'"),
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
        rf"'gpu_memory_utilization': {_SHARE}",
        rf"Requested memory: {_SHARE} \(util\)",
        rf"[Dd]esired GPU memory utilization (?:is )?\({_SHARE}",
        rf"gpu_memory_utilization \({_SHARE}\)",
    ),
}
_FREE = (
    rf"Free memory on device (?:\S+ )?\({_NUMBER}/",
    rf"Initial free memory: {_NUMBER} ?GiB",
    rf"init memory snapshot: .{{0,200}}?free_memory={_NUMBER} ?GiB",
)
_OWN_CONTEXT_BYTES = GIB
"""What an engine's own context may have taken before it looks at what is free."""
_READY = ("Application startup complete", "Uvicorn running on")
"""Said when every part runs: what failed before was tried again."""
_RAN = (*_READY, "init engine (profile", "Graph capturing finished")
"""Said when what takes memory at a start is over."""
_OF_MEMORY = re.compile(
    r"No available memory for the cache blocks"
    r"|is needed, which is larger than the available KV cache memory"
    r"|(?:CUDA|HIP) out of memory|(?:CUDA|HIP) error: out of memory|OutOfMemoryError(?!: (?:CUDA|HIP) out of memory)"
)
_NOT_ENOUGH_FREE = re.compile(r"is less than desired GPU memory utilization")
_OTHER = re.compile(r"Engine core initialization failed|EngineCore failed to start")
_OWN_SIZES: Mapping[str, str] = {"weights": rf"\bweights{_OWN_SIZE}", "kv": _OWN.pattern}
_OWN_COUNTS: Mapping[str, str] = {
    "num_tokens": rf"{_OWN.pattern}[^=\n]{{0,100}}= [^=\n]{{1,60}} = (?P<count>\d[\d,]{{0,18}}) tokens",
    "concurrency": r"\bfits {1,20}(?P<count>\d[\d,]{0,18}(?:\.\d{1,9})?) requests of max_model_len",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a start.

    Attributes:
        state: whether it runs; ``unknown`` where nobody said.
        failure: why it failed; empty where it did not.
        is_of_memory: whether it failed because what was asked for does not fit, and not for another reason.
    """

    state: Literal["runs", "failed", "unknown"] = "unknown"
    failure: str = ""
    is_of_memory: bool = False


RUNS = Outcome("runs")


@dataclass(frozen=True, slots=True)
class StartLog:
    """What a start said.

    Attributes:
        engine: as ``--engine`` takes it.
        options: how it was started, by the names of flags, as far as it says.
        sizes: bytes by name: memory, weights, activations, outside, graphs, kv. Of several workers the most, of KV and
            of the device's memory the least.
        counts: tokens and blocks that KV has, and requests of the longest length at once.
        outcome: what came of it.
        name: where it was read, for errors.
    """

    engine: str
    options: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    outcome: Outcome = RUNS
    name: str = "the log"

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
        log = _of_vllm(text, name, found[1] or found[2])
    elif _OWN.search(text) is not None:
        log = _of_ours(text, name)
    else:
        message = f"{name} is no log of a start that is known here: neither vLLM's version nor our KV budget is in it."
        raise ConfigError(message, remedy="Give all that the server printed, from its start on.")
    if not log.sizes and log.outcome.state != "failed":
        message = f"{name} is a start's log, and says nothing of its memory."
        raise ConfigError(message, remedy="Wait until it is ready; VLLM_LOGGING_LEVEL=DEBUG has every part.")
    return log


def _of_vllm(text: str, name: str, version: str) -> StartLog:
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
    return StartLog(f"vllm=={version}", options, sizes, counts, _outcome(text, sizes.get("memory")), name)


def _outcome(text: str, memory: int | None) -> Outcome:
    """Return what came of a start of vLLM, on a device with so much memory as far as that is known."""
    ready = max(text.rfind(each) for each in _READY)
    since = text[ready:] if ready >= 0 else text
    free = _all(text, _FREE)
    is_shared = bool(free) and memory is not None and memory - min(free) * GIB > _OWN_CONTEXT_BYTES
    short = _NOT_ENOUGH_FREE.search(since)
    if short is not None:  # without what is free nobody knows who has the rest
        return Outcome("failed", short[0], is_of_memory=bool(free) and memory is not None and not is_shared)
    found = _OF_MEMORY.search(since)
    if found is not None:
        return Outcome("failed", found[0], is_of_memory=not is_shared)
    found = _OTHER.search(since)
    if found is not None:
        return Outcome("failed", found[0])
    return RUNS if any(each in text for each in _RAN) else Outcome()


def _of_ours(text: str, name: str) -> StartLog:
    sizes = {}
    for part, pattern in _OWN_SIZES.items():
        found = re.search(pattern, text)
        if found is not None:
            sizes[part] = round(float(found[1]) * _UNITS[found[2]])
    counts = {
        each: _number(found["count"])
        for each, pattern in _OWN_COUNTS.items()
        if (found := re.search(pattern, text)) is not None
    }
    options = {}
    length = re.search(r"max_model_len = (\d[\d,]{0,18})", text)
    if length is not None:
        options["max_model_len"] = length[1].replace(",", "")
    computes = re.search(r"\bcomputes {1,20}(\w{1,40})", text)
    if computes is not None:
        options["dtype"] = computes[1]
    card = re.search(r"\bcard {1,20}(\S.{0,200})", text)
    if card is not None:
        options["card"] = card[1].strip()
    failed = _OF_MEMORY.search(text)
    outcome = RUNS if failed is None else Outcome("failed", failed[0], is_of_memory=True)
    return StartLog("pagefold", options, sizes, counts, outcome, name)


def _first(text: str, patterns: tuple[str, ...]) -> str:
    return next((found[1] for pattern in patterns if (found := re.search(pattern, text)) is not None), "")


def _all(text: str, patterns: tuple[str, ...]) -> list[float]:
    """Return every number that the first pattern finds which finds any."""
    return next(
        (values for pattern in patterns if (values := [_number(each) for each in re.findall(pattern, text)])), []
    )


def _number(text: str) -> float:
    return float(text.replace(",", ""))
