"""EngineConfig: settings of the engine, frozen, each with what ``pagefold serve`` says of it.

Names and meaning of flags are vLLM's where vLLM has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal, TypeAlias, get_args

from pagefold.config.flag import Flag, bad_value, check_types, one_of
from pagefold.config.lora_module import LoRAModule, check_loras, lora_modules_of
from pagefold.config.tenant_quota import TenantQuota, check_quotas
from pagefold.errors import ConfigError, InvalidRequestError
from pagefold.kv import KV_CACHE_DTYPES
from pagefold.kv.writes import WRITE_POLICIES, WritePolicy
from pagefold.speculation.params import SpeculativeParams

__all__ = [
    "DROPPED_BITS",
    "AttentionBackend",
    "Device",
    "Dtype",
    "EngineConfig",
    "ModelImpl",
    "QuantizationName",
    "TransportCodec",
]

Dtype: TypeAlias = Literal["auto", "float32", "float64", "bfloat16", "float16"]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
AttentionBackend: TypeAlias = Literal["auto", "cpu", "cuda", "reference"]
ModelImpl: TypeAlias = Literal["auto", "pagefold", "transformers"]
QuantizationName: TypeAlias = Literal["none", "int4", "int8", "w8a8_int8"]
TransportCodec: TypeAlias = Literal["none", "lossless", "lossy7", "lossy6"]
SchedulingPolicyName: TypeAlias = Literal["fcfs", "priority", "lpm", "fair"]
Admission: TypeAlias = Literal["predicted", "prompt", "max_tokens"]

_MAX_BLOCK_SIZE = 256
_MOST_TARGET_MS = 24 * 60 * 60 * 1000
_NUM_SINKS = 4
"""As in StreamingLLM (Xiao et al., 2023, section 3.3): four are enough."""

DROPPED_BITS: Mapping[TransportCodec, int | None] = MappingProxyType(
    {"none": None, "lossless": 0, "lossy7": 1, "lossy6": 2}
)
"""How many of the lower bits of codes of 8 bit each rounds away; None packs nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is started with. What follows from it and from the model is a ``Capacity``.

    Attributes:
        model: a built-in name, a local folder, a GGUF file, or a hub id.
        device: ``cpu``, ``cuda`` (an NVIDIA card), or ``auto`` for a card where there is one that will do.
        dtype: of weights, activations and KV. ``auto`` on a CPU is bfloat16, whatever the checkpoint holds, where the
            fused decoder computes and the processor has an instruction for it, and else float32; on a card it is
            float16 for a checkpoint in that, and else bfloat16.
        block_size: tokens a block.
        kv_cache_dtype: how K and V are stored: ``auto`` for as they are computed, or a codec such as
            ``int8_per_token_head`` (see ``kv/codec.py``).
        kv_cache_dtype_skip_layers: layers that stay in 16 bit all the same, counted from 0. They make blocks larger;
            of a model with sliding windows those of all cache groups (see ``kv/geometry.py``).
        kv_quality_floor: the least share of positions at which the likeliest token must be that of ``auto``, as
            ``pagefold eval`` found it, 0 to 1. 0 asks for no verdict; None is 0.97 for 8 bit, 0.95 for less. It holds
            for codecs, and for ``w8a8_int8`` and ``int4``.
        force_kv_cache_dtype: start also with a codec under that floor.
        force_quantization: start also with a ``quantization`` under that floor.
        kv_cache_memory_bytes: the KV budget; None for a share of the memory that is free (see ``capacity.py``), or on
            a card for what ``gpu_memory_utilization`` leaves.
        gpu_memory_utilization: share of the whole card's memory for weights, activations and KV together, as in vLLM.
            What the first two take is measured, and KV gets the rest. A CPU has no use for it.
        kv_offloading_size: GiB of host memory for blocks that are evicted, beside the KV budget; 0 for none, or for a
            little where there are slower tiers, which go through it.
        allow_streaming: whether a request may be larger than the KV budget: what of it does not fit is read where it
            is, in the host's memory (see ``kv/streaming.py``). Of a model with sliding windows ``max_model_len`` ends
            at the window then, also where windows are computed without it.
        kv_disk_path: a folder of the server's own, where blocks are kept on a disk; None for none.
        kv_disk_size: GiB that it may take, everything counted.
        kv_remote_url: where a pool of blocks is that machines share: ``redis://host:port``, ``mooncake://host:port``;
            None for none. It may hold a password, and is never shown.
        kv_remote_required: whether a start fails when that does not answer, rather than going on without it.
        kv_transport_codec: how blocks are packed on their way to the pool: ``none``; ``lossless``; ``lossy7`` or
            ``lossy6``, which first round codes of 8 bit to so many bits.
        kv_write_policy: when blocks are written to disk and pool: ``write_back`` (when the host's memory is needed, and
            at the end), ``write_through`` (when their request has ended), ``write_through_selective`` (the same for
            what was found at least once).
        streaming_llm: how many of the last tokens are attended to, beside the first ones (StreamingLLM), in layers that
            attend to more otherwise. What lies between is given back: beyond both together outputs are not those of the
            model. ``max_model_len`` may be beyond what that was made for then, if it is a number. None for all.
        streaming_llm_sinks: how many of the first tokens stay beside them.
        kv_keep: shares of older tokens that requests may have kept, by layer and KV head (see ``masks/``), above 0; 1
            for all of them. The first is for requests that ask for none. Empty where all are kept.
            What is dropped is given back: outputs are not those of the model. None for all.
        max_model_len: longest prompt and output together, in tokens; None for what the model was made for, ``auto``
            for as much of that as the budget holds.
        max_num_seqs: sequences running at once.
        max_num_batched_tokens: tokens computed in one step; prompts longer than that are computed in chunks.
        enable_prefix_caching: whether blocks are shared between requests that begin alike.
        eviction_policy: which cached blocks go first: a name of ``kv/policies``, such as ``lru``, or ``default``.
        attention_backend: ``cpu`` (Numba), ``cuda`` (Triton), ``reference`` (plain torch, slow, any dtype, any device),
            or ``auto``.
        model_impl: who computes the layers: ``pagefold`` (the fused decoder), ``transformers`` (any family), or
            ``auto`` for the fused decoder where it can.
        quantization: in which form the fused decoder has its matrices: ``int4``, with a scale and a minimum for each 32
            numbers; ``int8``, a scale an output channel; ``w8a8_int8``, where what is multiplied with them is int8 too,
            with a scale for each 64 numbers; ``none``, as numbers of ``dtype``, whatever the checkpoint has; None as
            the checkpoint has them.
        enable_lora: whether requests may name LoRA adapters; on CPUs.
        lora_modules: those that are there from the start, each as ``name=folder``, or as a JSON object with ``name``
            and ``path``.
        max_loras: adapters that may be loaded at once; all of them may be in one batch.
        max_lora_rank: the largest rank that one may have.
        enforce_eager: whether a card gets each kernel from the host, rather than decoding steps as CUDA graphs.
        threads: how many compute together; None for all cores that this process may use.
        batch_invariant: refuse whatever would let a request's tokens depend on its batch. The fused decoder never does.
        speculative_config: who drafts what requests will sample, so that a step finds several of their tokens; None for
            nobody. It changes no output. A mapping with the fields of ``SpeculativeParams`` will do.
        seed: of the draws of requests that bring no seed.
        scheduling_policy: who goes first: ``fcfs``; ``priority`` (the smallest ``priority`` of a request); ``lpm`` (the
            longest prefix in the cache); or ``fair`` (tenants by their weights).
        priority_aging_s: with ``priority``, seconds of waiting that are worth one level; with ``lpm``, after so many
            nobody overtakes.
        admission: when a request that waits is let in: when its prompt and ``predicted`` output fit beside the
            predicted growth of those that run; when its ``prompt`` does beside what runs; when all its ``max_tokens``
            do beside all of theirs.
        max_num_partial_prefills: prompts that may be partly computed at once; None for any number. (vLLM has 1.)
        max_long_partial_prefills: long ones among them; None for any number. Short prompts overtake a long one that
            waits for a place, 32 at most.
        long_prefill_token_threshold: tokens beyond which a prompt is long, and the most that a step computes of any; 0
            for no prompt is long.
        request_timeout_s: seconds after which a request that has not finished is ended; None for never.
        target_ttft_ms: milliseconds to the first token that a server keeps: it refuses requests which would wait longer
            (see ``scheduler/guardrails``). None for no target.
        target_itl_ms: milliseconds between two tokens of a request, the 95th percentile, that the engine keeps: it goes
            without drafts then, and computes prompts in smaller pieces. None for no target.
        max_pinned_share: of all blocks, how many pins may keep together, 0 to 1.
        pin_half_life_s: seconds in which a pin's priority halves.
        kv_quotas: of tenants: shares of the device's blocks. ``pagefold serve`` has them from the key file.

    Raises:
        ConfigError: a value is out of range, or two do not go together.
    """

    model: str
    device: Annotated[Device, Flag("auto (a card where there is one), cpu or cuda.")] = "auto"
    dtype: Annotated[Dtype, Flag("auto, float32, float64, bfloat16 or float16.")] = "auto"
    block_size: Annotated[int, Flag("Tokens a KV block.")] = 16
    kv_cache_dtype: Annotated[
        str,
        Flag(
            "How K and V are stored: auto (as computed), float16, bfloat16, fp8, fp8_e5m2, "
            "int8_per_token_head, k8v4, int4_per_token_head, kivi2, ..."
        ),
    ] = "auto"
    kv_cache_dtype_skip_layers: Annotated[
        tuple[int, ...], Flag("Layers that stay in 16 bit all the same, such as 0,29.", metavar="LAYERS")
    ] = ()
    kv_quality_floor: Annotated[
        float | None,
        Flag(
            "Refuse a codec, w8a8_int8 or int4 under it: how often, as pagefold eval found, the likeliest token is "
            "that of auto. 0.97 for 8 bit and 0.95 for less if not given.",
            metavar="SHARE",
        ),
    ] = None
    force_kv_cache_dtype: Annotated[bool, Flag("Start with a codec under that floor.")] = False
    force_quantization: Annotated[bool, Flag("Start with a quantization under that floor.")] = False
    kv_cache_memory_bytes: Annotated[
        int | None,
        Flag("KV budget: bytes, or 512M, 2G, 2GiB; a share of the free memory if not given.", metavar="SIZE"),
    ] = None
    gpu_memory_utilization: Annotated[
        float, Flag("Of a card's whole memory, how much is for weights, activations and KV.", metavar="SHARE")
    ] = 0.9
    kv_offloading_size: Annotated[
        float, Flag("Host memory for evicted blocks, beside the KV budget.", metavar="GIB")
    ] = 0.0
    allow_streaming: Annotated[
        bool,
        Flag(
            "Serve requests larger than the KV budget: what does not fit is read from the host's memory. "
            "Of models with sliding windows no request is longer than a window then."
        ),
    ] = False
    kv_disk_path: Annotated[str | None, Flag("Keep blocks on a disk too, in this folder.", metavar="FOLDER")] = None
    kv_disk_size: Annotated[float, Flag("What that folder may take at most.", metavar="GIB")] = 10.0
    kv_remote_url: Annotated[
        str | None,
        Flag(
            "Share blocks with other machines: redis://HOST:PORT or mooncake://HOST:PORT. Or $PAGEFOLD_KV_REMOTE_URL.",
            metavar="URL",
        ),
    ] = field(default=None, repr=False)
    kv_remote_required: Annotated[bool, Flag("Do not start without that pool.")] = False
    kv_transport_codec: Annotated[
        TransportCodec, Flag("How blocks are packed on their way to that pool: none, lossless, lossy7 or lossy6.")
    ] = "none"
    kv_write_policy: Annotated[
        WritePolicy,
        Flag("When blocks are written to disk and pool: write_back, write_through or write_through_selective."),
    ] = "write_back"
    streaming_llm: Annotated[
        int | None,
        Flag(
            "Attend to so many of the last tokens and to the first ones, and give back the rest (StreamingLLM). "
            "Beyond both together outputs are not the model's.",
            metavar="TOKENS",
        ),
    ] = None
    streaming_llm_sinks: Annotated[
        int, Flag("How many of the first tokens stay in sight with --streaming-llm.", metavar="TOKENS")
    ] = _NUM_SINKS
    kv_keep: Annotated[
        tuple[float, ...],
        Flag(
            "Keep so large a share of the tokens before the last ones, by layer and KV head, and give back the rest. "
            "Outputs are not the model's. Several with commas, 1 for all: requests may ask for each.",
            metavar="SHARES",
        ),
    ] = ()
    max_model_len: Annotated[
        int | Literal["auto"] | None,
        Flag("Longest prompt and output together; auto for as much as the budget holds.", metavar="TOKENS|auto"),
    ] = None
    max_num_seqs: Annotated[int, Flag("Sequences running at once.")] = 128
    max_num_batched_tokens: Annotated[int, Flag("Tokens computed in one step.")] = 512
    enable_prefix_caching: Annotated[bool, Flag("Share blocks between requests that begin alike.")] = True
    eviction_policy: Annotated[
        str,
        Flag(
            "Which cached blocks go first: default (learned), lru, lfu, fifo, slru, 2q, s3-fifo, "
            "weighted, cost-aware, learned or auto."
        ),
    ] = "default"
    attention_backend: Annotated[AttentionBackend, Flag("auto, cpu, cuda or reference.")] = "auto"
    model_impl: Annotated[ModelImpl, Flag("Who computes the layers: auto, pagefold or transformers.")] = "auto"
    quantization: Annotated[
        QuantizationName | None,
        Flag(
            "int4 or int8: weights of that many bits; w8a8_int8: products in int8 too; none: numbers of dtype, also of "
            "a quantized checkpoint, which is computed with as it is otherwise."
        ),
    ] = None
    enable_lora: Annotated[bool, Flag("Let requests name LoRA adapters as their model.")] = False
    lora_modules: Annotated[
        tuple[str, ...],
        Flag(
            'Adapters from the start: NAME=FOLDER, several times, or \'{"name": "NAME", "path": "FOLDER"}\'.',
            metavar="NAME=FOLDER",
        ),
    ] = ()
    max_loras: Annotated[int, Flag("LoRA adapters that may be loaded at once.")] = 8
    max_lora_rank: Annotated[int, Flag("The largest rank that a LoRA adapter may have.")] = 16
    enforce_eager: Annotated[bool, Flag("On a card, no CUDA graphs.")] = False
    threads: Annotated[int | None, Flag("Threads that compute; all cores if not given.")] = None
    batch_invariant: Annotated[bool, Flag("Refuse what would let a request's tokens depend on its batch.")] = False
    speculative_config: Annotated[
        SpeculativeParams | None,
        Flag(
            'Draft what requests will sample, as {"method": "tree"} (what followed before, in the tenant\'s cache), '
            '{"method": "ngram"} (in the request\'s text) or {"model": "MODEL"} (a smaller model). '
            "It changes no output.",
            metavar="JSON",
        ),
    ] = None
    seed: Annotated[int, Flag("Of requests that bring none.")] = 0
    scheduling_policy: Annotated[
        SchedulingPolicyName,
        Flag(
            "Who goes first: fcfs, priority (the smallest), lpm (the longest prefix in the cache), or fair (tenants by "
            "their weights)."
        ),
    ] = "fcfs"
    priority_aging_s: Annotated[
        float, Flag("Seconds of waiting that are worth one level of priority; after which nobody overtakes with lpm.")
    ] = 60.0
    admission: Annotated[
        Admission,
        Flag(
            "Let a request in when its predicted output, its prompt alone, or all its max_tokens fit beside the same "
            "of those that run: predicted, prompt or max_tokens."
        ),
    ] = "predicted"
    max_num_partial_prefills: Annotated[
        int | None, Flag("Prompts that may be partly computed at once; any number if not given.", metavar="NUM")
    ] = None
    max_long_partial_prefills: Annotated[
        int | None,
        Flag("Long ones among them; short prompts overtake those that wait. Any number if not given.", metavar="NUM"),
    ] = None
    long_prefill_token_threshold: Annotated[
        int,
        Flag(
            "Prompts beyond it are long, and no step computes more of any; 0 for no prompt is long.", metavar="TOKENS"
        ),
    ] = 0
    request_timeout_s: Annotated[
        float | None, Flag("Seconds after which an unfinished request is ended; never if not given.")
    ] = None
    target_ttft_ms: Annotated[
        float | None,
        Flag(
            "Refuse requests, with 429, that would wait longer than so many milliseconds for their first token.",
            metavar="MS",
        ),
    ] = None
    target_itl_ms: Annotated[
        float | None,
        Flag(
            "Keep the 95th percentile of the time between two tokens under so many milliseconds: without drafts, and "
            "with smaller prefills.",
            metavar="MS",
        ),
    ] = None
    max_pinned_share: Annotated[float, Flag("Of all KV blocks, how many pins may keep together.")] = 0.5
    pin_half_life_s: Annotated[float, Flag("Seconds in which a pin's priority halves.")] = 3600.0
    kv_quotas: tuple[TenantQuota, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        from pagefold.kv.policies import POLICIES  # noqa: PLC0415 - kv stands on nothing here; keeps imports one-way

        if isinstance(self.speculative_config, Mapping):
            try:
                object.__setattr__(self, "speculative_config", SpeculativeParams.of(self.speculative_config).over(None))
            except InvalidRequestError as error:
                raise ConfigError(error.message, remedy=error.remedy) from None
        check_types(self)
        if self.speculative_config is not None:
            self.speculative_config.check_start()
        one_of("device", self.device, get_args(Device))
        one_of("dtype", self.dtype, get_args(Dtype))
        one_of("attention_backend", self.attention_backend, get_args(AttentionBackend))
        one_of("model_impl", self.model_impl, get_args(ModelImpl))
        one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", *KV_CACHE_DTYPES))
        if self.kv_cache_dtype_skip_layers and self.kv_cache_dtype == "auto":
            msg = "kv_cache_dtype_skip_layers is set, but no layer's KV is encoded."
            raise ConfigError(msg, remedy="Leave it out, or give a kv_cache_dtype such as int8_per_token_head.")
        one_of("quantization", self.quantization, (None, *get_args(QuantizationName)))
        one_of("eviction_policy", self.eviction_policy, ("default", *POLICIES))
        one_of("scheduling_policy", self.scheduling_policy, get_args(SchedulingPolicyName))
        one_of("admission", self.admission, get_args(Admission))
        check_quotas(self.kv_quotas)
        floored = next((one for one in self.kv_quotas if one.kv_floor), None)
        if floored is not None and not self.enable_prefix_caching:
            what = f"Tenant {floored.tenant} has kv_floor {floored.kv_floor:g}"
            msg = f"{what}, but without prefix caching nothing is kept."
            raise ConfigError(msg, remedy="Leave it out, or set enable_prefix_caching.")
        if not 0 < self.priority_aging_s < float("inf"):  # without end, priority 0 would have no order
            raise bad_value("priority_aging_s", self.priority_aging_s, "a positive number of seconds")
        if self.request_timeout_s is not None and not self.request_timeout_s > 0:
            raise bad_value("request_timeout_s", self.request_timeout_s, "a positive number of seconds, or none at all")
        if not self.model:
            msg = "No model is named."
            raise ConfigError(
                msg, remedy="Give a built-in name such as smollm2-135m, a local folder, a GGUF file, or a hub id."
            )
        if not 1 <= self.block_size <= _MAX_BLOCK_SIZE or self.block_size & (self.block_size - 1):
            raise bad_value("block_size", self.block_size, f"a power of two up to {_MAX_BLOCK_SIZE}")
        self._check_sizes()
        self._check_targets()

    def _check_sizes(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise bad_value("threads", self.threads, "at least 1")
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes <= 0:
            raise bad_value("kv_cache_memory_bytes", self.kv_cache_memory_bytes, "a positive number of bytes")
        if self.kv_quality_floor is not None and not 0 <= self.kv_quality_floor <= 1:
            raise bad_value("kv_quality_floor", self.kv_quality_floor, "a share between 0 and 1, such as 0.97")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise bad_value(
                "gpu_memory_utilization", self.gpu_memory_utilization, "above 0 and at most 1 (all of the card)"
            )
        self._check_tiers()
        if isinstance(self.max_model_len, str):
            one_of("max_model_len", self.max_model_len, ("auto",))
        elif self.max_model_len is not None and self.max_model_len < 2:  # noqa: PLR2004 - a prompt and an output token
            raise bad_value("max_model_len", self.max_model_len, "at least 2 tokens, or auto")
        if self.max_num_seqs < 1:
            raise bad_value("max_num_seqs", self.max_num_seqs, "at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise bad_value(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs ({self.max_num_seqs}), so that every running request gets a token in each step",
            )
        self._check_prefills()
        self._check_pins()
        self._check_sinks()
        self._check_keep()
        check_loras(self.lora_modules, self.max_loras, self.max_lora_rank, is_on=self.enable_lora)

    @property
    def max_draft_tokens(self) -> int:
        """How many drafts one step may have, for all requests together. 0 for no drafts."""
        asked = self.speculative_config
        return 0 if asked is None else asked.most_in_a_step(self.max_num_batched_tokens)

    @property
    def has_slow_tiers(self) -> bool:
        """Whether blocks are kept on a disk or in a remote pool."""
        return self.kv_disk_path is not None or self.kv_remote_url is not None

    def _check_prefills(self) -> None:
        num_partial, num_long = self.max_num_partial_prefills, self.max_long_partial_prefills
        threshold = self.long_prefill_token_threshold
        if num_partial is not None and num_partial < 1:
            raise bad_value("max_num_partial_prefills", num_partial, "at least 1, or left out for any number")
        if threshold < 0:
            raise bad_value("long_prefill_token_threshold", threshold, "at least 1, or 0 for no prompt is long")
        if isinstance(self.max_model_len, int) and threshold > self.max_model_len:
            raise bad_value(
                "long_prefill_token_threshold", threshold, f"at most max_model_len ({self.max_model_len}), or 0"
            )
        if num_long is None:
            return
        if num_long < 1 or (num_partial is not None and num_long > num_partial):
            most = "" if num_partial is None else f" and at most max_num_partial_prefills ({num_partial})"
            raise bad_value("max_long_partial_prefills", num_long, f"at least 1{most}, or left out for any number")
        if not threshold:
            msg = f"max_long_partial_prefills is {num_long}, but no prompt is long: long_prefill_token_threshold is 0."
            raise ConfigError(msg, remedy="Give long_prefill_token_threshold, in tokens, or leave it out.")

    def _check_tiers(self) -> None:
        if not 0 <= self.kv_offloading_size < float("inf"):
            raise bad_value("kv_offloading_size", self.kv_offloading_size, "a number of GiB, 0 for none")
        if self.allow_streaming and not self.kv_offloading_size:
            msg = "allow_streaming is set, but kv_offloading_size is 0: what of a request does not fit has no place."
            raise ConfigError(msg, remedy="Give kv_offloading_size, in GiB.")
        one_of("kv_write_policy", self.kv_write_policy, WRITE_POLICIES)
        one_of("kv_transport_codec", self.kv_transport_codec, tuple(DROPPED_BITS))
        if self.kv_transport_codec != "none" and self.kv_remote_url is None:
            msg = f"kv_transport_codec is {self.kv_transport_codec}, but no block goes over a network."
            raise ConfigError(msg, remedy="Leave it out, or give a kv_remote_url. Blocks on a disk are not packed.")
        if not 0 < self.kv_disk_size < float("inf"):
            raise bad_value("kv_disk_size", self.kv_disk_size, "a positive number of GiB")
        for name in ("kv_disk_path", "kv_remote_url"):
            if getattr(self, name) == "":
                raise bad_value(name, "empty", "left out where there is none")
        if self.kv_remote_required and self.kv_remote_url is None:
            msg = "kv_remote_required is set, but there is no kv_remote_url."
            raise ConfigError(msg, remedy="Give one, or leave it out.")
        for name in ("kv_offloading_size", "kv_disk_path", "kv_remote_url"):
            if getattr(self, name) and not self.enable_prefix_caching:
                msg = f"{name} is set, but without prefix caching nothing is ever kept."
                raise ConfigError(msg, remedy="Leave it out, or set enable_prefix_caching.")

    def _check_sinks(self) -> None:
        if self.streaming_llm_sinks < 1:
            raise bad_value("streaming_llm_sinks", self.streaming_llm_sinks, "at least 1: without any, models fail")
        if self.streaming_llm is None:
            if self.streaming_llm_sinks != _NUM_SINKS:
                msg = f"streaming_llm_sinks is {self.streaming_llm_sinks}, and streaming_llm is not set."
                raise ConfigError(msg, remedy="Give streaming_llm too, or leave it out.")
            return
        if self.streaming_llm < self.block_size:
            raise bad_value("streaming_llm", self.streaming_llm, f"at least a block of {self.block_size} tokens")
        if self.allow_streaming:
            msg = "streaming_llm and allow_streaming are set: what one gives back the other would read where it lies."
            raise ConfigError(msg, remedy="Leave one of them out.")

    @property
    def masks(self) -> tuple[float, ...]:
        """The shares of older tokens that are kept by a mask: all of ``kv_keep`` but 1."""
        return tuple(share for share in self.kv_keep if share < 1)

    def _check_keep(self) -> None:
        if not self.kv_keep:
            return
        for share in self.kv_keep:
            if not 0 < share <= 1:
                raise bad_value("kv_keep", share, "above 0, and 1 for all at most")
        if not self.masks or len(set(self.kv_keep)) < len(self.kv_keep):
            what = "names a share twice" if self.masks else "keeps all, as without it"
            msg = f"kv_keep is {','.join(map(str, self.kv_keep))}, which {what}."
            raise ConfigError(msg, remedy="Name each share once, and one below 1; or leave it out.")
        others = {
            "streaming_llm": self.streaming_llm is not None,
            "allow_streaming": self.allow_streaming,
            f"kv_transport_codec={self.kv_transport_codec}": bool(DROPPED_BITS[self.kv_transport_codec]),
            "kv_cache_dtype=kivi2": self.kv_cache_dtype == "kivi2",
            "kv_cache_dtype_skip_layers": bool(self.kv_cache_dtype_skip_layers),
            "quantization": self.quantization not in {None, "none"},
            "speculative_config": self.speculative_config is not None,
            "enable_lora": self.enable_lora,
        }
        beside = next((name for name, is_set in others.items() if is_set), None)
        if beside is not None:
            msg = f"kv_keep and {beside} are set, which do not go together yet."
            raise ConfigError(msg, remedy="Leave one of them out.")

    @property
    def adapters(self) -> tuple[LoRAModule, ...]:
        """The adapters that are there from the start."""
        return lora_modules_of(self.lora_modules)

    def _check_targets(self) -> None:
        for name in ("target_ttft_ms", "target_itl_ms"):
            target_ms = getattr(self, name)
            if target_ms is not None and not 0 < target_ms <= _MOST_TARGET_MS:
                raise bad_value(name, target_ms, "a positive number of milliseconds, a day's at most, or none at all")

    def _check_pins(self) -> None:
        if not 0 <= self.max_pinned_share <= 1:
            raise bad_value("max_pinned_share", self.max_pinned_share, "between 0 (nothing is pinned) and 1")
        if not 0 < self.pin_half_life_s < float("inf"):
            raise bad_value("pin_half_life_s", self.pin_half_life_s, "a positive number of seconds")
