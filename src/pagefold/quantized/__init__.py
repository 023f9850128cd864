"""Folders whose ``config.json`` has a ``quantization_config``: of which stored tensors their matrices are made.

What a config says and how tensors lie is read with the standard library alone; ``dequantize.py`` and ``tiles.py``
compute.
"""

from pagefold.quantized.layout import MatrixLayout, Part, StoredTensors
from pagefold.quantized.methods import METHODS, read_quantization
from pagefold.quantized.quantization import Quantization
from pagefold.quantized.tensors import count_elements, tensors_of

__all__ = [
    "METHODS",
    "MatrixLayout",
    "Part",
    "Quantization",
    "StoredTensors",
    "count_elements",
    "read_quantization",
    "tensors_of",
]
