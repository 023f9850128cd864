"""PlanSettings: what a plan is asked for. Flags that vLLM has keep its spelling and meaning."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from pagefold.errors import ConfigError
from pagefold.kv import CODECS
from pagefold.plan.engine import OWN, Engine, find_engine
from pagefold.plan.nearest import nearest_names
from pagefold.plan.weights import find_weight_dtype
from pagefold.speculation.params import SpeculativeParams  # noqa: TC001 - types are checked by it
from pagefold.typecheck import wrong_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagefold.kv import Codec
    from pagefold.plan.tables import Device

__all__ = ["CACHE_DTYPES", "DTYPES", "PlanSettings"]

DTYPES: Mapping[str, str] = MappingProxyType(
    {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "half": "fp16"}
)
"""Dtypes of what is computed, and the weight dtype that each is."""

CACHE_DTYPES: Mapping[str, str] = MappingProxyType(
    {name: name for name in CODECS}
    | {"int8": "int8_per_token_head", "int4": "int4_per_token_head", "fp16": "float16", "bf16": "bfloat16"}
)
"""Names that ``--kv-cache-dtype`` takes, and the codec that each is."""

_MAX_PARALLEL = 4096
_MAX_BLOCK_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """How the model is to be served.

    Attributes:
        dtype: of what is computed; ``auto`` for the checkpoint's, on a CPU what the server takes.
        weight_dtype: how the weights are stored; ``auto`` for as the checkpoint says, on a CPU ``dtype``.
        kv_cache_dtype: how K and V are stored; ``auto`` for ``dtype``.
        kv_cache_dtype_skip_layers: layers that stay in 16 bit all the same, counted from 0.
        streaming_llm: how many of the last tokens layers keep, beside the first ones; None for what the model has.
        streaming_llm_sinks: how many of the first tokens.
        block_size: tokens a block.
        engine: whose memory is planned: ``vllm==0.19``, ``pagefold``, or ``auto``: the newest vLLM that is known on a
            GPU, and our own server on a CPU.
        enforce_eager: whether the engine does without CUDA graphs.
        gpu_memory_utilization: share of a GPU's memory for weights, activations and KV together; None for what the
            engine takes by itself.
        kv_cache_memory_bytes: the KV budget of a device; None for what is left.
        max_model_len: longest prompt and output together; None for all that the model was made for, ``auto`` for as
            much of that as fits.
        max_num_seqs: sequences running at once; None for what the engine takes by itself.
        max_num_batched_tokens: tokens computed in one step; None for what the engine takes by itself.
        tensor_parallel_size: devices that share each layer.
        pipeline_parallel_size: stages that share the layers between them.
        speculative_config: who drafts, as the server takes it: a draft model has weights and KV of its own.

    Raises:
        ConfigError: a value is out of range, or unknown.
    """

    dtype: str = "auto"
    weight_dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[int, ...] = ()
    streaming_llm: int | None = None
    streaming_llm_sinks: int = 4
    block_size: int = 16
    engine: str = "auto"
    enforce_eager: bool = False
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | Literal["auto"] | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    speculative_config: SpeculativeParams | None = None

    def __post_init__(self) -> None:
        if isinstance(self.max_model_len, str) and self.max_model_len != "auto":
            raise _bad("max_model_len", repr(self.max_model_len), "a number of tokens, or auto")
        self._check()
        self._check_sinks()
        if self.speculative_config is not None:
            self.speculative_config.check_start()
        if self.engine != "auto":
            find_engine(self.engine)

    def _check(self) -> None:
        wrong = wrong_type(self)
        if wrong is not None:
            raise _bad(wrong.field, repr(wrong.value), wrong.allowed)
        _known("dtype", self.dtype, DTYPES)
        _known("kv_cache_dtype", self.kv_cache_dtype, CACHE_DTYPES)
        self._check_skipped()
        if self.weight_dtype != "auto":
            find_weight_dtype(self.weight_dtype)
        if not 1 <= self.block_size <= _MAX_BLOCK_SIZE or self.block_size & (self.block_size - 1):
            raise _bad("block_size", self.block_size, f"a power of two up to {_MAX_BLOCK_SIZE}")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise _bad("gpu_memory_utilization", self.gpu_memory_utilization, "above 0 and at most 1")
        for name in ("kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _bad(name, value, "at least 1")
        if isinstance(self.max_model_len, int) and self.max_model_len < 2:  # noqa: PLR2004 - a prompt and an output
            raise _bad("max_model_len", self.max_model_len, "at least 2 tokens, or auto")
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if not 1 <= getattr(self, name) <= _MAX_PARALLEL:
                raise _bad(name, getattr(self, name), f"between 1 and {_MAX_PARALLEL}")

    def _check_sinks(self) -> None:
        """Refuse windows and sinks that the server refuses."""
        if self.streaming_llm is not None and self.streaming_llm < self.block_size:
            raise _bad("streaming_llm", self.streaming_llm, f"at least a block of {self.block_size} tokens")
        if self.streaming_llm_sinks < 1:
            raise _bad("streaming_llm_sinks", self.streaming_llm_sinks, "at least 1")

    def _check_skipped(self) -> None:
        """Refuse layers that are to stay in 16 bit where all do, or none can."""
        if not self.kv_cache_dtype_skip_layers:
            return
        if self.kv_cache_dtype == "auto":
            msg = "kv_cache_dtype_skip_layers is set, but no layer's KV is encoded."
            raise ConfigError(msg, remedy="Choose a kv_cache_dtype, or leave it out.")
        if CODECS[CACHE_DTYPES[self.kv_cache_dtype]].channel_tokens:
            msg = f"kv_cache_dtype_skip_layers is set, and {self.kv_cache_dtype} seals blocks in all layers at once."
            raise ConfigError(msg, remedy="Leave it out, or use another kv_cache_dtype.")

    @property
    def num_devices(self) -> int:
        """Devices of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def engine_on(self, device: Device) -> Engine:
        """Return whose memory is planned on a device.

        Raises:
            ConfigError: what it takes of a CPU is not known.
        """
        if self.engine == "auto":
            return OWN if device.is_cpu else find_engine("vllm")
        engine = find_engine(self.engine)
        if device.is_cpu and not engine.is_ours:
            message = f"engine is {self.engine!r}, and what it takes of a CPU is not known."
            raise ConfigError(message, remedy="Leave it out, or plan for a GPU.")
        return engine

    def utilization_on(self, device: Device) -> float:
        """Return the share of a device's memory that the engine takes."""
        asked = self.gpu_memory_utilization
        return self.engine_on(device).utilization if asked is None else asked

    def codec(self, dtype: str) -> Codec:
        """Return how K and V are stored when ``dtype`` is computed."""
        name = dtype if self.kv_cache_dtype == "auto" else CACHE_DTYPES[self.kv_cache_dtype]
        return CODECS[name].in_blocks(self.block_size)

    def skip_codec(self, dtype: str) -> Codec:
        """Return how K and V of the layers are stored that stay in 16 bit when ``dtype`` is computed."""
        return CODECS["bfloat16" if dtype == "bfloat16" else "float16"]


def _known(name: str, value: str, known: Mapping[str, str]) -> None:
    if value != "auto" and value not in known:
        nearest = nearest_names(value, known)
        hint = f" (nearest: {', '.join(nearest)})" if nearest else ""
        raise _bad(name, repr(value), f"auto or one of {', '.join(known)}{hint}")


def _bad(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name} is {value}.", remedy=f"It must be {allowed}.")
