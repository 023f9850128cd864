"""PrefixBlocks: what of a prefix file goes into a store: blocks of its layout, named for who is to find them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.errors import PrefixMismatchError
from pagefold.kv.names import names_behind
from pagefold.store.frame import checksum_of
from pagefold.store.prefix_conversion import Conversion, conversion_of
from pagefold.store.protocol import Put

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.store.frame import BlockName
    from pagefold.store.prefix_file import PrefixFile
    from pagefold.store.prefix_layout import PrefixLayout

__all__ = ["PrefixBlocks"]


class PrefixBlocks:
    """The blocks of a prefix file that was checked, as another layout has them.

    What was computed for a tenant or with a salt stays theirs: it is never given to others.

    Args:
        prefix: the file.
        target: the layout of where they go; None for the file's own.
        tenant, cache_salt: whose they are to be; None, both of them, for those whose they are.

    Attributes:
        layout: of the blocks.
        names: of all of them, first to last.

    Raises:
        PrefixMismatchError: the file cannot be used there, or is somebody else's.
    """

    def __init__(
        self,
        prefix: PrefixFile,
        target: PrefixLayout | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self._prefix = prefix
        self.layout = target or prefix.layout
        self._conversion = conversion_of(prefix.layout, self.layout, str(prefix.file))
        root = _root(prefix, self.layout, tenant, cache_salt)
        self.names: list[BlockName] = names_behind(root, root, prefix.packed, self.layout.frames.key_bytes)
        if not self.names:
            held, size = prefix.about.num_tokens, self.layout.block_size
            msg = f"{prefix.file} holds {held} tokens, which do not fill a block of {size} here."
            raise PrefixMismatchError(msg, remedy=f"Export more, or use --block-size {prefix.layout.block_size} here.")

    @property
    def num_tokens(self) -> int:
        """How many tokens they hold."""
        return len(self.names) * self.layout.block_size

    def backwards(self, num: int) -> Iterator[list[Put]]:
        """Yield up to ``num`` blocks at a time, in their order, the last of the path first.

        What is put last leaves a full store last: so the head of the path stays, without which nothing else is found.
        """
        for end in range(len(self.names), 0, -num):
            yield [self._block(index) for index in range(max(0, end - num), end)]

    def _block(self, index: int) -> Put:
        conversion: Conversion = self._conversion
        first, part = divmod(index * conversion.num_joined, conversion.num_parts)
        found = [self._prefix.block(first + number) for number in range(conversion.num_joined)]
        payload = conversion.part(conversion.join([bytes(put.payload) for put in found]), part)
        return Put(self.names[index], memoryview(payload), checksum_of(payload))


def _root(prefix: PrefixFile, target: PrefixLayout, tenant: str | None, cache_salt: str | None) -> bytes:
    """Return what names the empty path of those who are to find the blocks."""
    about = prefix.about
    if tenant is None and cache_salt is None:
        if about.is_anybodys:
            return target.root()
        if target.digest == about.layout.digest:
            return about.namespace
        msg = f"{prefix.file} is a tenant's or has a salt, and its blocks get other names here: it must be known whose."
        raise PrefixMismatchError(msg, remedy="Give --tenant, --cache-salt or both, as they were at its export.")
    if about.is_anybodys or about.layout.root(tenant or "", cache_salt or "") == about.namespace:
        return target.root(tenant or "", cache_salt or "")
    msg = f"{prefix.file} was computed for another tenant or another salt, whose alone it is."
    raise PrefixMismatchError(
        msg, remedy="Give --tenant and --cache-salt as they were at its export, or leave them out."
    )
