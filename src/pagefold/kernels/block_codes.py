"""Vector code on blocks of a panel: their codes as bytes, their scales as float32, and sums of products in integers.

Codes are bytes without a sign, rows bytes with one. ``vpdpbusd`` sums four products of them a word. A processor that
lacks it sums two products in 16 bits (``vpmaddubsw``), adds up as many of these as have room there, and widens the sums
(``vpmaddwd`` with ones): the same integers. With rows of -127 to 127, codes of 4 bit have room for a whole group (8
quads, 2 * 15 * 127 each, are 30,480), codes of 5 bit for four quads, and of 6 bit for two. Codes of 8 bit would not
have room for one: they get their sign back, the row is negated where they are negative, and their size is what is
multiplied, 128 at most (2 * 128 * 127 are 32,512).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from pagefold.kernels.block_kinds import GROUP, BlockKind
from pagefold.kernels.block_rows import SUMS_AT
from pagefold.kernels.emit import F32_P, FLOAT_BYTES, I8, I32, IS_WIDE
from pagefold.kernels.words import I32_P, WORD_BYTES, WordEmitter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["BlockEmitter", "GroupScales", "Place", "parts_of", "stored_scales"]

_QUAD = 4
_NUM_QUADS = GROUP // _QUAD
_HALF_BYTES = 2
_QUADS_WITH_ROOM = {4: 8, 5: 4, 6: 2, 8: 1}
"""How many quads' sums have room in 16 bits, by the bits of a code."""
_WIDE_BITS = 512
_SIGNS = 0x80808080
_LOW, _FIFTH, _UPPER = 0x0F0F0F0F, 0x10101010, 0x30303030
_SMALL, _HIGHEST = 0x3F3F3F3F, 0x30303030
_BYTE, _LAST = 0xFF, 24


class Place(NamedTuple):
    """Columns of a panel that are one vector.

    Attributes:
        width: columns of the panel.
        column: the first of the vector.
    """

    width: int
    column: ir.Value | int


class GroupScales(NamedTuple):
    """How codes of a group become numbers, of one vector of columns.

    Attributes:
        factors: what is multiplied, a part of the group.
        minimum: what is added; None for nothing.
    """

    factors: list[ir.Value]
    minimum: ir.Value | None

    @property
    def vectors(self) -> list[ir.Value]:
        """All of it, in the order in which it is stored."""
        return self.factors if self.minimum is None else [*self.factors, self.minimum]


def parts_of(kind: BlockKind) -> int:
    """Return in how many parts, each with a factor, a group is summed."""
    return 2 if kind.scales == "shared by sixteen" else 1


def stored_scales(kind: BlockKind) -> int:
    """Return how many float32 numbers a group of a column has for scales."""
    return parts_of(kind) + kind.has_minimum


class BlockEmitter(WordEmitter):
    """Vector code on blocks of a kind.

    Args:
        builder: of the function.
        lanes: of a vector.
        kind: of the blocks.
        is_native: whether to use the processor's instruction.
    """

    def __init__(self, builder: ir.IRBuilder, lanes: int, kind: BlockKind, *, is_native: bool) -> None:
        super().__init__(builder, lanes)
        self.kind = kind
        self._is_native = is_native
        self._has_signs = kind.bits == 8 and not is_native
        self._bytes = ir.VectorType(I8, _QUAD * lanes)
        self._shorts = ir.VectorType(ir.IntType(16), 2 * lanes)

    # Blocks of a panel.

    def scales(self, head: ir.Value, place: Place) -> list[GroupScales]:
        """Return the scales of a block's groups; ``head`` is where the block begins."""
        kind = self.kind
        halves = [self._load_half(head, index, place) for index in range(kind.halves)]
        words = self.at(head, kind.halves * _HALF_BYTES * place.width)
        packed = [self.load_column_words(words, index, place) for index in range(kind.head_words)]
        match kind.scales:
            case "own":
                return [GroupScales(halves, None)]
            case "own with minimum":
                return [GroupScales(halves[:1], halves[1])]
            case "shared with minimum":
                return self._small_scales(halves[0], self.builder.fneg(halves[1]), packed)
            case "shared by sixteen":
                signed = [self._signed_byte(packed[index // _QUAD], index % _QUAD) for index in range(2 * kind.groups)]
                factors = [self.builder.fmul(halves[0], self._as_numbers(one)) for one in signed]
                return [GroupScales(factors[at : at + 2], None) for at in range(0, len(factors), 2)]

    def quads(self, group: ir.Value, place: Place) -> Callable[[int], ir.Value]:
        """Return what emits a quad of a group's codes by its number: a byte each, as :meth:`sums` takes them."""
        builder, num_upper = self.builder, self.kind.group_words - _QUAD

        def word(index: int) -> ir.Value:
            return self.load_column_words(group, index, place)

        def quad(index: int) -> ir.Value:
            if self.kind.bits == 8:
                return builder.xor(word(index), self.all_words(_SIGNS)) if self._has_signs else word(index)
            lower = word(num_upper + index % _QUAD)
            lower = builder.and_(self._shifted(lower, -4 * (index // _QUAD)), self.all_words(_LOW))
            if self.kind.bits == 5:
                upper = builder.and_(self._shifted(word(0), 4 - index), self.all_words(_FIFTH))
                return builder.or_(lower, upper)
            if self.kind.bits == 6:
                upper = self._shifted(word(index // _QUAD), 4 - 2 * (index % _QUAD))
                return builder.or_(lower, builder.and_(upper, self.all_words(_UPPER)))
            return lower

        return quad

    def load_column_words(self, start: ir.Value, index: int, place: Place) -> ir.Value:
        """Load a word of each column; words of a panel are ``[index, width]``."""
        words = self.builder.bitcast(start, I32_P)
        return self.load_words(self.at(self.at(words, index * place.width), place.column))

    def load_scales(self, scales: ir.Value, place: Place) -> GroupScales:
        """Load scales of a group as they were stored, float32 ``[stored_scales, width]``."""
        numbers = self.at(scales, place.column)
        vectors = [self.load(numbers, index * place.width) for index in range(stored_scales(self.kind))]
        return GroupScales(vectors[:-1], vectors[-1]) if self.kind.has_minimum else GroupScales(vectors, None)

    # Sums.

    def sums(self, quads: Sequence[Callable[[int], ir.Value]], rows: Sequence[ir.Value]) -> list[list[list[ir.Value]]]:
        """Return sums of products of a group's numbers with codes, what is zero taken off: ``[part][row][vector]``.

        Args:
            quads: of each vector of columns: emits the codes.
            rows: addresses of the group in each row.
        """
        num_parts = parts_of(self.kind)
        length = _NUM_QUADS // num_parts
        return [
            self._part_sums(quads, rows, range(part * length, (part + 1) * length), self._zeros(part, num_parts))
            for part in range(num_parts)
        ]

    def _part_sums(
        self,
        quads: Sequence[Callable[[int], ir.Value]],
        rows: Sequence[ir.Value],
        numbers: range,
        zeros: ir.Constant | None,
    ) -> list[list[ir.Value]]:
        builder = self.builder
        before: list[ir.Value | None] = [
            None if zeros is None else self._sum_pairs(self._as_shorts(self._row_word(row, SUMS_AT)), zeros)
            for row in rows
        ]
        totals = [[one for _ in quads] for one in before]
        room = _NUM_QUADS if self._is_native else _QUADS_WITH_ROOM[self.kind.bits]
        for begin in range(numbers.start, numbers.stop, room):
            shorts: list[list[ir.Value | None]] = [[None for _ in quads] for _ in rows]
            for index in range(begin, min(begin + room, numbers.stop)):
                codes = [quad(index) for quad in quads]
                sizes = [self._sizes(one) for one in codes]
                for r, row in enumerate(rows):
                    x = self._row_word(row, _QUAD * index)
                    for v, code in enumerate(codes):
                        if self._is_native:
                            totals[r][v] = self._sum_quads(totals[r][v], code, x)
                            continue
                        pairs = self._sum_bytes(sizes[v], self._negated(x, code))
                        so_far = shorts[r][v]
                        shorts[r][v] = pairs if so_far is None else builder.add(so_far, pairs)
                self._keep(totals if self._is_native else shorts)
            if self._is_native:
                continue
            for r, of_row in enumerate(shorts):
                for v, pairs in enumerate(of_row):
                    total = self._sum_pairs(pairs, self._ones())
                    so_far = totals[r][v]
                    totals[r][v] = total if so_far is None else builder.add(so_far, total)
        return totals

    def _keep(self, values: list[list[ir.Value]]) -> None:
        """Emit nothing, but let all values be in registers here, as they are.

        LLVM would take the rows of a tile one after another, and have the codes of a group on the stack meanwhile.
        """
        flat = [one for row in values for one in row]
        if self.lanes * 32 == _WIDE_BITS and not IS_WIDE:
            return
        kinds = [one.type for one in flat]
        places = [*["=v"] * len(flat), *map(str, range(len(flat)))]
        result = kinds[0] if len(flat) == 1 else ir.LiteralStructType(kinds)
        kept = self.builder.asm(ir.FunctionType(result, kinds), "", ",".join(places), flat, side_effect=True)
        for row in values:
            for v in range(len(row)):
                index = len(flat) - len(kinds)
                row[v] = kept if len(flat) == 1 else self.builder.extract_value(kept, index)
                kinds.pop()

    def row_float(self, row: ir.Value, at: int) -> ir.Value:
        """Return a vector of one float32 of a row's group, ``at`` bytes from its beginning."""
        return self.broadcast(self.builder.load(self.builder.bitcast(self.at(row, at), F32_P), align=FLOAT_BYTES))

    def _row_word(self, row: ir.Value, at: int) -> ir.Value:
        where = self.builder.bitcast(self.at(row, at), I32_P)
        return self.broadcast_word(self.builder.load(where, align=WORD_BYTES))

    def _zeros(self, part: int, num_parts: int) -> ir.Constant | None:
        """Return what the sums of a row's halves are multiplied with; None where nothing is taken off."""
        if self.kind.zero == 0 or self._has_signs:
            return None
        of_halves = [-self.kind.zero if num_parts == 1 or half == part else 0 for half in range(2)]
        return ir.Constant(self._shorts, of_halves * self.lanes)

    def _ones(self) -> ir.Constant:
        return ir.Constant(self._shorts, [1] * (2 * self.lanes))

    def _as_shorts(self, words: ir.Value) -> ir.Value:
        return self.builder.bitcast(words, self._shorts)

    def _sizes(self, codes: ir.Value) -> ir.Value:
        """Return codes without their signs, where they have some."""
        codes = self.builder.bitcast(codes, self._bytes)
        if not self._has_signs:
            return codes
        kind = ir.FunctionType(self._bytes, [self._bytes, ir.IntType(1)])
        name = f"llvm.abs.v{_QUAD * self.lanes}i8"
        absolute = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(absolute, [codes, ir.Constant(ir.IntType(1), 0)])

    def _negated(self, x: ir.Value, codes: ir.Value) -> ir.Value:
        """Return a row's quad, negative where codes are, as it is multiplied with their sizes."""
        builder, x = self.builder, self.builder.bitcast(x, self._bytes)
        if not self._has_signs:
            return x
        codes = builder.bitcast(codes, self._bytes)
        if not IS_WIDE:
            return self._by_vectors("llvm.x86.avx2.psign.b", "", [x, codes], self._bytes)
        signs = builder.ashr(codes, ir.Constant(self._bytes, [7] * (_QUAD * self.lanes)))
        return builder.sub(builder.xor(x, signs), signs)

    def _sum_quads(self, total: ir.Value | None, codes: ir.Value, x: ir.Value) -> ir.Value:
        kind = ir.FunctionType(self.words, [self.words, self._bytes, self._bytes])
        name = f"llvm.x86.avx512.vpdpbusd.{self.lanes * 32}"
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        quads = [self.builder.bitcast(one, self._bytes) for one in (codes, x)]
        return self.builder.call(function, [self.all_words(0) if total is None else total, *quads])

    def _sum_bytes(self, codes: ir.Value, x: ir.Value) -> ir.Value:
        names = "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx512.pmaddubs.w.512"
        return self._by_vectors(*names, [codes, x], self._shorts)

    def _sum_pairs(self, shorts: ir.Value, others: ir.Value) -> ir.Value:
        return self._by_vectors("llvm.x86.avx2.pmadd.wd", "llvm.x86.avx512.pmaddw.d.512", [shorts, others], self.words)

    def _by_vectors(self, narrow: str, wide: str, arguments: list[ir.Value], out: ir.VectorType) -> ir.Value:
        """Call an instruction on vectors; on wide ones, where the processor's are narrow, on their halves."""
        is_wide = self.lanes * 32 == _WIDE_BITS
        if is_wide == IS_WIDE:
            kind = ir.FunctionType(out, [one.type for one in arguments])
            function = cgutils.get_or_insert_function(self.builder.module, kind, wide if is_wide else narrow)
            return self.builder.call(function, arguments)
        halves = []
        for part in range(2):
            pieces = [self._half(one, part) for one in arguments]
            kind = ir.FunctionType(ir.VectorType(out.element, out.count // 2), [one.type for one in pieces])
            function = cgutils.get_or_insert_function(self.builder.module, kind, narrow)
            halves.append(self.builder.call(function, pieces))
        together = ir.Constant(ir.VectorType(I32, out.count), list(range(out.count)))
        return self.builder.shuffle_vector(*halves, together)

    def _half(self, vector: ir.Value, part: int) -> ir.Value:
        length = vector.type.count // 2
        lanes = ir.Constant(ir.VectorType(I32, length), list(range(part * length, (part + 1) * length)))
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), lanes)

    # Parts of words.

    def _load_half(self, head: ir.Value, index: int, place: Place) -> ir.Value:
        """Load a 16-bit float of each column as float32."""
        kind = ir.VectorType(ir.HalfType(), self.lanes)
        halves = self.builder.bitcast(head, ir.HalfType().as_pointer())
        where = self.at(self.at(halves, index * place.width), place.column)
        half = self.builder.load(self.builder.bitcast(where, kind.as_pointer()), align=_HALF_BYTES)
        return self.builder.fpext(half, self.vector)

    def _small_scales(self, d: ir.Value, minus: ir.Value, packed: list[ir.Value]) -> list[GroupScales]:
        """Return scales and minima of 6 bit, as Q4_K packs those of eight groups into three words."""
        builder = self.builder
        scales, minima, upper = packed
        first = [builder.and_(one, self.all_words(_SMALL)) for one in (scales, minima)]
        second = [
            builder.or_(
                builder.and_(lower, self.all_words(_LOW)),
                builder.and_(self._shifted(one, -2), self.all_words(_HIGHEST)),
            )
            for lower, one in ((upper, scales), (self._shifted(upper, -4), minima))
        ]
        found = []
        for group in range(self.kind.groups):
            words = first if group < _QUAD else second
            numbers = [self._as_numbers(self._byte(one, group % _QUAD)) for one in words]
            found.append(GroupScales([builder.fmul(d, numbers[0])], builder.fmul(minus, numbers[1])))
        return found

    def _as_numbers(self, words: ir.Value) -> ir.Value:
        return self.builder.sitofp(words, self.vector)

    def _byte(self, words: ir.Value, index: int) -> ir.Value:
        return self.builder.and_(self._shifted(words, -8 * index), self.all_words(_BYTE))

    def _signed_byte(self, words: ir.Value, index: int) -> ir.Value:
        return self.builder.ashr(self._shifted(words, _LAST - 8 * index), self.all_words(_LAST))

    def _shifted(self, words: ir.Value, by: int) -> ir.Value:
        """Return words shifted to the left, or to the right where ``by`` is below zero."""
        if by == 0:
            return words
        shift = self.builder.shl if by > 0 else self.builder.lshr
        return shift(words, self.all_words(abs(by)))
