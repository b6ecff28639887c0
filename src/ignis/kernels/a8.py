"""Quantized activations, "A8" (NUMERICS 1): 32 values in a block of 48 bytes.

     0            32      36        40         44       48
     | int8 q[32] | f32 d | i32 n   | f32 d*s  | s0, s1 |

`s` is the sum of all 32 q, `s0` and `s1` (i16) those of its halves. `n` is -128 * s: what an
accumulator of unsigned weights starts from, shifted down to the format's own offset.

Blocks lie [block][token], T tokens in all, so that a matmul that has unpacked a block of weights
finds what it meets in one piece:

    address(token t, block b) = base + 48 * (b * T + t)
"""

from __future__ import annotations

from ignis.kernels.lang import Builder, Value, f32, i32

BLOCK_NBYTES = 48
D_AT, N_AT, DS_AT, HALVES_AT = 32, 36, 40, 44

MAX_ROWS = 512  # of one step


def nbytes(n_tokens: int, n_values: int) -> int:
    """The size of `n_tokens` quantized rows of `n_values`."""
    return n_tokens * (n_values // 32) * BLOCK_NBYTES


def scale(k: Builder, block: Value, lanes: int) -> Value:
    return block.at(D_AT).load(f32).splat(lanes)


def scaled_sum(k: Builder, block: Value, lanes: int) -> Value:
    return block.at(DS_AT).load(f32).splat(lanes)


def half_sums(k: Builder, block: Value, factor: int, lanes: int) -> tuple[Value, Value]:
    """factor * s0 and factor * s1 for a power of two: by shifts, multipliers have enough to do."""
    both, shift = block.at(HALVES_AT).load(i32).splat(lanes), 17 - factor.bit_length()
    return (both << 16).sar(shift), (both & 0xFFFF0000).sar(shift)


def start(k: Builder, block: Value, offset: int, lanes: int) -> Value:
    """-offset * s for an offset that is zero or a power of two up to 128."""
    if offset == 0:
        return k.const(i32.x(lanes), 0)
    start128 = block.at(N_AT).load(i32).splat(lanes)
    shift = 8 - offset.bit_length()
    return start128.sar(shift) if shift else start128
