"""PrefixLayout: all that must be equal for a prefix's blocks to be used elsewhere, as people can compare it.

A frame has all of this as one digest. That says whether two layouts are the same, and not what is other.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from pagefold.kv import TOKEN_BYTES, Namespace, root_digest
from pagefold.store.frame import FrameFormat

__all__ = ["PrefixLayout"]

_PARTS = r"(.*)/{size}/((?:fused: |transformers[:,] ).*)"
"""A namespace's layout: the arrangement of a block's bytes, its size, and who computed them."""
_NUMBERS = ("block_size", "block_bytes", "head_dim")
_MOST = 2**32


class PrefixLayout(NamedTuple):
    """How the blocks of a model are made, and by whom.

    Attributes:
        label: what people call the model; says nothing of whether two layouts are the same.
        model: digest of the model's weights and config.
        layout: arrangement, codec, block size and decoder, as in the namespace.
        dtype: element type of K and V.
        block_size: tokens a block.
        block_bytes: bytes of a block.
        head_dim: numbers of a head.
    """

    label: str
    model: str
    layout: str
    dtype: str
    block_size: int
    block_bytes: int
    head_dim: int

    @property
    def digest(self) -> bytes:
        """What frames call the layout."""
        return root_digest(Namespace(model=self.model, layout=self.layout, dtype=self.dtype).key())

    @property
    def frames(self) -> FrameFormat:
        """The format of frames, as a disk has them."""
        return FrameFormat(self.digest, self.block_bytes, self.block_size * TOKEN_BYTES)

    @property
    def arrangement(self) -> str:
        """How the bytes of K and V lie in a block, with the codec where there is one."""
        return self._parts[0]

    @property
    def decoder(self) -> str:
        """Who computes, by which arithmetic; empty where that is not known."""
        return self._parts[1]

    @property
    def _parts(self) -> tuple[str, str]:
        found = re.fullmatch(_PARTS.format(size=self.block_size), self.layout, re.DOTALL)
        return (found[1], found[2]) if found else (self.layout, "")

    def root(self, tenant: str = "", cache_salt: str = "") -> bytes:
        """Return what names the empty path of a tenant's prompts with a salt."""
        namespace = Namespace(
            model=self.model, layout=self.layout, dtype=self.dtype, tenant=tenant, cache_salt=cache_salt
        )
        return root_digest(namespace.key())

    def of_size(self, block_size: int) -> PrefixLayout:
        """Return the same with blocks of another size; the decoder is known."""
        assert self.decoder, "nobody knows where its block size is"
        return self._replace(
            layout=f"{self.arrangement}/{block_size}/{self.decoder}",
            block_size=block_size,
            block_bytes=self.block_bytes // self.block_size * block_size,
        )

    def told(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return self._asdict()

    @classmethod
    def of_told(cls, told: object) -> PrefixLayout:
        """Return the layout that JSON tells of.

        Raises:
            ValueError: it tells of none.
        """
        if not isinstance(told, dict) or told.keys() != set(cls._fields):
            msg = "it is no layout"
            raise ValueError(msg)
        for name in cls._fields:
            value = told[name]
            if name in _NUMBERS:
                is_right = type(value) is int and 0 < value < _MOST
            else:
                is_right = isinstance(value, str) and value.isprintable()  # people are shown it
            if not is_right:
                msg = f"its {name} is {ascii(value)[:40]}"
                raise ValueError(msg)
        return cls(**told)
