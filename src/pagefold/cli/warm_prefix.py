"""``pagefold warm`` of a prefix file: its blocks go to a running server, which then warms them as any prompt."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path

    from pagefold.cli.running_server import RunningServer
    from pagefold.hub.progress import Progress
    from pagefold.store.frame import FrameFormat
    from pagefold.store.prefix_blocks import PrefixBlocks
    from pagefold.store.prefix_layout import PrefixLayout

__all__ = ["WarmTerms", "is_export", "warm_prefix"]

_MAGIC = b"PAGEFOLD EXPORT\0"

_MOST_BYTES = 2**25
"""Of frames that are sent at once: a server checks all of them before it writes the first."""


class WarmTerms(NamedTuple):
    """For whom a prefix is, and what of a warm-up is asked for.

    Attributes:
        tenant, cache_salt: who is to find it; None, both of them, for those whose it is.
        fields: of ``POST /v1/cache/warm``: pin, ttl_s, retention_priority.
    """

    tenant: str | None
    cache_salt: str | None
    fields: dict[str, Any]


def is_export(file: Path) -> bool:
    """Whether a file is one that ``pagefold cache export`` wrote, by how it begins."""
    try:
        if not file.is_file():  # to open a pipe would wait
            return False
        with file.open("rb") as opened:
            return opened.read(len(_MAGIC)) == _MAGIC
    except (OSError, ValueError):
        return False  # who reads it says why


def warm_prefix(file: Path, server: RunningServer, terms: WarmTerms, progress: Progress) -> dict[str, Any]:
    """Send a prefix file's blocks to a server, have it warm them, and return what came of it.

    All of the file is read and found right, and compared with the server, before anything is sent.

    Args:
        file: the prefix file.
        server: where to.
        terms: for whom.
        progress: is told how far it is.

    Raises:
        ConfigError: the file is not right, or of no use there; or no server answers.
        PrefixMismatchError: it is of another model, layout or owner; says which.
        InvalidRequestError: the server refuses the blocks, or the warm-up.
    """
    from pagefold.store.prefix_blocks import PrefixBlocks  # noqa: PLC0415 - heavy
    from pagefold.store.prefix_conversion import conversion_of  # noqa: PLC0415
    from pagefold.store.prefix_file import open_prefix  # noqa: PLC0415

    with open_prefix(file) as prefix:
        told = server.ask("/v1/cache/layout", "cache.layout")
        target, most_bytes = _layout_in(told, server)
        conversion_of(prefix.layout, target, str(file))  # before all of a large file is read
        prefix.check(lambda done, total: progress("reading", done, total))
        blocks = PrefixBlocks(prefix, target, terms.tenant, terms.cache_salt)
        is_ours = terms.tenant is not None or terms.cache_salt is not None or prefix.about.is_anybodys
        if terms.fields and not is_ours:
            msg = f"{file} is a tenant's or has a salt, and to pin it must be known whose."
            raise ConfigError(msg, remedy="Give --tenant, --cache-salt or both, as they were at its export.")
        num_kept = _send(blocks, server, most_bytes, progress)
        packed = prefix.packed[: blocks.num_tokens * len(array("i", [0]).tobytes())]
    result: dict[str, Any] = {
        "num_blocks": len(blocks.names),
        "num_tokens": blocks.num_tokens,
        "num_kept": num_kept,
        "warmed": None,
    }
    if is_ours:
        owner = {"tenant": terms.tenant or None, "cache_salt": terms.cache_salt or None}
        fields = {"prompt": array("i", packed).tolist(), **owner, **terms.fields}
        result["warmed"] = server.ask("/v1/cache/warm", "cache.warm", fields)
    return result


def _layout_in(told: dict[str, Any], server: RunningServer) -> tuple[PrefixLayout, int]:
    """Return what a server tells of its layout, and how large a body it takes."""
    from pagefold.store.prefix_layout import PrefixLayout  # noqa: PLC0415 - heavy

    try:
        layout = PrefixLayout.of_told({name: told.get(name) for name in PrefixLayout._fields})
        most_bytes = int(told["max_body_bytes"])
    except (ValueError, TypeError, KeyError) as error:
        msg = f"What {server.url} tells of its layout is none: {error}."
        raise ConfigError(msg, remedy="Use the version of Pagefold that the server has.") from None
    return layout, most_bytes


def _kept_in(taken: dict[str, Any], server: RunningServer) -> dict[str, int]:
    """Return how many blocks each tier has, as a server says it."""
    kept = taken.get("num_kept")
    if not isinstance(kept, dict) or not all(type(num) is int for num in kept.values()):
        msg = f"{server.url} does not say what became of blocks."
        raise ConfigError(msg, remedy="Use the version of Pagefold that the server has.")
    return {str(tier): num for tier, num in kept.items()}


def _send(blocks: PrefixBlocks, server: RunningServer, most_bytes: int, progress: Progress) -> dict[str, int]:
    """Send all blocks, the last of the path first; return how many each tier has taken."""
    frames: FrameFormat = blocks.layout.frames
    at_once = min(most_bytes, _MOST_BYTES) // frames.frame_bytes
    if at_once < 1:
        msg = f"A block takes {frames.frame_bytes:,} bytes, and {server.url} takes bodies of {most_bytes:,}."
        raise ConfigError(msg, remedy=f"Start it with --max-body-bytes {frames.frame_bytes}, or use cache import.")
    num_sent, num_kept = 0, dict[str, int]()
    progress("sending", 0, len(blocks.names))
    for batch in blocks.backwards(at_once):
        body = b"".join(frames.header(put.name, put.checksum) + put.payload for put in batch)
        try:
            taken = server.send("/v1/cache/import", "cache.import", body)
        except InvalidRequestError as error:
            msg = f"After {num_sent} of {len(blocks.names)} blocks {server.url} refused one: {error}"
            raise InvalidRequestError(msg) from None
        for tier, num in _kept_in(taken, server).items():
            num_kept[tier] = num_kept.get(tier, 0) + num
        num_sent += len(batch)
        progress("sending", num_sent, len(blocks.names))
    return num_kept
