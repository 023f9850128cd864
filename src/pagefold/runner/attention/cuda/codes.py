"""Codes of K and V as a card's kernels read and write them: the formats of ``runner/codecs/``, in rows.

Written codes have the bits of torch's twins: each operation rounds once, as IEEE 754 says, in the twins' order, so who
writes them is compiled without fused multiply-adds (``enable_fp_fusion=False``). Two things may differ: which of two
scales ``INT4_SYMMETRIC`` takes where both leave the same error but for its rounding, as that is summed in another
order; and in formats of floating point, which NaN stands for one.

Rounding to 8 bits is done in whole numbers: not every card has an instruction for it. Triton's own conversions do not
saturate either.
"""

import triton
import triton.language as tl

from pagefold.kv.codec import num_wide
from pagefold.runner.codecs import CELL_CODECS
from pagefold.runner.codecs.int4_symmetric import SHARE
from pagefold.runner.codecs.levels import INVERSE, REACH
from pagefold.runner.codecs.two_widths import WIDE_REACH as WIDE_REACH_

__all__ = [
    "PLAIN",
    "hadamard",
    "has_scales",
    "has_zeros",
    "load_codes",
    "load_scales",
    "scale_numbers",
    "store_codes",
    "store_int2",
]

PLAIN = tl.constexpr(-1)
"""Numbers as they are computed: a slab's without a codec."""

FLOAT16 = tl.constexpr(CELL_CODECS["float16"].keys.number)
BFLOAT16 = tl.constexpr(CELL_CODECS["bfloat16"].keys.number)
E4M3 = tl.constexpr(CELL_CODECS["fp8_e4m3"].keys.number)
E4M3_SCALED = tl.constexpr(CELL_CODECS["fp8_per_token_head"].keys.number)
E5M2 = tl.constexpr(CELL_CODECS["fp8_e5m2"].keys.number)
INT8 = tl.constexpr(CELL_CODECS["int8_per_token_head"].keys.number)
INT4 = tl.constexpr(CELL_CODECS["int4_plain"].keys.number)
TWO_WIDTHS = tl.constexpr(CELL_CODECS["int4_per_token_head"].keys.number)
INT4_SYMMETRIC = tl.constexpr(CELL_CODECS["int4_per_token_head"].values.number)
INT2 = tl.constexpr(CELL_CODECS["kivi2"].keys.number)

_WIDE_REACH, _REACH, _SHARE = tl.constexpr(WIDE_REACH_), tl.constexpr(REACH), tl.constexpr(SHARE)
_FIRST, _THIRD, _FIFTH = (tl.constexpr(one) for one in INVERSE)
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to whole numbers, halves to even
_TINY = tl.constexpr(2.0**-126)
_NAN_BITS = tl.constexpr(0x7FC0)  # of bfloat16

_num_wide = triton.constexpr_function(num_wide)


@triton.constexpr_function
def has_scales(form):
    """Whether vectors of a format have a scale each, or their channels."""
    return form in (INT8.value, E4M3_SCALED.value, INT4.value, TWO_WIDTHS.value, INT4_SYMMETRIC.value, INT2.value)


@triton.constexpr_function
def has_zeros(form):
    """Whether they have a zero point beside it."""
    return form in (INT4.value, INT2.value)


@triton.jit
def _load(at, mask, HAS_MASK: tl.constexpr):
    if HAS_MASK:
        return tl.load(at, mask=mask, other=0)
    else:  # noqa: RET505 - Triton compiles one of two branches, not what follows a return
        return tl.load(at)


@triton.jit
def load_codes(
    slab,  # at the part of the cell, in block 0
    rows_at,  # int64: where each entry's row begins, in elements of the slab
    dims,  # which number of a row; rows_at and dims have shapes that broadcast
    mask,  # with HAS_MASK only
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Return numbers in scales, in a dtype that holds them exactly. Where ``mask`` is not set nothing is loaded."""
    if FORMAT == PLAIN:
        numbers = _load(slab + rows_at + dims, mask, HAS_MASK)
    elif FORMAT == FLOAT16 or FORMAT == BFLOAT16:
        halves = slab.to(tl.pointer_type(tl.uint16), bitcast=True) + rows_at // 2
        numbers = _load(halves + dims, mask, HAS_MASK)
        numbers = numbers.to(tl.float16 if FORMAT == FLOAT16 else tl.bfloat16, bitcast=True)
    elif FORMAT == INT8:
        numbers = _load(slab + rows_at + dims, mask, HAS_MASK).to(tl.int8, bitcast=True).to(tl.float32)
    elif FORMAT == E5M2:  # the upper half of a float16
        numbers = (_load(slab + rows_at + dims, mask, HAS_MASK).to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif FORMAT == E4M3 or FORMAT == E4M3_SCALED:
        codes = _load(slab + rows_at + dims, mask, HAS_MASK).to(tl.uint16)
        sizes = codes & 0x7F  # as a float16 its exponent is 8 too low
        numbers = ((codes & 0x80) << 8 | sizes << 7).to(tl.float16, bitcast=True) * 256.0
        numbers = tl.where(sizes == 0x7F, float("nan"), numbers)
    elif FORMAT == TWO_WIDTHS:
        WIDE: tl.constexpr = _num_wide(HEAD_DIM)
        HALF: tl.constexpr = (HEAD_DIM - WIDE) // 2
        is_high = dims >= WIDE + HALF
        codes = _load(slab + rows_at + tl.where(is_high, dims - HALF, dims), mask, HAS_MASK)
        levels = _levels_of((codes >> tl.where(is_high, 4, 0).to(tl.uint8)) & 15)
        numbers = tl.where(dims < WIDE, codes.to(tl.int8, bitcast=True).to(tl.float32), levels)
    elif FORMAT == INT2:
        QUARTER: tl.constexpr = HEAD_DIM // 4
        codes = _load(slab + rows_at + dims % QUARTER, mask, HAS_MASK)
        part = dims // QUARTER % 4  # beyond the head too: a byte has no more bits to be shifted out
        numbers = ((codes >> (2 * part).to(tl.uint8)) & 3).to(tl.float32)
    else:
        tl.static_assert(FORMAT == INT4 or FORMAT == INT4_SYMMETRIC, "a format that no kernel of a card reads")
        is_high = dims >= HEAD_DIM // 2
        codes = _load(slab + rows_at + tl.where(is_high, dims - HEAD_DIM // 2, dims), mask, HAS_MASK)
        codes = (codes >> tl.where(is_high, 4, 0).to(tl.uint8)) & 15
        numbers = codes.to(tl.float32) if FORMAT == INT4 else _levels_of(codes)
    return numbers


@triton.jit
def load_scales(
    slab,  # at the scales of the cell, in block 0
    at,  # int64: where each scale is, in scales
    mask,
    HAS_MASK: tl.constexpr,
):
    """Return bfloat16 numbers as float32."""
    halves = slab.to(tl.pointer_type(tl.uint16), bitcast=True)
    return (_load(halves + at, mask, HAS_MASK).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def scale_numbers(numbers, scales, zeros, FORMAT: tl.constexpr):
    """Return what numbers in scales stand for, in float32. Shapes broadcast."""
    if has_zeros(FORMAT):
        return numbers.to(tl.float32) * scales + zeros
    else:  # noqa: RET505 - as above
        return numbers.to(tl.float32) * scales


@triton.jit
def hadamard(vectors, RUN: tl.constexpr):
    """Rotate ``[ROWS, DIMS]``, in runs of RUN numbers, a power of two; with the bits of ``codecs/hadamard.py``."""
    ROWS: tl.constexpr = vectors.shape[0]
    DIMS: tl.constexpr = vectors.shape[1]
    WIDTH: tl.constexpr = RUN
    for _ in tl.static_range(WIDTH.bit_length() - 1):
        a, b = tl.split(tl.reshape(vectors, [ROWS, DIMS // RUN, RUN // 2, 2]))
        pairs = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))  # sums before differences
        vectors = tl.reshape(pairs, [ROWS, DIMS])
    return vectors * tl.div_rn(1.0, tl.sqrt_rn(tl.full([1, 1], RUN, tl.float32)))


@triton.jit
def store_codes(
    slab,  # at the part of the cell, in block 0
    scales,  # at its scales
    rows_at,  # int64 [ROWS]: where each row begins, in bytes
    scales_at,  # int64 [ROWS]: and its scale
    numbers,  # float32 [ROWS, DIMS]: 0 beyond HEAD_DIM
    is_row,  # [ROWS]: the others are not stored
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Encode each row of ``numbers``."""
    dims = tl.arange(0, numbers.shape[1])[None, :]
    mask = is_row[:, None] & (dims < HEAD_DIM)
    to = slab + rows_at[:, None] + dims
    halves = scales.to(tl.pointer_type(tl.uint16), bitcast=True) + scales_at // 2
    if FORMAT == FLOAT16 or FORMAT == BFLOAT16:
        to = slab.to(tl.pointer_type(tl.uint16), bitcast=True) + rows_at[:, None] // 2 + dims
        tl.store(to, (_float16_of(numbers) if FORMAT == FLOAT16 else _bfloat16_of(numbers)).to(tl.uint16), mask=mask)
    elif FORMAT == E4M3:
        tl.store(to, _small_float(numbers, 3, -6, 448.0, 0x7F).to(tl.uint8), mask=mask)
    elif FORMAT == E5M2:
        tl.store(to, _small_float(numbers, 2, -14, 57344.0, 0x7F).to(tl.uint8), mask=mask)
    elif FORMAT == INT8 or FORMAT == E4M3_SCALED:
        scale = _scale_of(_largest(numbers), 127.0 if FORMAT == INT8 else 448.0)
        if FORMAT == INT8:
            codes = _whole(numbers, scale, 127.0) & 255
        else:
            codes = _small_float(_over(numbers, scale[:, None]), 3, -6, 448.0, 0x7F)
        tl.store(to, codes.to(tl.uint8), mask=mask)
        tl.store(halves, _upper_half(scale), mask=is_row)
    elif FORMAT == INT4:
        codes, scale_bits, zero_bits = _quantized(numbers, dims < HEAD_DIM, 15.0)
        _store_packed(slab, rows_at, codes, is_row, 0, HEAD_DIM // 2, 4)
        tl.store(halves, scale_bits, mask=is_row)
        tl.store(halves + BLOCK_SIZE, zero_bits, mask=is_row)
    elif FORMAT == TWO_WIDTHS:
        WIDE: tl.constexpr = _num_wide(HEAD_DIM)
        HALF: tl.constexpr = (HEAD_DIM - WIDE) // 2
        wide = tl.max(tl.abs(tl.where(dims < WIDE, numbers, 0.0)), 1)
        narrow = tl.max(tl.abs(tl.where(dims < WIDE, 0.0, numbers)), 1)
        of_wide, of_narrow = _over(wide, _WIDE_REACH), _over(narrow, _REACH)
        largest = tl.where(_has_nan(numbers), float("nan"), tl.maximum(of_wide, of_narrow))
        scale = _scale_of(largest, 1.0)
        is_number = scale < float("inf")
        tl.store(to, (_whole(numbers, scale, _WIDE_REACH) & 255).to(tl.uint8), mask=mask & (dims < WIDE))
        _store_packed(slab, rows_at, _level_codes(numbers, scale), is_row, WIDE, HALF, 4)
        tl.store(halves, tl.where(is_number, _upper_half(scale), _NAN_BITS), mask=is_row)
    else:
        largest = _largest(numbers)
        coarse, finer = _scale_of(largest, _REACH), _scale_of(largest * _SHARE, _REACH)
        is_finer = _level_error(numbers, finer, HEAD_DIM) < _level_error(numbers, coarse, HEAD_DIM)
        scale = tl.where(is_finer, finer, coarse)
        _store_packed(slab, rows_at, _level_codes(numbers, scale), is_row, 0, HEAD_DIM // 2, 4)
        tl.store(halves, tl.where(scale < float("inf"), _upper_half(scale), _NAN_BITS), mask=is_row)


@triton.jit
def store_int2(
    codes_at,  # pointer to bytes: at the codes of K or V of a block's cell
    scales_at,  # at their scales, with zero points behind them
    numbers,  # float32 [SLOTS, DIMS]: all of the block, 0 beyond HEAD_DIM
    SHARED_BY: tl.constexpr,  # 0: a channel has a scale, over all slots; 1: a slot has
    HEAD_DIM: tl.constexpr,
):
    """Encode a block's K or V; see ``codecs/int2.py``."""
    SLOTS: tl.constexpr = numbers.shape[0]
    dims = tl.arange(0, numbers.shape[1])
    slots = tl.arange(0, SLOTS)
    halves = scales_at.to(tl.pointer_type(tl.uint16), bitcast=True)
    if SHARED_BY == 0:
        vectors = tl.trans(numbers)
        turned, scale_bits, zero_bits = _quantized(vectors, slots[None, :] < SLOTS, 3.0)
        codes = tl.trans(turned)
        tl.store(halves + dims, scale_bits, mask=dims < HEAD_DIM)
        tl.store(halves + HEAD_DIM + dims, zero_bits, mask=dims < HEAD_DIM)
    else:
        codes, scale_bits, zero_bits = _quantized(numbers, dims[None, :] < HEAD_DIM, 3.0)
        tl.store(halves + slots, scale_bits)
        tl.store(halves + SLOTS + slots, zero_bits)
    _store_packed(codes_at, slots * (HEAD_DIM // 4), codes, slots < SLOTS, 0, HEAD_DIM // 4, 2)


@triton.jit
def _quantized(numbers, is_number, STEPS: tl.constexpr):
    """Return each row's int32 codes, 0 to STEPS, and the bits of its scale and of its zero point, which is its least.

    Rows without a finite scale are lost: their scale is NaN.
    """
    zero = _down(tl.min(tl.where(is_number, numbers, float("inf")), 1))
    span = tl.max(tl.where(is_number, numbers, float("-inf")), 1) - zero
    scale = _scale_of(tl.where(_has_nan(numbers), float("nan"), span), STEPS)
    is_kept = scale < float("inf")
    steps = _round(_over(numbers - zero[:, None], scale[:, None]), 0.0, STEPS)
    codes = tl.where(is_kept[:, None], steps, 0.0).to(tl.int32)
    return codes, tl.where(is_kept, _upper_half(scale), _NAN_BITS), tl.where(is_kept, _upper_half(zero), 0)


@triton.jit
def _store_packed(slab, rows_at, codes, is_row, FIRST: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Store codes of BITS bits from number FIRST on, in COUNT bytes a row.

    Byte ``i`` behind them has number ``i`` lowest, then ``i + COUNT``, and so on.
    """
    BYTES: tl.constexpr = triton.next_power_of_2(COUNT) if COUNT > 0 else 1
    bytes_at = tl.arange(0, BYTES)[None, :]
    last = codes.shape[1] - 1
    index = tl.zeros([codes.shape[0], BYTES], tl.int32) + FIRST + bytes_at
    packed = tl.zeros([codes.shape[0], BYTES], tl.int32)
    for part in tl.static_range(8 // BITS):
        packed |= tl.gather(codes, tl.minimum(index + part * COUNT, last), 1) << BITS * part
    to = slab + rows_at[:, None] + FIRST + bytes_at
    tl.store(to, packed.to(tl.uint8), mask=is_row[:, None] & (bytes_at < COUNT))


@triton.jit
def _over(numbers, divisors):
    """Divide as IEEE 754 rounds, which ``/`` of Triton does not."""
    return tl.div_rn(numbers, divisors + tl.zeros_like(numbers))


@triton.jit
def _has_nan(numbers):
    return tl.max((numbers != numbers).to(tl.int32), 1) > 0  # noqa: PLR0124 - NaN


@triton.jit
def _largest(numbers):
    """Return each row's largest size; NaN if a number is."""
    return tl.where(_has_nan(numbers), float("nan"), tl.max(tl.abs(numbers), 1))


@triton.jit
def _up(numbers):
    """Round numbers of at least 0 to bfloat16, up; NaN stays NaN. See ``vectors.up_to_bfloat16``."""
    bits = (numbers.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
    return tl.where(numbers != numbers, numbers, bits.to(tl.float32, bitcast=True))  # noqa: PLR0124 - NaN


@triton.jit
def _down(numbers):
    """Round numbers to bfloat16, down; see ``vectors.down_to_bfloat16``."""
    cut = (numbers.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True) + 0.0
    return tl.where(numbers < 0.0, -_up(tl.abs(numbers)), cut)


@triton.jit
def _upper_half(numbers):
    """Return the bits of float32 numbers that are bfloat16. Cards have another NaN than CPUs: here there is one."""
    halves = ((numbers.to(tl.int32, bitcast=True) >> 16) & 0xFFFF).to(tl.uint16)
    return tl.where(numbers != numbers, _NAN_BITS, halves)  # noqa: PLR0124 - NaN


@triton.jit
def _scale_of(largest, num_steps):
    """See ``vectors.scales_of``."""
    scale = _up(_over(largest, num_steps))
    return tl.where(scale < _TINY, _TINY, scale)


@triton.jit
def _round(numbers, least, most):
    return tl.minimum(tl.maximum((numbers + _MAGIC) - _MAGIC, least), most)


@triton.jit
def _whole(numbers, scale, reach):
    """Return int32 codes of 8 bits; 0 in rows whose scale is no number."""
    steps = _round(_over(numbers, scale[:, None]), -reach, reach)
    return tl.where((scale < float("inf"))[:, None], steps, 0.0).to(tl.int32)


@triton.jit
def _level_codes(numbers, scale):
    """Return int32 codes of sixteen levels (``codecs/levels.py``); 0 in rows whose scale is no number."""
    in_scales = _over(numbers, scale[:, None])
    squares = in_scales * in_scales
    found = in_scales * (_FIRST + squares * (_THIRD + squares * _FIFTH))
    return tl.where((scale < float("inf"))[:, None], _round(found + 7.5, 0.0, 15.0), 0.0).to(tl.int32)


@triton.jit
def _levels_of(codes):
    """Return what codes of sixteen levels stand for, in scales: exact in float32."""
    found = codes.to(tl.float32) - 7.5
    return found + found * found * found * 0.0078125


@triton.jit
def _level_error(numbers, scale, HEAD_DIM: tl.constexpr):
    """Return each row's squared error in sixteen levels."""
    distances = numbers - _levels_of(_level_codes(numbers, scale)) * scale[:, None]
    is_number = tl.arange(0, numbers.shape[1])[None, :] < HEAD_DIM
    return tl.sum(tl.where(is_number, distances * distances, 0.0), 1)


@triton.jit
def _small_float(
    numbers, MANTISSA_BITS: tl.constexpr, LEAST_EXPONENT: tl.constexpr, LARGEST: tl.constexpr, NAN_CODE: tl.constexpr
):
    """Round to a floating point of few bits, to the nearest, halves to even; it saturates. Return codes, int32."""
    bits = numbers.to(tl.int32, bitcast=True)
    sizes = tl.minimum(tl.abs(numbers), LARGEST)
    exponents = tl.maximum((sizes.to(tl.int32, bitcast=True) >> 23) - 127, LEAST_EXPONENT)
    steps = ((exponents - MANTISSA_BITS + 127) << 23).to(tl.float32, bitcast=True)
    whole = ((_over(sizes, steps) + _MAGIC) - _MAGIC).to(tl.int32)  # up to 2^(bits + 1): it may carry
    codes = ((exponents - LEAST_EXPONENT) << MANTISSA_BITS) + whole
    codes = tl.where(numbers != numbers, NAN_CODE, codes)  # noqa: PLR0124 - NaN
    SIGN: tl.constexpr = 15 if MANTISSA_BITS == 10 else 7
    return codes | (tl.where(bits < 0, 1, 0) << SIGN)


@triton.jit
def _float16_of(numbers):
    return _small_float(numbers, 10, -14, 65504.0, 0x7E00)


@triton.jit
def _bfloat16_of(numbers):
    """Round to bfloat16, halves to even; it saturates. Return bits, int32."""
    LARGEST: tl.constexpr = 3.3895313892515355e38
    bits = tl.minimum(tl.maximum(numbers, -LARGEST), LARGEST).to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where(numbers != numbers, _NAN_BITS, rounded)  # noqa: PLR0124 - NaN
