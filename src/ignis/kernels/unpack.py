"""One function a format: 32 weights of a row as they lie in the file -> 32 bytes.

`unpack(rows, b)` reads block b of 32 values at the start of a group (of one block, or of a
super-block's eight) and returns two vectors, its first and its last 16 values, as unsigned codes
of the format's bits. b is known while the kernel is built or, but for `tq1_0`, only when it runs.
What a code means (an offset, a list of values) and the scales are said in `panels.FORMATS`. The
layouts are drawn in `gguf.classic`, `gguf.kquants` and `gguf.codebooks`.
"""

from __future__ import annotations

from ignis.kernels.lang import Builder, Value
from ignis.kernels.rows import Index, Rows, shift_bytes

Halves = tuple[Value, Value]


def q8_0(rows: Rows, b: Index) -> Halves:
    return rows.bytes(2) ^ 0x80, rows.bytes(18) ^ 0x80


def q4_0(rows: Rows, b: Index) -> Halves:
    return _nibbles(rows.bytes(2))


iq4_nl = q4_0


def q4_1(rows: Rows, b: Index) -> Halves:
    return _nibbles(rows.bytes(4))


def q5_0(rows: Rows, b: Index) -> Halves:
    return _five_bits(rows, high_at=2, low_at=6)


def q5_1(rows: Rows, b: Index) -> Halves:
    return _five_bits(rows, high_at=4, low_at=8)


def mxfp4(rows: Rows, b: Index) -> Halves:
    return _nibbles(rows.bytes(1))


def iq4_xs(rows: Rows, b: Index) -> Halves:
    return _nibbles(rows.bytes(8 + 16 * b))


def q4_k(rows: Rows, b: Index) -> Halves:
    return _fields(rows, 16 + 32 * (b // 2), bits=4, position=4 * (b % 2))


def q5_k(rows: Rows, b: Index) -> Halves:
    low = _fields(rows, 48 + 32 * (b // 2), bits=4, position=4 * (b % 2))
    return _or(low, _fields(rows, 16, bits=1, position=b, to=4))


def q6_k(rows: Rows, b: Index) -> Halves:
    half, quarter = b // 4, b % 4
    low = _fields(rows, 64 * half + 32 * (quarter % 2), bits=4, position=4 * (quarter // 2))
    return _or(low, _fields(rows, 128 + 32 * half, bits=2, position=2 * quarter, to=4))


def q2_k(rows: Rows, b: Index) -> Halves:
    return _fields(rows, 16 + 32 * (b // 4), bits=2, position=2 * (b % 4))


def q3_k(rows: Rows, b: Index) -> Halves:
    low = _fields(rows, 32 + 32 * (b // 4), bits=2, position=2 * (b % 4))
    return _or(low, _fields(rows, 0, bits=1, position=b, to=2))


def tq2_0(rows: Rows, b: Index) -> Halves:
    return _fields(rows, 32 * (b // 4), bits=2, position=2 * (b % 4))


def tq1_0(rows: Rows, b: Index) -> Halves:
    assert isinstance(b, int)
    if b < 5:
        return _trit(rows.bytes(0), b), _trit(rows.bytes(16), b)
    tail = rows.bytes(32)
    if b < 7:
        first = 2 * (b - 5)
        return _trit(tail, first), _trit(tail, first + 1)
    last, k = rows.dword(48), rows.k
    digits = [_trit(last, n) for n in range(4)]
    lanes = last.type.lanes
    # Of four equal dwords take the n-th from digit n.
    even = k.shuffle(digits[0], digits[1], [i + lanes * (i // 4 % 2) for i in range(lanes)])
    odd = k.shuffle(digits[2], digits[3], [i + lanes * (i // 4 % 2) for i in range(lanes)])
    joined = k.shuffle(even, odd, [i + lanes * (i // 8 % 2) for i in range(lanes)])
    return _trit(tail, 4), joined


def _nibbles(packed: Value) -> Halves:
    return packed & 15, shift_bytes(packed, 4) & 15


def _fields(rows: Rows, at: Index, bits: int, position: Index, to: int = 0) -> Halves:
    """The `bits` at bit `position` of each of 32 bytes, moved to bit `to`."""
    mask = (1 << bits) - 1

    def field(packed: Value) -> Value:
        if isinstance(position, Value):
            return shift_bytes(shift_bytes(packed, position) & mask, -to)
        return shift_bytes(packed, position - to) & (mask << to)

    return field(rows.bytes(at)), field(rows.bytes(at + 16))


def _or(low: Halves, high: Halves) -> Halves:
    return low[0] | high[0], low[1] | high[1]


def _five_bits(rows: Rows, high_at: int, low_at: int) -> Halves:
    """Nibbles, and a dword whose bit i is the fifth bit of value i."""
    return _or(_nibbles(rows.bytes(low_at)), spread_bits(rows.k, rows.dword(high_at), 16))


def spread_bits(k: Builder, dword: Value, number: int) -> Halves:
    """Byte i is `number` where bit i of the dword (four times over in a lane) is set, else 0."""
    lanes = dword.type.lanes
    bits = k.const(dword.type, [1 << (i % 8) for i in range(lanes)])
    zero, one = k.const(dword.type, 0), k.const(dword.type, number)

    def half(first: int) -> Value:
        # In each lane of 16: byte `first` eight times, then the next one.
        spread = k.shuffle(dword, dword, [i // 16 * 16 + first + i % 16 // 8
                                          for i in range(lanes)])  # fmt: skip
        return k.select((spread & bits) != 0, one, zero)

    return half(0), half(2)


def _trit(packed: Value, n: int) -> Value:
    """Digit n in base three of bytes that are fractions of 256: 0, 1 or 2."""
    k = packed.k
    fraction = (packed * 3**n) ^ 0x80  # wraps; signed comparisons of unsigned bytes
    one = k.const(packed.type, 1)
    middle = k.select(fraction > 85 - 128, one, k.const(packed.type, 0))
    return k.select(fraction > 170 - 128, one + one, middle)
