"""Prefix files: the blocks of one known prefix, first to last, as one file that says what it is and can be checked.

It is an exported cache (``export.py``) of a single path of a single layout, whose header says so (``export_head.py``):
the layout in words, digests of the namespace, of the whole path and of all frames. Nothing of a file is believed before
all of it has been read: sizes follow from the header and must make up the file, each frame must be whole, of the layout
and behind the one before, and all of them together must have the digest.
"""

from __future__ import annotations

import contextlib
import json
import os
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import ConfigError
from pagefold.files.private import create_private
from pagefold.kv.names import path_digest
from pagefold.kv.transfers import MissCause
from pagefold.store.cache_folder import check_frame
from pagefold.store.export_head import EXPORT_HEADER_BYTES, MAX_TOLD_BYTES, export_head, read_export_head
from pagefold.store.frame import checksum_of
from pagefold.store.prefix_layout import PrefixLayout
from pagefold.store.protocol import Put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import BinaryIO

    from pagefold.store.frame import BlockName

__all__ = ["PrefixAbout", "PrefixFile", "is_prefix_file", "open_prefix", "writing_prefix"]

_REMEDY = "Name a file that pagefold cache export --prompt wrote."
_AGAIN = "Copy it again, or export it again."
_DIGEST_BYTES = 32
_MOST_FRAME_BYTES = 2**29  # as in export.py


class PrefixAbout(NamedTuple):
    """What a file says of its prefix.

    Attributes:
        layout: of its blocks.
        namespace: digest of the namespace that they were computed in, tenant and salt included.
        path: digest of the whole path.
        num_tokens: that its blocks hold.
        num_prompt_tokens: that the prompt had: those beyond its last whole block are not in the file.
        frames: BLAKE2b, 256 bits, of all bytes behind the header.
    """

    layout: PrefixLayout
    namespace: bytes
    path: bytes
    num_tokens: int
    num_prompt_tokens: int
    frames: bytes

    @property
    def num_blocks(self) -> int:
        """How many blocks."""
        return self.num_tokens // self.layout.block_size

    @property
    def is_anybodys(self) -> bool:
        """Whether it was computed for those without tenant and salt."""
        return self.namespace == self.layout.root()

    def to_json(self) -> bytes:
        """Return it as the header has it.

        Raises:
            ConfigError: it does not fit there.
        """
        fields = {
            "layout": self.layout.told(),
            "namespace": self.namespace.hex(),
            "path": self.path.hex(),
            "num_tokens": self.num_tokens,
            "num_prompt_tokens": self.num_prompt_tokens,
            "frames": self.frames.hex(),
        }
        raw = json.dumps(fields, separators=(",", ":")).encode()
        if len(raw) > MAX_TOLD_BYTES:
            msg = f"What is to be told of the model takes {len(raw):,} bytes, and a prefix file has {MAX_TOLD_BYTES:,}."
            raise ConfigError(msg, remedy="Export the whole folder: leave out --prompt.")
        return raw

    @classmethod
    def from_json(cls, raw: bytes) -> PrefixAbout:
        """Return what a header tells.

        Raises:
            ValueError: it is nothing that :meth:`to_json` has written.
        """
        try:
            told = json.loads(raw)
        except RecursionError:
            msg = "it nests too deep"
            raise ValueError(msg) from None
        if not isinstance(told, dict) or told.keys() != set(cls._fields):
            msg = "it has other fields"
            raise ValueError(msg)
        layout = PrefixLayout.of_told(told["layout"])
        numbers = told["num_tokens"], told["num_prompt_tokens"]
        if not all(type(number) is int for number in numbers) or not 0 < numbers[0] <= numbers[1] < 2**48:
            msg = f"its tokens are {ascii(numbers)[:40]}"
            raise ValueError(msg)
        if numbers[0] % layout.block_size:
            msg = f"{numbers[0]:,} tokens do not fill blocks of {layout.block_size}"
            raise ValueError(msg)
        digests = [_digest(told[name]) for name in ("namespace", "path", "frames")]
        return cls(layout, digests[0], digests[1], *numbers, digests[2])


def _digest(text: object) -> bytes:
    digest = bytes.fromhex(text) if isinstance(text, str) else b""
    if len(digest) != _DIGEST_BYTES:
        msg = "a digest is none"
        raise ValueError(msg)
    return digest


class PrefixWriter:
    """Writes the frames of a prefix, first to last.

    Args:
        out: where they go, behind the room for the header.
        layout: of the blocks.
        namespace: digest of their namespace.
    """

    def __init__(self, out: BinaryIO, layout: PrefixLayout, namespace: bytes) -> None:
        self._out = out
        self._layout = layout
        self._namespace = self._path = namespace
        self._digest = blake2b(digest_size=_DIGEST_BYTES)
        self.num_blocks = 0
        out.write(bytes(EXPORT_HEADER_BYTES))

    def add(self, name: BlockName, header: bytes, payload: bytes) -> None:
        """Write one frame, which was found to be right."""
        assert name.parent == self._path, "a block that is behind another one"
        self._path = name.digest
        for part in (header, payload):
            self._digest.update(part)
            self._out.write(part)
        self.num_blocks += 1

    def finish(self, num_prompt_tokens: int) -> PrefixAbout:
        """Write the header, and return what it says."""
        num_tokens = self.num_blocks * self._layout.block_size
        about = PrefixAbout(
            self._layout, self._namespace, self._path, num_tokens, num_prompt_tokens, self._digest.digest()
        )
        num_bytes = self._out.tell()
        self._out.seek(0)
        self._out.write(export_head(self.num_blocks, num_bytes, about.to_json()))
        return about


@contextlib.contextmanager
def writing_prefix(file: Path, layout: PrefixLayout, namespace: bytes) -> Iterator[PrefixWriter]:
    """Yield a writer of ``file``, which is there whole or not at all, and is its owner's alone.

    Raises:
        ConfigError: it cannot be written.
    """
    part = file.parent / f"{file.name}.{os.getpid()}"
    try:
        try:
            with create_private(part) as out:
                yield PrefixWriter(out, layout, namespace)
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        msg = f"Cannot write {file}: {error.strerror}."
        raise ConfigError(msg, remedy="Name a file in a folder that can be written, on a disk with room.") from None


class PrefixFile:
    """A prefix file that is open to be read.

    Attributes:
        file: its name.
        about: what it says of its prefix; true once :meth:`check` has returned.
        packed: the tokens of its blocks, packed; empty before that.
    """

    def __init__(self, opened: BinaryIO, file: Path, about: PrefixAbout) -> None:
        self._opened = opened
        self._frames = about.layout.frames
        self.file = file
        self.about = about
        self.packed = b""
        self._checksums: list[bytes] = []

    @property
    def layout(self) -> PrefixLayout:
        """The layout of its blocks."""
        return self.about.layout

    def check(self, progress: Callable[[int, int], None]) -> None:
        """Read all of it, and find every byte right.

        Args:
            progress: is told how many frames of how many were read.

        Raises:
            ConfigError: something is not; says which block.
        """
        digest, path = blake2b(digest_size=_DIGEST_BYTES), self.about.namespace
        keys, checksums = bytearray(), list[bytes]()
        progress(0, self.about.num_blocks)
        for index in range(self.about.num_blocks):
            header, payload = self._read(index)
            name = self._named(index, header, payload)
            if name.namespace != self.about.namespace or name.parent != path:
                what = f"block {index} is not one that comes behind the one before"
                raise self._wrong(what)
            path = name.digest
            digest.update(header)
            digest.update(payload)
            keys += name.key
            checksums.append(checksum_of(payload))
            progress(index + 1, self.about.num_blocks)
        if path != self.about.path or digest.digest() != self.about.frames:
            what = "its blocks are others than its header says"
            raise self._wrong(what)
        self.packed, self._checksums = bytes(keys), checksums

    def block(self, index: int) -> Put:
        """Return a block of a file that was checked, which is checked again.

        Raises:
            ConfigError: it is another one by now.
        """
        header, payload = self._read(index)
        name = self._named(index, header, payload)
        size, checksum = self._frames.key_bytes, self._checksums[index]
        if name.key != self.packed[index * size : (index + 1) * size] or checksum_of(payload) != checksum:
            what = f"block {index} has changed since it was read"
            raise self._wrong(what)
        return Put(name, memoryview(payload), checksum)

    def _read(self, index: int) -> tuple[bytes, bytes]:
        self._opened.seek(EXPORT_HEADER_BYTES + index * self._frames.frame_bytes)
        return self._opened.read(self._frames.header_bytes), self._opened.read(self._frames.block_bytes)

    def _named(self, index: int, header: bytes, payload: bytes) -> BlockName:
        name = check_frame(self._frames, header, payload)
        if isinstance(name, MissCause):
            what = f"block {index} is {str(name).replace('_', ' ')}"
            raise self._wrong(what)
        if name.digest != path_digest(name.parent, name.key) or self._frames.note_of(header):
            what = f"block {index} is one of a cache group, of which a prefix file has none"
            raise self._wrong(what)
        return name

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"{self.file} is damaged: {what}.", remedy=_AGAIN)


@contextlib.contextmanager
def open_prefix(file: Path) -> Iterator[PrefixFile]:
    """Yield a prefix file. Its header is right then, and its size is what the header says.

    Raises:
        ConfigError: it is none, or is not whole; or cannot be read, now or later.
    """
    try:
        with _opened(file) as opened:
            head = read_export_head(opened, file)
            if not head.told:
                msg = f"{file} is a whole exported cache, not a prefix."
                raise ConfigError(msg, remedy=f"{_REMEDY} A whole cache is for pagefold cache import.")
            yield PrefixFile(opened, file, _about(head.told, head.num_frames, opened, file))
    except OSError as error:
        msg = f"Cannot read {file}: {error.strerror}."
        raise ConfigError(msg, remedy=_REMEDY) from None


def is_prefix_file(file: Path) -> bool:
    """Whether an exported file says that it holds a prefix. False for whatever cannot be read: others say why."""
    try:
        with _opened(file) as opened:
            return bool(read_export_head(opened, file).told)
    except (OSError, ConfigError):
        return False


def _opened(file: Path) -> BinaryIO:
    if file.exists() and not file.is_file():  # opening a pipe would wait
        msg = f"Cannot read {file}: it is no file."
        raise ConfigError(msg, remedy=_REMEDY)
    return file.open("rb")


def _about(told: bytes, num_frames: int, opened: BinaryIO, file: Path) -> PrefixAbout:
    try:
        about = PrefixAbout.from_json(told)
    except ValueError as error:
        msg = f"{file} does not say what prefix it holds: {error}."
        raise ConfigError(msg, remedy=_REMEDY) from None
    frame_bytes, there = about.layout.frames.frame_bytes, os.fstat(opened.fileno()).st_size
    if frame_bytes > _MOST_FRAME_BYTES:
        msg = f"{file} has blocks of {about.layout.block_bytes:,} bytes, which no model has."
        raise ConfigError(msg, remedy=_REMEDY)
    if num_frames != about.num_blocks or there != EXPORT_HEADER_BYTES + num_frames * frame_bytes:
        msg = f"{file} is not whole: {about.num_blocks:,} blocks of {frame_bytes:,} bytes do not make {there:,}."
        raise ConfigError(msg, remedy=_AGAIN)
    return about
