"""ServedCurve: what share of its prompts' tokens a running server would find, by the tokens of KV that it keeps.

It is the hit curve of a workload that is really served: ``/v1/cache/whatif`` tells it, of LRU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CurvePoint", "ServedCurve", "read_curve"]


class CurvePoint(NamedTuple):
    """One size.

    Attributes:
        num_tokens: of KV that are kept.
        hit_ratio: share of prompt tokens that are found, 0 to 1.
    """

    num_tokens: int
    hit_ratio: float


@dataclass(frozen=True, slots=True)
class ServedCurve:
    """The curve.

    Attributes:
        points: by size.
        since_s: of so many seconds.
        blocks_per_place: blocks of the server's pool that a block of tokens takes: one of each cache group that keeps
            all.
        is_of_all: whether it is of all requests; else of those of one tenant, with the cache for themselves.
    """

    points: tuple[CurvePoint, ...]
    since_s: float
    blocks_per_place: int
    is_of_all: bool

    def at(self, num_tokens: float) -> float:
        """Return what is found at least with so many tokens: what the next smaller size of the curve finds."""
        return max((point.hit_ratio for point in self.points if point.num_tokens <= num_tokens), default=0.0)

    def figures(self) -> dict[str, Any]:
        """Return it by names, ready for JSON."""
        return {
            "since_s": self.since_s,
            "is_of_all": self.is_of_all,
            "points": [point._asdict() for point in self.points],
        }


class _Point(BaseModel):
    num_blocks: int = Field(ge=0)
    hit_ratio: float = Field(ge=0, le=1)


class _Of(BaseModel):
    points: list[_Point]


class _Answer(BaseModel):
    block_size: int = Field(gt=0)
    blocks_per_place: int = Field(default=1, gt=0)
    since_s: float
    policies: list[_Of]
    tenants: list[_Of]


def read_curve(answer: Mapping[str, Any], url: str) -> ServedCurve:
    """Return the curve of LRU that a server tells; of one tenant's requests, if it was asked with his key.

    Args:
        answer: of ``/v1/cache/whatif``.
        url: of the server, for errors.

    Raises:
        ConfigError: that is none.
    """
    try:
        read = _Answer.model_validate(answer)
    except ValidationError:
        read = None
    told = [] if read is None else read.policies or read.tenants
    if read is None or not told:
        msg = f"What {url} tells is no curve."
        raise ConfigError(msg, remedy="Name the server of a Pagefold of this version.")
    points = sorted(CurvePoint(point.num_blocks * read.block_size, point.hit_ratio) for point in told[0].points)
    return ServedCurve(tuple(points), read.since_s, read.blocks_per_place, is_of_all=bool(read.policies))
