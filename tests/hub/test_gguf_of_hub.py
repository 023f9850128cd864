"""GGUF files of a hub: named by quantization or by name, fetched over HTTP by the hub's own client, kept for later."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pagefold.errors import ModelNotFoundError

pytest.importorskip("huggingface_hub")

from pagefold.hub import remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COMMIT = "a" * 40
REPO = "org/name-GGUF"
NAMES = [
    "README.md",
    "name-Q4_K_M.gguf",
    "name-Q8_0.gguf",
    "name-q4_0.gguf",
    "name-Q6_K-00001-of-00002.gguf",
    "name-Q6_K-00002-of-00002.gguf",
    "mmproj-name-F16.gguf",
    "other/name-Q8_0-pure.gguf",
]


@contextlib.contextmanager
def hub(content: bytes, asked: list[str]) -> Iterator[str]:
    """Serve a repository in which every file is ``content``, as far as the client asks."""

    class Hub(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            if self.path.startswith(f"/api/models/{REPO}/tree/"):
                entries = [{"type": "file", "path": name, "size": len(content), "oid": "0" * 40} for name in NAMES]
                self.answer(json.dumps(entries).encode())
            elif self.path.startswith(f"/api/models/{REPO}"):
                siblings = [{"rfilename": name} for name in NAMES]
                self.answer(json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode())
            elif self.path.startswith(f"/{REPO}/resolve/") and self.path.endswith(tuple(NAMES)):
                self.answer(content)
            else:
                self.answer(b"{}", 404)

        def answer(self, body: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if status != 200:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def pagefold(home: Path, endpoint: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own: the client reads where its hub is when it is imported."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "PAGEFOLD_CACHE": str(home / "cache")}
    env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "pagefold.cli", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)


def test_a_file_is_fetched_and_served_as_it_is(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    content, asked = tiny_gguf().read_bytes(), list[str]()
    with hub(content, asked) as endpoint:
        got = pagefold(tmp_path, endpoint, "models", "get", REPO, "--file", "Q4_K_M")
        assert got.returncode == 0, got.stderr
        assert f"{REPO}:Q4_K_M is in " in got.stdout
        assert any(line.startswith("GET") and line.endswith("name-Q4_K_M.gguf") for line in asked)
        assert not any("Q8_0" in line or "README" in line for line in asked)
        refused = pagefold(tmp_path, endpoint, "models", "path", f"{REPO}:IQ2_XS")
        assert refused.returncode == 2
        (line,) = refused.stderr.strip().splitlines()
        assert f"{REPO} has no GGUF file 'IQ2_XS'. Name one of these: {REPO}:name-Q4_K_M.gguf, " in line
        assert "mmproj" not in line
    # The hub is gone; what it gave is not.
    again = pagefold(tmp_path, endpoint, "models", "path", f"{REPO}:name-Q4_K_M.gguf")
    assert again.returncode == 0, again.stderr
    folder = again.stdout.strip()
    assert got.stdout.strip().endswith(folder)
    assert (Path(folder) / "model.gguf").read_bytes() == content


@pytest.mark.parametrize(
    ("which", "name"),
    [
        ("Q4_K_M", "name-Q4_K_M.gguf"),
        ("q4_k_m", "name-Q4_K_M.gguf"),
        ("Q4_0", "name-q4_0.gguf"),
        ("name-Q8_0.gguf", "name-Q8_0.gguf"),
        ("Q8_0", "name-Q8_0.gguf"),
        ("other/name-Q8_0-pure.gguf", "other/name-Q8_0-pure.gguf"),
    ],
)
def test_which_file_is_meant(which: str, name: str) -> None:
    assert remote._choose(REPO, NAMES, which) == name


@pytest.mark.parametrize(
    ("which", "says"),
    [
        ("M_K", "has no GGUF file 'M_K'"),
        ("Q6_K", "in 2 parts, which are not read as they are"),
        ("F16", "has no GGUF file 'F16'"),  # what translates pictures is no model
        ("Q3_K_S", "has 2 GGUF files that 'Q3_K_S' may mean: x-Q3_K_S.gguf, y-Q3_K_S.gguf"),
    ],
)
def test_what_is_none_or_several_is_refused(which: str, says: str) -> None:
    with pytest.raises(ModelNotFoundError, match=says) as refused:
        remote._choose(REPO, [*NAMES, "x-Q3_K_S.gguf", "y-Q3_K_S.gguf"], which)
    assert f"{REPO}:name-Q8_0.gguf" in refused.value.remedy


def test_a_repository_without_such_files() -> None:
    with pytest.raises(ModelNotFoundError, match="has no GGUF files"):
        remote._choose("org/name", ["config.json", "model.safetensors"], "Q4_K_M")


def test_a_repository_with_nothing_else_names_its_files(tmp_path: Path) -> None:
    with hub(b"", []) as endpoint:
        refused = pagefold(tmp_path, endpoint, "models", "get", REPO)
    assert refused.returncode == 2
    assert f"Name one of its GGUF files: {REPO}:name-Q4_K_M.gguf" in " ".join(refused.stderr.split())
