"""LoRA adapters: what a folder of one holds, which are loaded, and what a request says of one. No torch."""

from pagefold.adapters.folder import AdapterFolder, LowRank, read_adapter_folder
from pagefold.adapters.lora_request import LoRARequest
from pagefold.adapters.modules import MODULES, STAGES, BaseShapes, base_shapes
from pagefold.adapters.registry import AdapterRegistry, LoadedAdapter
from pagefold.adapters.weights import AdapterWeights

__all__ = [
    "MODULES",
    "STAGES",
    "AdapterFolder",
    "AdapterRegistry",
    "AdapterWeights",
    "BaseShapes",
    "LoRARequest",
    "LoadedAdapter",
    "LowRank",
    "base_shapes",
    "read_adapter_folder",
]
