"""GGUF files of a Llama, written with the tokenizer and the settings of another file."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["written_like"]


@contextmanager
def written_like(file: Path, other: Any, own: Mapping[str, Any]) -> Iterator[Any]:  # noqa: ANN401 - gguf has no types
    """Give a writer of ``file`` whose header is a reader's, but for the fields in ``own``; then write it."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    for field in other.fields.values():
        if field.name.startswith("GGUF.") or field.name == gguf.Keys.General.ARCHITECTURE:
            continue
        inside = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, own.get(field.name, field.contents()), field.types[0], inside)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
