"""How each integer weight format meets the matmul kernels, which know no format.

A *panel* is 16 rows of a weight matrix, interleaved so that vector lanes are rows:

    for each block of 32 values along k:
      | 16 scales f16 | 16 minimums f16 (where the format has them) | dwords [k/4][row] |

Eight-bit formats hold eight vectors of 64 bytes a block, vector j the values k = 4j..4j+3 of each
row. Four-bit formats hold four: the low nibbles of vector j are k = 4j..4j+3 and the high ones
k = 16+4j.., just as GGUF splits a block, so packing moves whole dwords and no nibbles.

Weights are unsigned bytes with an `offset`: value = byte - offset. The dot product of a block is
`sum(byte * q) - offset * sum(q)`, and `sum(q)` comes with the activation (see `a8`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ignis.kernels.lang import Builder, Value, f16, f32, i8, i16, i32

ROWS = 16  # rows of a panel: the lanes of an f32 vector
BLOCK = 32  # values of a block along k


@dataclass(frozen=True, slots=True)
class PanelFormat:
    """One integer weight format: its block in the file, and its panel."""

    name: str
    block_nbytes: int  # one block of one row in the file
    quants_at: int  # where the quants start in that block
    bits: int  # bits a weight: 8 or 4
    offset: int  # subtracted from the unsigned byte
    flip: int  # xor that makes the file's bytes unsigned (0x80 for signed ones)
    has_min: bool

    @property
    def u_max(self) -> int:
        """The largest unsigned byte that a dot product can see."""
        return (1 << self.bits) - 1

    @property
    def n_vectors(self) -> int:
        """The 64-byte vectors of one panel block."""
        return self.bits

    @property
    def header_nbytes(self) -> int:
        return ROWS * 2 * (2 if self.has_min else 1)

    @property
    def panel_block_nbytes(self) -> int:
        return self.header_nbytes + 64 * self.n_vectors

    def row_nbytes(self, n_values: int) -> int:
        return n_values // BLOCK * self.block_nbytes

    def panel_nbytes(self, n_values: int) -> int:
        return n_values // BLOCK * self.panel_block_nbytes


FORMATS = {
    f.name: f
    for f in (
        PanelFormat("q8_0", 34, 2, bits=8, offset=128, flip=0x80, has_min=False),
        PanelFormat("q4_0", 18, 2, bits=4, offset=8, flip=0, has_min=False),
        PanelFormat("q4_1", 20, 4, bits=4, offset=0, flip=0, has_min=True),
    )
}


def pack_block(k: Builder, fmt: PanelFormat, rows: Sequence[Value], out: Value) -> None:
    """Copy one block of 16 rows (a pointer each) into a panel block at `out`."""
    out.store(_gather_halves(k, rows, 0))
    if fmt.has_min:
        out.at(ROWS * 2).store(_gather_halves(k, rows, 2))
    for half in range(fmt.n_vectors // 4):
        loads = [row.at(fmt.quants_at + 16 * half).load(i8.x(16)) for row in rows]
        for j, vector in enumerate(transpose_dwords(k, loads)):
            place = out.at(fmt.header_nbytes + 64 * (4 * half + j))
            place.store(vector.bits(i8.x(64)) ^ fmt.flip if fmt.flip else vector)


def scales(k: Builder, panel: Value) -> Value:
    """The 16 scales of a panel block, f32."""
    return panel.load(f16.x(ROWS)).to(f32)


def minimums(k: Builder, panel: Value) -> Value:
    """The 16 minimums of a panel block, f32."""
    return panel.at(ROWS * 2).load(f16.x(ROWS)).to(f32)


def unpack(k: Builder, fmt: PanelFormat, panel: Value) -> list[Value]:
    """The eight vectors of unsigned bytes of a panel block; vector j holds k = 4j..4j+3."""
    vectors = [
        panel.at(fmt.header_nbytes + 64 * j).load(i8.x(64)) for j in range(fmt.n_vectors)
    ]
    if fmt.bits == 8:
        return vectors
    return [v & 15 for v in vectors] + [high_nibbles(v) for v in vectors]


def high_nibbles(v: Value) -> Value:
    """The upper four bits of each byte; shifts exist for 16 bits and wider only."""
    words = i16.x(v.type.lanes // 2)
    return (v.bits(words) >> 4).bits(v.type) & 15


def transpose_dwords(k: Builder, rows: Sequence[Value]) -> list[Value]:
    """16 rows of 4 dwords -> 4 vectors of 16 dwords, vector j holding dword j of each row."""
    # Lane l (128 bits) of wide[j] is row j + 4l, so unpacking dwords puts row 4l + j in lane l.
    wide = [_join([rows[j + 4 * lane] for lane in range(4)], k).bits(i32.x(16)) for j in range(4)]
    low = [_unpack(k, wide[0], wide[1], 0), _unpack(k, wide[2], wide[3], 0)]
    high = [_unpack(k, wide[0], wide[1], 2), _unpack(k, wide[2], wide[3], 2)]
    return [
        _unpack_pairs(k, low[0], low[1], 0), _unpack_pairs(k, low[0], low[1], 1),
        _unpack_pairs(k, high[0], high[1], 0), _unpack_pairs(k, high[0], high[1], 1),
    ]  # fmt: skip


def sum_quarters(k: Builder, wide: Sequence[Value]) -> Value:
    """Four i32x16 whose 128-bit lane l of vector j belongs to row j + 4l -> the 16 row sums."""
    first = _unpack(k, wide[0], wide[1], 0) + _unpack(k, wide[0], wide[1], 2)
    second = _unpack(k, wide[2], wide[3], 0) + _unpack(k, wide[2], wide[3], 2)
    return _unpack_pairs(k, first, second, 0) + _unpack_pairs(k, first, second, 1)


def dot_rows(k: Builder, fmt: PanelFormat, rows: Sequence[Value], x: Value) -> Value:
    """The dot products of one block of 16 rows as they lie in the file with `x` (32 bytes).

    Offset not included; lanes of the result are rows.
    """
    zero = k.const(i32.x(16), 0)
    if fmt.bits == 4:
        low, high = (_repeat(k, x.at(16 * half).load(i8.x(16)), 4) for half in range(2))
        sums = []
        for j in range(4):
            packed = _join(
                [rows[j + 4 * lane].at(fmt.quants_at).load(i8.x(16)) for lane in range(4)], k
            )
            acc = k.dot4(zero, packed & 15, low, fmt.u_max)
            sums.append(k.dot4(acc, high_nibbles(packed), high, fmt.u_max))
        return sum_quarters(k, sums)
    both = _repeat(k, x.load(i8.x(32)), 2)
    partial = []
    for j in range(8):
        # Vector j: rows r and r + 4, two 128-bit lanes each.
        r = j % 4 + 8 * (j // 4)
        pair = [rows[i].at(fmt.quants_at).load(i8.x(32)) for i in (r, r + 4)]
        partial.append(k.dot4(zero, k.concat(*pair) ^ fmt.flip, both, fmt.u_max))
    first, second = sum_quarters(k, partial[:4]), sum_quarters(k, partial[4:])
    # Lanes of 128 bits: [rows 0-3 low half, rows 0-3 high half, rows 4-7 low, rows 4-7 high].
    even = k.shuffle(first, second, [4 * q + i for q in (0, 2, 4, 6) for i in range(4)])
    odd = k.shuffle(first, second, [4 * q + i for q in (1, 3, 5, 7) for i in range(4)])
    return even + odd


def row_scales(k: Builder, rows: Sequence[Value]) -> Value:
    """The scales of one block of 16 rows in the file, f32."""
    return _gather_halves(k, rows, 0).bits(f16.x(ROWS)).to(f32)


def row_minimums(k: Builder, rows: Sequence[Value]) -> Value:
    return _gather_halves(k, rows, 2).bits(f16.x(ROWS)).to(f32)


def _gather_halves(k: Builder, rows: Sequence[Value], at: int) -> Value:
    words = k.const(i16.x(ROWS), 0)
    for index, row in enumerate(rows):
        words = k.insert(words, index, row.at(at).load(i16))
    return words


def _join(parts: Sequence[Value], k: Builder) -> Value:
    """Concatenate four vectors of 128 bits."""
    return k.concat(k.concat(parts[0], parts[1]), k.concat(parts[2], parts[3]))


def _repeat(k: Builder, v: Value, times: int) -> Value:
    return k.shuffle(v, v, list(range(v.type.lanes)) * times)


def _unpack(k: Builder, a: Value, b: Value, first: int) -> Value:
    """[a0, b0, a1, b1] of dwords `first` and `first + 1` in every 128-bit lane."""
    indices = [
        4 * lane + first + i + 16 * side for lane in range(4) for i in (0, 1) for side in (0, 1)
    ]
    return k.shuffle(a, b, indices)


def _unpack_pairs(k: Builder, a: Value, b: Value, which: int) -> Value:
    """The same for 64-bit pairs of dwords: [a.pair, b.pair] in every 128-bit lane."""
    indices = [
        4 * lane + 2 * which + i + 16 * side
        for lane in range(4) for side in (0, 1) for i in (0, 1)
    ]  # fmt: skip
    return k.shuffle(a, b, indices)
