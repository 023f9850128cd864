"""Pieces: how a product of rows with panels is dealt to a team, and what each member fetches ahead.

A piece is some rows times some panels, or pairs of panels. Of few rows, which are bound by reading panels, all rows are
one tile, and each member has a share of the panels, one behind the other: so whatever it will read next is known and
fetched ahead, from one product into the next. Of many rows, tiles of rows times parts of the panels are claimed as they
come.
"""

from __future__ import annotations

from typing import NamedTuple

from pagefold.kernels.compiled import part
from pagefold.kernels.team import claim, claim_near, share_of

__all__ = ["TOKENS_A_TILE", "Deal", "Piece", "ahead_of", "claim_piece", "deal", "following_in"]

TOKENS_A_TILE = 182  # thirteen full tiles of 14 rows: their inputs stay in the second-level cache
_CHUNKS_A_MEMBER = 4
_CHUNKS_A_SHARE = 16  # of a product of few rows: as even as can be, and claimed in next to no time
_AHEAD = -1


class Deal(NamedTuple):
    """How one product is dealt.

    Attributes:
        num_tokens: of how many rows it is.
        num_columns: of how many panels, or pairs of them.
        size: panels, or pairs, a piece; 0 of many rows.
        num_parts: into how many parts the panels of a tile of rows are cut; 0 of few rows.
        num_pieces: of all.
    """

    num_tokens: int
    num_columns: int
    size: int
    num_parts: int
    num_pieces: int


class Piece(NamedTuple):
    """What a member computes of a product before it claims again.

    Attributes:
        t, num_rows: of which rows.
        first, end: which panels, or pairs of them; none where there is nothing left.
        then: the one that is fetched while the last is computed; ``_AHEAD`` for what the next product begins with.
    """

    t: int
    num_rows: int
    first: int
    end: int
    then: int


@part()
def _num_parts(num_panels, num_tiles, num_members):
    """Return in how many parts to deal panels, so that a phase has some chunks a member."""
    wanted = (_CHUNKS_A_MEMBER * num_members + num_tiles - 1) // num_tiles
    return min(num_panels, wanted if num_members > 1 else 1)


@part()
def _chunk_size(num_columns, num_members):
    """Return how many panels, or pairs of them, are a piece of a product of few rows."""
    return max(1, num_columns // (_CHUNKS_A_SHARE * num_members))


@part()
def deal(num_tokens, num_columns, num_members):
    """Return how a product of ``num_tokens`` rows with so many panels, or pairs of them, is dealt."""
    if num_tokens <= TOKENS_A_TILE:
        size = _chunk_size(num_columns, num_members)
        return Deal(num_tokens, num_columns, size, 0, (num_columns + size - 1) // size)
    num_tiles = (num_tokens + TOKENS_A_TILE - 1) // TOKENS_A_TILE
    num_parts = _num_parts(num_columns, num_tiles, num_members)
    return Deal(num_tokens, num_columns, 0, num_parts, num_tiles * num_parts)


@part()
def claim_piece(team, phase, dealt):
    """Return the next piece of a product; an empty one if none is left."""
    num_columns, num_pieces = dealt.num_columns, dealt.num_pieces
    if dealt.size:
        size = dealt.size
        chunk = claim_near(team.shares, phase, team.member, num_pieces)
        _, own = share_of(num_pieces, team.member, team.num_members)
        first, end = min(chunk * size, num_columns), min((chunk + 1) * size, num_columns)
        return Piece(0, dealt.num_tokens, first, end, _AHEAD if chunk + 1 >= own else end)
    chunk = claim(team.sync, phase)
    if chunk >= num_pieces:
        return Piece(0, 0, 0, 0, _AHEAD)
    t, part = chunk // dealt.num_parts * TOKENS_A_TILE, chunk % dealt.num_parts
    end = num_columns * (part + 1) // dealt.num_parts
    num_rows = min(TOKENS_A_TILE, dealt.num_tokens - t)
    return Piece(t, num_rows, num_columns * part // dealt.num_parts, end, end - 1)


@part()
def following_in(piece, column, panels, panels_a_column, ahead):
    """Return the address of what is fetched while ``column`` of a piece is computed.

    Panels are int64 ``[panels, 2]``: see :class:`~pagefold.runner.fused.weights.DecoderWeights`.
    """
    following = column + 1 if column + 1 < piece.end else piece.then
    return ahead if following == _AHEAD else panels[following * panels_a_column, 0]


@part()
def ahead_of(team, panels, panels_a_column):
    """Return the address of the panel that the member's share begins with, if the product of ``panels`` is of few rows.

    Of many rows nobody has a share. What is fetched then is a panel that somebody will read.
    """
    num_columns = panels.shape[0] // panels_a_column
    size = _chunk_size(num_columns, team.num_members)
    first, _ = share_of((num_columns + size - 1) // size, team.member, team.num_members)
    return panels[first * size * panels_a_column, 0]
