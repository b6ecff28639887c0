"""How each integer weight format meets the matmul kernels, which know no format.

A *panel* is 16 rows of a weight matrix, interleaved so that vector lanes are rows:

    for each group (a block of 32 values along k, or a super-block of eight):
      | header: the file's scales, one vector a number | for each block: planes |

A *plane* holds some bits of each code, as dwords [k/4][row]. Eight vectors V0..V7 of 64 bytes, Vi
the values k = 4i..4i+3 of each row, become

    8 bits   8 vectors, as they are
    4 bits   4 vectors, Vi in the low nibbles of vector i, Vi+4 in the high ones
    2 bits   2 vectors, Vi in pair i / 2 of vector i % 2
    1 bit    1 vector,  Vi in bit i

so a five-bit format has a plane of one bit and one of four, and unpacking costs a shift and a
mask a vector. The narrow plane comes first, with the lowest bits: all codes need it at once, so it
is read first, and the processor foresees streams that ascend. Codes are unsigned bytes with an
`offset`: value = code - offset, or a `table` of such bytes. The dot product of a block is
`sum(code * q) - offset * sum(q)`, and `sum(q)` comes with the activation (see `a8`).

To add a format: its class in `gguf`, a function in `unpack`, a scheme in `scales` (most likely one
that is there), a line in `FORMATS`, and its name in `graph.ir.types.BLOCK_FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ignis.gguf.blocks import BLOCKS
from ignis.gguf.codebooks import FP4_VALUES, IQ4_VALUES
from ignis.kernels import scales, unpack, unpack_grids
from ignis.kernels.lang import Builder, Value, i8, i32
from ignis.kernels.rows import (
    ROWS,
    Index,
    PanelRows,
    Rows,
    repeat,
    shift_bytes,
    sum_quarters,
    transpose_dwords,
)  # fmt: skip
from ignis.kernels.scales import FileHeader, PanelHeader, ScaledCodes, Scheme
from ignis.kernels.scales_grids import SCHEMES

BLOCK = 32  # values of a block along k
VECTORS = 8  # of 64 bytes, that hold a block of 16 rows as bytes

_PLANES = {8: (8,), 6: (2, 4), 5: (1, 4), 4: (4,), 3: (1, 2), 2: (2,)}


@dataclass(frozen=True, slots=True)
class PanelFormat:
    """One integer weight format: its group in the file, and its panel."""

    name: str
    bits: int  # of a code
    offset: int  # subtracted from the unsigned byte
    unpack: Callable[[Rows, Index], unpack.Halves]
    scheme: Scheme
    table: tuple[int, ...] | None = None  # the byte of each code; None: the code itself
    scaled: ScaledCodes | None = None
    looks_up: bool = False  # codes are points in memory: unpacking is long, and never unrolled

    @property
    def u_max(self) -> int:
        """The largest unsigned byte that a dot product can see."""
        return (1 << self.bits) - 1 if self.table is None else max(self.table)

    @property
    def group_blocks(self) -> int:
        """Blocks of 32 values that share a header."""
        return BLOCKS[self.name].block_size // BLOCK

    @property
    def group_nbytes(self) -> int:
        """One group of one row in the file."""
        return BLOCKS[self.name].nbytes

    @property
    def header_nbytes(self) -> int:
        return PanelHeader.nbytes(self.scheme.fields)

    @property
    def quants_nbytes(self) -> int:
        """The planes of one block of 16 rows."""
        return BLOCK * ROWS * self.bits // 8

    @property
    def panel_group_nbytes(self) -> int:
        return self.header_nbytes + self.group_blocks * self.quants_nbytes

    def n_groups(self, n_values: Value) -> Value:
        return n_values // (BLOCK * self.group_blocks)

    def panel_nbytes(self, n_values: int) -> int:
        return n_values // (BLOCK * self.group_blocks) * self.panel_group_nbytes

    def blocks(self, k: Builder) -> Iterable[Index]:
        """The numbers of a group's blocks: a loop of the kernel where unpacking allows it."""
        loops = self.group_blocks > 1 and self.unpack is not unpack.tq1_0
        return k.range(self.group_blocks) if loops else range(self.group_blocks)

    def bytes(self, codes: Value) -> Value:
        """The unsigned bytes that the codes stand for."""
        return codes if self.table is None else codes.k.lookup(self.table, codes)


_IQ4_TABLE = tuple(value + 128 for value in IQ4_VALUES)
_FP4_TABLE = tuple(value + 16 for value in FP4_VALUES)


def _grid_format(name: str, bits: int, offset: int) -> PanelFormat:
    return PanelFormat(name, bits, offset, getattr(unpack_grids, name), SCHEMES[name],
                       unpack_grids.TABLES[name], looks_up=True)  # fmt: skip


FORMATS = {
    f.name: f
    for f in (
        PanelFormat("q8_0", 8, 128, unpack.q8_0, scales.Single(0)),
        PanelFormat("q4_0", 4, 8, unpack.q4_0, scales.Single(0)),
        PanelFormat("q4_1", 4, 0, unpack.q4_1, scales.Single(0, 2)),
        PanelFormat("q5_0", 5, 16, unpack.q5_0, scales.Single(0)),
        PanelFormat("q5_1", 5, 0, unpack.q5_1, scales.Single(0, 2)),
        PanelFormat("q2_k", 2, 0, unpack.q2_k, scales.Nibbles4(), scaled=ScaledCodes(0, 3 * 15)),
        PanelFormat("q3_k", 3, 4, unpack.q3_k, scales.Split6(), scaled=ScaledCodes(128, 252, -1)),
        PanelFormat("q4_k", 4, 0, unpack.q4_k, scales.Pairs6()),
        PanelFormat("q5_k", 5, 0, unpack.q5_k, scales.Pairs6()),
        PanelFormat("q6_k", 6, 32, unpack.q6_k, scales.Bytes8()),
        PanelFormat("iq4_nl", 4, 128, unpack.iq4_nl, scales.Single(0), _IQ4_TABLE),
        PanelFormat("iq4_xs", 4, 128, unpack.iq4_xs, scales.Nibbles6(), _IQ4_TABLE),
        PanelFormat("mxfp4", 4, 16, unpack.mxfp4, scales.Power(), _FP4_TABLE),
        PanelFormat("tq1_0", 2, 1, unpack.tq1_0, scales.Single(52)),
        PanelFormat("tq2_0", 2, 1, unpack.tq2_0, scales.Single(64)),
        _grid_format("iq1_s", 3, 16),
        _grid_format("iq1_m", 3, 16),
        _grid_format("iq2_xxs", 3, 64),
        _grid_format("iq2_xs", 3, 64),
        _grid_format("iq2_s", 3, 64),
        _grid_format("iq3_xxs", 4, 64),
        _grid_format("iq3_s", 4, 16),
    )
}


def pack_group(k: Builder, fmt: PanelFormat, rows: PanelRows, out: Value) -> None:
    """Copy one group of 16 rows into a panel group at `out`."""
    FileHeader(fmt.scheme.fields, rows).store(out)
    for b in fmt.blocks(k):
        place = out.at(fmt.header_nbytes + b * fmt.quants_nbytes)
        codes = [fmt.unpack(quad, b) for quad in rows.quads]
        for i, vector in enumerate(_planes(k, fmt.bits, codes)):
            place.at(i * vector.type.nbytes).store(vector)


def _planes(k: Builder, bits: int, quads: Sequence[unpack.Halves]) -> list[Value]:
    """The planes of a block: codes of four quads -> vectors with lanes = rows."""
    if bits == 8:
        return [v for half in (0, 1) for v in transpose_dwords(k, [quad[half] for quad in quads])]
    vectors, position = [], 0
    for width in _PLANES[bits]:
        mask = (1 << width) - 1
        fields = [[shift_bytes(v, position) & mask for v in quad] for quad in quads]
        joined = [low | shift_bytes(high, -4) for low, high in fields]
        if width <= 2:
            joined = [v | shift_bytes(_rotate(k, v, 8), -2) for v in joined]
        if width == 1:
            joined = [v | shift_bytes(_rotate(k, v, 4), -1) for v in joined]
        vectors += transpose_dwords(k, joined)[:width]
        position += width
    return vectors


def _rotate(k: Builder, v: Value, n_bytes: int) -> Value:
    """Byte i of every 128-bit lane becomes byte i + n_bytes of it."""
    return k.shuffle(v, v, [i // 16 * 16 + (i + n_bytes) % 16 for i in range(v.type.lanes)])


def unpack_block(k: Builder, fmt: PanelFormat, quants: Value) -> list[Value]:
    """The eight vectors of unsigned bytes of a panel's block; vector j holds k = 4j..4j+3."""
    if fmt.bits == 8:
        return [quants.at(64 * i).load(i8.x(64)) for i in range(VECTORS)]
    codes: list[Value | None] = [None] * VECTORS
    place = position = 0
    for width in _PLANES[fmt.bits]:
        plane = [quants.at(place + 64 * i).load(i8.x(64)) for i in range(width)]
        mask = ((1 << width) - 1) << position
        for i, code in enumerate(codes):
            field = shift_bytes(plane[i % width], width * (i // width) - position) & mask
            codes[i] = field if code is None else code | field
        place, position = place + 64 * width, position + width
    return [fmt.bytes(code) for code in codes if code is not None]


class PanelProducts(NamedTuple):
    """Dot products of a panel's block, unpacked, with the 32 bytes at `x`."""

    k: Builder
    u_max: int | None  # of the bytes in `vectors`; None: they are signed
    vectors: Sequence[Value]
    x: Value

    def whole(self, start: Value) -> Value:
        return self._sum(start, 0, VECTORS)

    def halves(self) -> tuple[Value, Value]:
        zero = self.k.const(i32.x(self.vectors[0].type.lanes // 4), 0)
        return self._sum(zero, 0, VECTORS // 2), self._sum(zero, VECTORS // 2, VECTORS)

    def _sum(self, start: Value, first: int, last: int) -> Value:
        lanes = start.type.lanes
        x = [self.x.at(4 * j).load(i32).splat(lanes).bits(i8.x(4 * lanes))
             for j in range(first, last)]  # fmt: skip
        return self.k.dot4_sum(start, self.vectors[first:last], x, self.u_max)


class ReadyProducts(NamedTuple):
    """Dot products that are there: one sum of a block, with its start, or one of each half."""

    sums: Sequence[Value]

    def whole(self, start: Value) -> Value:
        (total,) = self.sums
        return total

    def halves(self) -> tuple[Value, Value]:
        first, last = self.sums
        return first, last


class RowProducts(NamedTuple):
    """Dot products of block `b` of 16 rows as they lie in the file with the 32 bytes at `x`."""

    k: Builder
    fmt: PanelFormat
    rows: PanelRows
    b: Index
    x: Value

    def whole(self, start: Value) -> Value:
        zero, x = self.k.const(i32.x(ROWS), 0), self._x()
        sums = [self._dot(self._dot(zero, low, x[0]), high, x[1]) for low, high in self._codes()]
        return start + sum_quarters(self.k, sums)

    def halves(self) -> tuple[Value, Value]:
        zero, x, codes = self.k.const(i32.x(ROWS), 0), self._x(), self._codes()
        first, last = (
            sum_quarters(self.k, [self._dot(zero, quad[half], x[half]) for quad in codes])
            for half in range(2)
        )
        return first, last

    def _codes(self) -> list[unpack.Halves]:
        return [self.fmt.unpack(quad, self.b) for quad in self.rows.quads]

    def _x(self) -> list[Value]:
        return [repeat(self.k, self.x.at(16 * half).load(i8.x(16)), 4) for half in range(2)]

    def _dot(self, acc: Value, codes: Value, x: Value) -> Value:
        return self.k.dot4(acc, self.fmt.bytes(codes), x, self.fmt.u_max)
