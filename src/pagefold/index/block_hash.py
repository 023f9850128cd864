"""Block hashes: what a block of tokens is called beyond one process, as vLLM's ``sha256_cbor`` names it.

A block's hash is SHA-256 of the canonical CBOR (RFC 8949, section 4.2.1) of three things: the hash of the block before
it, its own tokens, and its extra keys, which is what else must be equal for two requests to share it (vLLM 0.32,
``v1/core/kv_cache_utils.py``). So a hash names all tokens from the beginning on. Before the first block comes the hash
of a seed.

Tenants are kept apart by the salt of their first blocks, from which all later hashes follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["DEFAULT_SEED", "ExtraKeys", "block_hash", "block_hashes", "first_parent", "tenant_salt"]

DEFAULT_SEED = "vllm-none-hash"
"""What vLLM begins its chains with where ``PYTHONHASHSEED`` is not set."""

_TENANT_BYTES = 16


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What must be equal beside the tokens for two requests to share blocks.

    Attributes:
        cache_salt: of the request, or what stands for its tenant too (:func:`tenant_salt`); part of the first block.
        lora_name, lora_path: of the request's adapter; part of every block. Empty for none.
    """

    cache_salt: str = ""
    lora_name: str = ""
    lora_path: str = ""

    def of_block(self, index: int) -> tuple[tuple[str, ...], ...] | None:
        """Return what is hashed with one block of a sequence, each value tagged with what it is; None for nothing."""
        keys: list[tuple[str, ...]] = []
        if self.lora_name:
            keys.append(("lora", self.lora_name, self.lora_path))
        if self.cache_salt and not index:
            keys.append(("cache_salt", self.cache_salt))
        return tuple(keys) or None

    def told_of_block(self, index: int) -> tuple[str, ...] | None:
        """Return the same as events tell it: the names alone, without tags."""
        keys = self.of_block(index)
        return None if keys is None else tuple(key[1] for key in keys)


_NOTHING = ExtraKeys()


def tenant_salt(tenant: str, cache_salt: str = "") -> str:
    """Return the salt of a tenant's blocks: what its requests bring, and a digest of the tenant's name.

    A tenant without a name has what its requests bring, as in vLLM; or a digest of that, if it is such as no text has.
    """
    if not tenant and _is_text(cache_salt):
        return cache_salt
    parts = (text.encode("utf-8", "surrogatepass") for text in (tenant, cache_salt))
    named = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return blake2b(named, digest_size=_TENANT_BYTES, person=b"pagefold tenant").hexdigest()


def _is_text(text: str) -> bool:
    """Whether ``text`` has no half of a pair of UTF-16, which JSON can say and UTF-8 cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def first_parent(seed: str = DEFAULT_SEED) -> bytes:
    """Return what stands before the first block: vLLM's ``NONE_HASH``.

    Raises:
        ConfigError: cbor2 is not installed.
    """
    return sha256(_cbor()(seed)).digest()


def block_hash(parent: bytes, token_ids: tuple[int, ...], extra_keys: tuple[tuple[str, ...], ...] | None) -> bytes:
    """Return the hash of one block, 32 bytes.

    Args:
        parent: hash of the block before it; for the first, :func:`first_parent`.
        token_ids: of the whole block.
        extra_keys: those of this block, tagged.

    Raises:
        ConfigError: cbor2 is not installed.
    """
    return sha256(_cbor()((parent, token_ids, extra_keys))).digest()


def block_hashes(
    token_ids: Sequence[int], block_size: int, extra_keys: ExtraKeys = _NOTHING, seed: str = DEFAULT_SEED
) -> list[bytes]:
    """Return the hashes of the whole blocks of a sequence, in order.

    Args:
        token_ids: of the sequence.
        block_size: tokens a block.
        extra_keys: what else must be equal.
        seed: what the servers' chains begin with.

    Raises:
        ConfigError: cbor2 is not installed.
    """
    hashes: list[bytes] = []
    parent = first_parent(seed)
    for index in range(len(token_ids) // block_size):
        own = tuple(token_ids[index * block_size : (index + 1) * block_size])
        parent = block_hash(parent, own, extra_keys.of_block(index))
        hashes.append(parent)
    return hashes


def _cbor() -> Callable[[object], bytes]:
    """Return what makes canonical CBOR. Whoever only looks hashes up does not need it."""
    global _dumps  # noqa: PLW0603 - found once: this is called for every block
    if _dumps is None:
        try:
            import cbor2  # noqa: PLC0415 - only with pagefold[events]
        except ImportError:
            msg = "To name blocks as vLLM does, cbor2 must be installed."
            raise ConfigError(msg, remedy='pip install "pagefold[events]"') from None

        def dumps(value: object) -> bytes:
            return cbor2.dumps(value, canonical=True)

        _dumps = dumps
    return _dumps


_dumps: Callable[[object], bytes] | None = None
