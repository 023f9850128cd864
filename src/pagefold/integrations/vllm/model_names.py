"""What K and V of a model follow from beside tokens: the bytes of its files, its config, and how vLLM takes them.

Blocks outlive the process that computed them, on disks and in pools. A name that left any of this out would hand
another model's KV to a request, and nobody would notice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagefold.config import cache_dir
from pagefold.errors import ConfigError
from pagefold.files.file_digest import digest_of_file

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["check_names", "digest_of_folder", "name_of_model", "weights_of"]

_log = logging.getLogger("vllm.pagefold")

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
"""Endings of files that some loader of vLLM's takes weights from."""

_FROM_FOLDERS = {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral", "gguf"}
_FROM_FOLDERS |= {"bitsandbytes", "sharded_state"}
"""vLLM's loaders that take all weights from files of the model's folder."""

_SEEDLESS = {"sha256", "sha256_cbor"}
"""vLLM's hashes whose chains begin alike in every process, in versions that have a fixed seed."""

_OF_THE_MACHINE = {"_name_or_path", "_commit_hash"}
"""What of a config says where it came from, not what it is."""

_DRAFTERS_WITHOUT_KV = {"ngram", "ngram_gpu", "suffix"}

_LEAVE_OUT = "or leave disk_path and remote_url out"


def check_names(vllm_config: VllmConfig, *, has_fixed_seed: bool) -> None:
    """See that blocks that leave this process can be named by all that they follow from.

    Args:
        vllm_config: vLLM's settings.
        has_fixed_seed: whether this vLLM begins its chains of SHA-256 alike in every process.

    Raises:
        ConfigError: they cannot; says why, and what to do.
    """
    load_format = str(vllm_config.load_config.load_format)
    if load_format not in _FROM_FOLDERS:
        msg = f"load_format is {load_format!r}: blocks that leave vLLM are named by the bytes of weights in files."
        raise ConfigError(msg, remedy=f"Load the weights from the model's folder, {_LEAVE_OUT}.")
    if getattr(vllm_config, "lora_config", None) is not None:
        msg = "Adapters are on, and vLLM names them by what they are called, not by their weights."
        raise ConfigError(msg, remedy=f"Start vLLM without --enable-lora, {_LEAVE_OUT}.")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        msg = "calculate_kv_scales is on: the scales of K and V follow from the first request, and differ by start."
        raise ConfigError(msg, remedy=f"Use scales from the checkpoint, {_LEAVE_OUT}.")
    drafts = getattr(vllm_config, "speculative_config", None)
    drafter = getattr(drafts, "draft_model_config", None)
    is_named = drafter is None or drafter.model == vllm_config.model_config.model
    if drafter is not None and drafts is not None and drafts.method not in _DRAFTERS_WITHOUT_KV and not is_named:
        msg = f"Drafts come from {drafter.model}, whose KV lies in the same blocks and has no name."
        raise ConfigError(msg, remedy=f"Draft by ngram or by the model's own layers, {_LEAVE_OUT}.")
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if "PYTHONHASHSEED" not in os.environ and not (has_fixed_seed and algorithm in _SEEDLESS):
        msg = f"This vLLM hashes with {algorithm} from a seed that is new at every start: no other start finds a block."
        raise ConfigError(
            msg, remedy="Set PYTHONHASHSEED to the same number everywhere, or use --prefix-caching-hash-algo sha256."
        )


def name_of_model(vllm_config: VllmConfig) -> str:
    """Return what names the model whose blocks leave this process.

    Raises:
        ConfigError: its files are not known.
    """
    model = vllm_config.model_config
    multimodal = getattr(model, "multimodal_config", None)
    drafts = getattr(vllm_config, "speculative_config", None)
    facts = {
        "files": _files_of(vllm_config),
        "config": _plain(model.hf_config.to_dict()),
        "quantization": [_plain(model.quantization), _plain(getattr(model, "quantization_config", None))],
        "max_model_len": model.max_model_len,  # some models encode positions by it
        "code": [str(getattr(model, name, None)) for name in ("model_impl", "code_revision", "disable_sliding_window")],
        "pictures": _plain(getattr(multimodal, "mm_processor_kwargs", None)),
        "drafts": str(getattr(drafts, "method", None)),
        "platform": _plain(getattr(vllm_config, "additional_config", None)),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def digest_of_folder(model: Path) -> str:
    """Return a digest of all bytes that a model is loaded from: weights, configs and code, or one file of weights.

    Args:
        model: its folder, or the file. Digests of files are kept in Pagefold's cache folder.
    """
    files = [model] if model.is_file() else [file for file in sorted(model.iterdir()) if _counts(file)]
    digest = hashlib.sha256()
    for file in files:
        name = "" if file == model else file.name
        digest.update(f"{name}\0{digest_of_file(file, cache_dir() / 'digests')}\0".encode())
    return digest.hexdigest()


def weights_of(model: str, said: str) -> str:
    """Return what the weights are beside a model's name, where vLLM tells the name alone: the bytes of a local folder.

    Args:
        model: the name, or the folder.
        said: what the user says of them.
    """
    found = Path(model)
    files = digest_of_folder(found) if found.exists() else ""
    if not said:
        (_log.info if files else _log.warning)(
            "vLLM tells PagefoldTier the model's name, %s, and neither %s--quantization, --hf-overrides nor "
            "--max-model-len: say in its option weights which they are, or chunks of others are taken for these",
            model,
            "" if files else "its revision, ",
        )
    return f"{said}/{files}" if files else said


def _counts(file: Path) -> bool:
    """Whether K and V may follow from a file. One that was not needed costs a miss; one left out, a wrong answer."""
    if not file.is_file():
        return False
    is_config = file.suffix == ".json" and ("config" in file.name or "quant" in file.name)
    return file.suffix in _WEIGHTS or file.suffix == ".py" or (is_config and file.name not in _OF_TEXT)


_OF_TEXT = {"tokenizer_config.json", "generation_config.json"}
"""Configs of what comes before tokens and behind logits."""


def _files_of(vllm_config: VllmConfig) -> str:
    model = vllm_config.model_config
    found = Path(model.model)
    if not found.exists():
        found = _snapshot(str(model.model), model.revision, vllm_config.load_config.download_dir)
    if found.is_dir() and not any(file.suffix in _WEIGHTS and file.is_file() for file in found.iterdir()):
        msg = f"{found} has no weights: blocks on a disk or in a pool are named by their bytes."
        raise ConfigError(msg, remedy=f"Give --model the folder that holds them, {_LEAVE_OUT}.")
    return digest_of_folder(found)


def _snapshot(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Return the folder that the hub's client has of a model.

    Raises:
        ConfigError: there is none.
    """
    try:
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - vLLM brings it

        config = try_to_load_from_cache(model, "config.json", cache_dir=download_dir, revision=revision)
    except (ImportError, ValueError):  # its error for names that are none is a ValueError
        config = None
    if not isinstance(config, str):
        msg = f"{model} is a name, and its files are not in the hub's cache: blocks cannot be named by their bytes."
        raise ConfigError(msg, remedy=f"Download it, and give --model the folder, {_LEAVE_OUT}.")
    return Path(config).parent


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a config holds
    """Return a value as JSON has it, the same in every process."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items() if name not in _OF_THE_MACHINE}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(one) for one in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
