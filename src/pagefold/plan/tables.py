"""The tables that come with Pagefold: models by their hub ids, and devices. Every row says where it was read."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagefold.errors import ConfigError, ModelNotFoundError
from pagefold.plan.config_json import read_config_file, shape_of
from pagefold.plan.nearest import nearest_names
from pagefold.plan.span import GIB
from pagefold.plan.weights import count_blocks, count_parameters

if TYPE_CHECKING:
    from pagefold.plan.shape import ModelShape

__all__ = ["Device", "device_names", "find_device", "find_model", "model_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A machine, or one accelerator of it.

    Attributes:
        name: what it is called.
        memory_bytes: bytes of its memory as its driver reports them to an engine; on a CPU what is free.
        memory_ends: the least and the most that drivers were seen to report; None where it is known.
        nominal_bytes: bytes that its name says; 0 where it has none.
        num_multiprocessors: of a GPU; 0 where nobody said.
        bandwidth: bytes a second of its memory; None where nobody said.
        flops_16: operations a second of dense products in 16 bit; None where nobody said.
        flops_8: the same in 8 bit, where it has them.
        flops_32: the same in float32, where models are computed in that.
        host_link: bytes a second, one way, between it and the host's memory; None for a CPU.
        source: where the numbers were read.
        is_cpu: whether weights and KV lie in the memory that everything else on the machine uses.
        multiplies_bfloat16: whether a CPU says that it can, by an instruction. (A server also tries it.)
    """

    name: str
    memory_bytes: int
    memory_ends: tuple[int, int] | None = None
    nominal_bytes: int = 0
    num_multiprocessors: int = 0
    bandwidth: float | None = None
    flops_16: float | None = None
    flops_8: float | None = None
    flops_32: float | None = None
    host_link: float | None = None
    source: str = ""
    is_cpu: bool = False
    multiplies_bfloat16: bool = False

    def with_memory(self, num_bytes: int) -> Device:
        """Return the device with so much memory, known to the byte."""
        return replace(self, memory_bytes=num_bytes, memory_ends=None)


@cache
def _rows(file_name: str) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads((files("pagefold.plan") / "data" / file_name).read_text(encoding="utf-8")))


def model_names(*, with_aliases: bool = False) -> list[str]:
    """Return the names of the table's models, with their other names if wanted."""
    rows = _rows("models.json")
    return [name for row in rows for name in (row["name"], *(row["aliases"] if with_aliases else ()))]


def device_names(*, with_aliases: bool = False) -> list[str]:
    """Return the names of the table's devices, with their other names if wanted."""
    rows = _rows("devices.json")
    return [name for row in rows for name in (row["name"], *(row["aliases"] if with_aliases else ()))]


def find_model(name: str) -> ModelShape:
    """Return the shape of a model: a local folder, a ``config.json``, or a row of the table.

    Of a folder with weights the parameters are counted from the headers of its files.

    Raises:
        ModelNotFoundError: none of the three; names the nearest rows.
        ConfigError: its config lacks what is needed.
        UnsupportedModelError: it has layers that cannot be sized.
    """
    try:
        path = Path(name).expanduser()
        if path.is_dir() or path.suffix == ".json":
            return _model_of(path)
    except (RuntimeError, OSError) as error:  # no such home, or no name of a file
        why = error.strerror if isinstance(error, OSError) else error
        message = f"There is no model {name!r}: {why}."
        raise ModelNotFoundError(message, remedy="Name a folder, a config.json, or a row of the table.") from None
    wanted = name.lower()
    for row in _rows("models.json"):
        names = [other.lower() for other in (row["name"], *row["aliases"])]
        if wanted in names or wanted in (other.rsplit("/", 1)[-1] for other in names):
            return shape_of(row["config"] | row.get("beside", {}), name=row["name"], source=" ".join(row["sources"]))
    nearest = nearest_names(name, model_names(with_aliases=True))
    message = f"There is no model {name!r}: neither a folder with a config.json nor a row of the table."
    remedy = f"The nearest rows: {', '.join(nearest)}." if nearest else "`pagefold plan --list` names all rows."
    raise ModelNotFoundError(message, remedy=remedy)


def _model_of(path: Path) -> ModelShape:
    folder = path if path.is_dir() else path.parent
    file = folder / "config.json" if path.is_dir() else path
    shape = shape_of(read_config_file(file), name=str(path), source=str(file))
    if not path.is_dir():
        return shape
    return replace(shape, exact_parameters=count_parameters(folder), blocks=count_blocks(folder))


def find_device(name: str) -> Device:
    """Return the device of the table that is called ``name``, whatever its case.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    wanted = name.lower().replace("_", "-").replace(" ", "-")
    for row in _rows("devices.json"):
        if wanted in (other.lower() for other in (row["name"], *row["aliases"])):
            return _device_of(row)
    nearest = nearest_names(name, [*device_names(with_aliases=True), "cpu"])
    message = f"There is no device {name!r} in the table."
    remedy = f"The nearest: {', '.join(nearest)}." if nearest else f"It has {', '.join(device_names())} and cpu."
    raise ConfigError(message, remedy=f"{remedy} Or give --device-memory.")


def _device_of(row: dict[str, Any]) -> Device:
    """Return the device of a row of the table."""
    apart = {"aliases", "nominal_bytes", "reported_gib", "reported_source", "source"}
    low, likely, high = (round(gib * GIB) for gib in row["reported_gib"])
    return Device(
        memory_bytes=likely,
        memory_ends=(low, high),
        nominal_bytes=int(row["nominal_bytes"]),
        source=f"{row['source']}; memory: {row['reported_source']}",
        **{key: value for key, value in row.items() if key not in apart},
    )
