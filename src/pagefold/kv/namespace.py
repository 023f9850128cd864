"""Namespace: everything that changes the bytes of a block, or who may see it."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Namespace"]


@dataclass(frozen=True, slots=True)
class Namespace:
    """The part of a block's identity that is not its tokens. Two requests share blocks only if all fields are equal.

    Attributes:
        model: fingerprint of the model: weights and rope.
        layout: how a block's bytes are arranged (codec, device tile order, block size).
        dtype: element type of K and V.
        adapter: LoRA or other adapter; empty for none.
        tenant: who authenticated, never a field of a request's body.
        cache_salt: a client's own separation; empty for none.
    """

    model: str = ""
    layout: str = ""
    dtype: str = ""
    adapter: str = ""
    tenant: str = ""
    cache_salt: str = ""

    def key(self) -> bytes:
        """Return the exact key of this namespace: each field tagged and length-prefixed.

        It is no digest: two namespaces have equal keys only if they are equal, wherever a field ends.
        """
        parts: list[bytes] = []
        for tag, field in enumerate(fields(self)):
            value: str = getattr(self, field.name)
            raw = value.encode("utf-8", "surrogatepass")
            parts.append(bytes((tag,)) + len(raw).to_bytes(4, "little") + raw)
        return b"".join(parts)

    @classmethod
    def from_key(cls, key: bytes) -> Namespace:
        """Return the namespace whose :meth:`key` is ``key``."""
        values: list[str] = []
        while key:
            end = 5 + int.from_bytes(key[1:5], "little")
            values.append(key[5:end].decode("utf-8", "surrogatepass"))
            key = key[end:]
        return cls(*values)
