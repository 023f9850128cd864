"""Turn a GGUF file of a known architecture into a model folder that transformers (and other engines) load.

The weights become float32, equal in bits to what transformers gets from the same file, in a small part of its time.
Some rows of one tensor at a time are held in memory. Whoever changes what is written here raises
``catalog.CONVERTER_VERSION``.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

from pagefold.gguf.architectures import find_architecture
from pagefold.gguf.file import GgufFile
from pagefold.hub.progress import Progress, silent
from pagefold.hub.publish import publish_folder
from pagefold.hub.tokenizer_files import write_tokenizer_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pagefold.gguf.architecture import Weight

__all__ = ["convert", "write_all_but_weights", "write_model_folder"]

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_NUMBERS_AT_ONCE = 1 << 22  # 16 MiB of float32


def convert(gguf_path: Path, target: Path, *, progress: Progress = silent) -> Path:
    """Make the model folder ``target`` out of a GGUF file, unless it is there already.

    The folder appears whole or not at all; any number of processes may ask for it at once, and one does the work.

    Args:
        gguf_path: a GGUF file.
        target: the folder to make; its parents are made too.
        progress: called after each tensor with the number of tensors.

    Raises:
        GgufError: the file is damaged, or has tensors of a type that is not known.
        UnsupportedModelError: a model or tokenizer of another architecture.
        ConfigError: the target cannot be written.
    """

    def build(folder: Path, _scratch: Path) -> None:
        write_model_folder(gguf_path, folder, progress=progress)

    return publish_folder(target, build, about={"source": gguf_path.name}, progress=progress)


def write_model_folder(gguf_path: Path, folder: Path, *, progress: Progress = silent) -> None:
    """Write the model's files into ``folder``, which exists; what ``convert`` does inside its lock.

    Raises:
        GgufError: the file is damaged, or has tensors of a type that is not known.
        UnsupportedModelError: a model or tokenizer of another architecture.
        OSError: the folder cannot be written.
    """
    with GgufFile(gguf_path) as gguf:
        weights = write_all_but_weights(gguf, folder)
        _write_weights(gguf, weights, folder / "model.safetensors", progress)


def write_all_but_weights(gguf: GgufFile, folder: Path) -> dict[str, Weight]:
    """Write the configs and the tokenizer's files into ``folder``, which exists; return the model's tensors.

    Raises:
        GgufFormatError: metadata or tensors are missing, or contradict each other.
        UnsupportedModelError: a model or tokenizer of another architecture.
        OSError: the folder cannot be written.
    """
    architecture = find_architecture(gguf)
    config = architecture.config(gguf)
    weights = architecture.weights(gguf, config)
    token_ids = {key: config[key] for key in _TOKEN_IDS if config[key] is not None}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", token_ids)
    write_tokenizer_files(gguf, folder)
    return weights


def _write_weights(gguf: GgufFile, weights: Mapping[str, Weight], path: Path, progress: Progress) -> None:
    # The format's own library wants all tensors at once, six times the size of a 4-bit file; the format itself is a
    # header of known offsets and then the numbers, which can be written as they come.
    what = f"converting {gguf.path.name}"
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in weights.items():
        start, end = end, end + 4 * math.prod(weight.shape)
        header[name] = {"dtype": "F32", "shape": weight.shape, "data_offsets": (start, end)}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that the numbers are aligned when the file is mapped
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for done, weight in enumerate(weights.values()):
            progress(what, done, len(weights))
            num_rows = max(_NUMBERS_AT_ONCE // math.prod(weight.shape[1:]) // weight.rows_together, 1)
            for rows in gguf.read_rows(weight.gguf_name, num_rows * weight.rows_together):
                file.write(weight.of_model(rows).astype("<f4", order="C", copy=False).data)
    progress(what, len(weights), len(weights))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
