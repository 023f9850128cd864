"""Adapters as ``peft`` writes them, with random weights; and the model that each comes to when it is merged."""

from __future__ import annotations

import json
import math

import torch
from safetensors.torch import load_file, save_file

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_CONFIG = {
    "alpha_pattern": {},
    "base_model_name_or_path": None,
    "bias": "none",
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_to_transform": None,
    "lora_bias": False,
    "loftq_config": {},
    "modules_to_save": None,
    "peft_type": "LORA",
    "rank_pattern": {},
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_rslora": False,
}


def modules_of(base):
    """Name and shape ``(N, K)`` of the modules in a model's folder that adapters may go to."""
    weights = load_file(base / "model.safetensors")
    found = {}
    for name, tensor in weights.items():
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] in MODULES and tensor.dim() == 2:
            found[path] = tuple(tensor.shape)
    return found


def write_adapter(folder, base, *, seed=0, rank=4, alpha=8, modules=MODULES, dtype="F32", ranks=None, **config):
    """Write an adapter of a model into a folder; return the folder.

    ``ranks`` are those of single modules, by their names' ends; other words are fields of its config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, (num_out, num_in) in sorted(modules_of(base).items()):
        if path.rpartition(".")[2] not in modules:
            continue
        own = next((number for end, number in (ranks or {}).items() if path.endswith(end)), rank)
        down = torch.randn(own, num_in, generator=generator) / math.sqrt(num_in)
        up = torch.randn(num_out, own, generator=generator) / 2
        tensors[f"base_model.model.{path}.lora_A.weight"] = down.to(DTYPES[dtype])
        tensors[f"base_model.model.{path}.lora_B.weight"] = up.to(DTYPES[dtype])
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    fields = {**_CONFIG, "r": rank, "lora_alpha": alpha, "target_modules": list(modules)}
    fields |= {"rank_pattern": ranks or {}} | config
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def scale_of(config, path, rank):
    """What ``peft`` multiplies both halves by."""
    ends = (number for end, number in config["alpha_pattern"].items() if path.endswith(end))
    alpha = next(ends, config["lora_alpha"])
    return alpha / (math.sqrt(rank) if config["use_rslora"] else rank)


def merge(model, folder):
    """Merge an adapter into a model of transformers, in the model's dtype; return the model."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, down in tensors.items():
        if ".lora_A." not in name:
            continue
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        weight = model.get_submodule(path).weight
        up = tensors[name.replace("lora_A", "lora_B")]
        with torch.no_grad():
            weight += scale_of(config, path, len(down)) * (up.to(weight.dtype) @ down.to(weight.dtype))
    return model
