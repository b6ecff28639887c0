"""Matmul of block-quantized weights with A8 activations; generic over `panels.FORMATS`.

The order of float operations is that of NUMERICS 2: one accumulator an output, blocks ascending,
`acc = fma(f32(isum), dw * dx, acc)`, then the minimum's term. The integer sums are exact, so all
kernels here give the same bits, whichever way they walk the weights:

    matmul_rows    one token, rows as they lie in the file
    matmul_mapped  many tokens: packs one panel at a time into scratch, then as matmul_packed
    matmul_packed  panels packed beforehand, any number of tokens
    pack_panels    rows -> panels

A unit of work is a panel of 16 rows. `bias` and `residual` may be null; they are added to the
finished sum in that order. `residual` may be `y` itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ignis.kernels import a8, panels
from ignis.kernels.lang import Builder, Value, Variable, f32, i32, i64, kernel, ptr
from ignis.kernels.panels import FORMATS, PanelFormat, PanelProducts, RowProducts
from ignis.kernels.rows import ROWS, PanelRows
from ignis.kernels.scales import FileHeader, Index, PanelHeader

LANES = f32.x(ROWS)
_LINE, _PAGE = 64, 4096  # bytes of a cache line and of a page


@kernel(weight=ptr, x=ptr, y=ptr, bias=ptr, residual=ptr, n_rows=i64, n_values=i64)
def matmul_rows(
    k: Builder, *, weight: Value, x: Value, y: Value, bias: Value, residual: Value,
    n_rows: Value, n_values: Value, begin: Value, end: Value, scratch: Value, format: str,
) -> None:  # fmt: skip
    """y[n] = sum of weight[n] * x, for one token."""
    fmt = FORMATS[format]
    n_groups = fmt.n_groups(n_values)
    for panel in k.range(begin, end):
        rows = _rows(k, fmt, weight, panel, n_rows, n_groups)
        acc = k.var(k.const(LANES, 0.0))
        ahead = _next_panel(fmt, weight, panel, n_groups)
        for g in k.range(n_groups):
            here = rows.at(g * fmt.group_nbytes)
            header = FileHeader(fmt.scheme.fields, here)
            for b in range(fmt.group_blocks):
                _prefetch(k, fmt, ahead, g, b)
                block = x.at((g * fmt.group_blocks + b) * a8.BLOCK_NBYTES)
                terms = fmt.scheme.terms(k, header, b, fmt.offset)
                products = RowProducts(k, fmt, here, b, block)
                acc.set(terms.add(k, acc.get(), products, block))
        _finish(k, [acc], panel, k.const(i64, 0), y, bias, residual, n_rows, scratch)


@kernel(
    weight=ptr, x=ptr, y=ptr, bias=ptr, residual=ptr, n_rows=i64, n_values=i64, tiles=ptr,
    n_tiles=i64,
)  # fmt: skip
def matmul_mapped(
    k: Builder, *, weight: Value, n_rows: Value, n_values: Value, scratch: Value, begin: Value,
    end: Value, format: str, **rest: Any,
) -> None:  # fmt: skip
    """y[t, n] for every token of every tile; scratch holds one panel and 64 bytes."""
    fmt = FORMATS[format]
    for panel in k.range(begin, end):
        n_groups = fmt.n_groups(n_values)
        rows = _rows(k, fmt, weight, panel, n_rows, n_groups)
        packed = scratch.at(64)
        _pack(k, fmt, rows, _next_panel(fmt, weight, panel, n_groups), packed, n_groups)
        _all_tiles(k, fmt, packed, panel, n_rows, n_values, scratch, **rest)


@kernel(
    weight=ptr, x=ptr, y=ptr, bias=ptr, residual=ptr, n_rows=i64, n_values=i64, tiles=ptr,
    n_tiles=i64,
)  # fmt: skip
def matmul_packed(
    k: Builder, *, weight: Value, n_rows: Value, n_values: Value, scratch: Value, begin: Value,
    end: Value, format: str, **rest: Any,
) -> None:  # fmt: skip
    """The same on panels packed beforehand."""
    fmt = FORMATS[format]
    panel_nbytes = fmt.n_groups(n_values) * fmt.panel_group_nbytes
    for panel in k.range(begin, end):
        packed = weight.at(panel * panel_nbytes)
        _all_tiles(k, fmt, packed, panel, n_rows, n_values, scratch, **rest)


@kernel(weight=ptr, y=ptr, n_rows=i64, n_values=i64)
def pack_panels(
    k: Builder, *, weight: Value, y: Value, n_rows: Value, n_values: Value, begin: Value,
    end: Value, scratch: Value, format: str,
) -> None:  # fmt: skip
    """Rows of the file -> panels; rows past the last repeat it."""
    fmt = FORMATS[format]
    n_groups = fmt.n_groups(n_values)
    for panel in k.range(begin, end):
        rows = _rows(k, fmt, weight, panel, n_rows, n_groups)
        out = y.at(panel * (n_groups * fmt.panel_group_nbytes))
        _pack(k, fmt, rows, _next_panel(fmt, weight, panel, n_groups), out, n_groups)


def scratch_nbytes(format: str, n_values: int) -> int:
    """Scratch of `matmul_mapped`, enough for the other kernels too."""
    return 64 + FORMATS[format].panel_nbytes(n_values)


def _rows(
    k: Builder, fmt: PanelFormat, weight: Value, panel: Value, n_rows: Value, n_groups: Value
) -> PanelRows:
    """The 16 rows of a panel; past the last row, that row again."""
    row_nbytes = n_groups * fmt.group_nbytes
    last = n_rows - 1
    return PanelRows(
        k, [weight.at(k.minimum(panel * ROWS + row, last) * row_nbytes) for row in range(ROWS)]
    )


def _next_panel(fmt: PanelFormat, weight: Value, panel: Value, n_groups: Value) -> Value:
    """Where the next panel's rows start, and a page on: its first bytes are needed at once."""
    return weight.at((panel + 1) * (n_groups * (ROWS * fmt.group_nbytes)) + _PAGE)


def _prefetch(k: Builder, fmt: PanelFormat, ahead: Value, g: Value, b: int) -> None:
    """While block b of group g is read, ask for as many bytes of the next panel.

    Sixteen short rows side by side are too many streams for the processor to foresee, but the
    next panel lies in one piece. It does not fit the first cache beside the rows being read.
    """
    nbytes = ROWS * fmt.group_nbytes
    here = ahead.at(g * nbytes)
    for line in range(-(-nbytes * b // (_LINE * fmt.group_blocks)),
                      -(-nbytes * (b + 1) // (_LINE * fmt.group_blocks))):  # fmt: skip
        k.prefetch(here.at(line * _LINE), level=2)


def _pack(
    k: Builder, fmt: PanelFormat, rows: PanelRows, ahead: Value, out: Value, n_groups: Value
) -> None:
    for g in k.range(n_groups):
        for b in range(fmt.group_blocks):
            _prefetch(k, fmt, ahead, g, b)
        here = rows.at(g * fmt.group_nbytes)
        panels.pack_group(k, fmt, here, out.at(g * fmt.panel_group_nbytes))


def _all_tiles(
    k: Builder, fmt: PanelFormat, packed: Value, panel: Value, n_rows: Value, n_values: Value,
    scratch: Value, *, x: Value, y: Value, bias: Value, residual: Value, tiles: Value,
    n_tiles: Value,
) -> None:  # fmt: skip
    """One panel times every tile; each width has its own unrolled body."""
    n_blocks = n_values // 32
    for tile in k.range(n_tiles):
        entry = tiles.at(tile * 8)
        first, width = entry.load(i32).to(i64), entry.at(4).load(i32).to(i64)
        x_tile = x.at(first * n_blocks * a8.BLOCK_NBYTES)
        for w in a8.TILE_WIDTHS:
            for _ in k.when(width == w):
                sums = _tile(k, fmt, packed, x_tile, n_blocks, w)
                _finish(k, sums, panel, first, y, bias, residual, n_rows, scratch)


def _tile(
    k: Builder, fmt: PanelFormat, packed: Value, x: Value, n_blocks: Value, width: int
) -> list[Variable]:
    """The sums of 16 rows by `width` tokens."""
    sums = [k.var(k.const(LANES, 0.0)) for _ in range(width)]
    for g in k.range(n_blocks // fmt.group_blocks):
        group = packed.at(g * fmt.panel_group_nbytes)
        header = PanelHeader(fmt.scheme.fields, group)
        for b in _group_blocks(k, fmt):
            quants = group.at(fmt.header_nbytes + b * fmt.quants_nbytes)
            vectors = panels.unpack_block(k, fmt, quants)
            terms = fmt.scheme.terms(k, header, b, fmt.offset)
            blocks = x.at((g * fmt.group_blocks + b) * (width * a8.BLOCK_NBYTES))
            for t, total in enumerate(sums):
                block = blocks.at(t * a8.BLOCK_NBYTES)
                products = PanelProducts(k, fmt, vectors, block)
                total.set(terms.add(k, total.get(), products, block))
    return sums


def _group_blocks(k: Builder, fmt: PanelFormat) -> Iterable[Index]:
    """The numbers of a group's blocks: a loop where there are several."""
    return k.range(fmt.group_blocks) if fmt.group_blocks > 1 else (0,)


def _finish(
    k: Builder, sums: Sequence[Variable], panel: Value, first: Value, y: Value, bias: Value,
    residual: Value, n_rows: Value, scratch: Value,
) -> None:  # fmt: skip
    """Add bias and residual and store 16 outputs of each token, fewer in the last panel."""
    row = panel * ROWS
    for _ in k.when(row + ROWS <= n_rows):
        _epilogue(k, sums, LANES, row, first, y, bias, residual, n_rows)
    for _ in k.when(row + ROWS > n_rows):
        for t, total in enumerate(sums):
            scratch.store(total.get())
            for i in k.range(n_rows - row):
                lane = k.var(scratch.at(i * 4).load(f32))
                _epilogue(k, [lane], f32, row + i, first + t, y, bias, residual, n_rows)


def _epilogue(
    k: Builder, sums: Sequence[Variable], lanes: Any, row: Value, first: Value, y: Value,
    bias: Value, residual: Value, n_rows: Value,
) -> None:  # fmt: skip
    at = row * 4
    for _ in k.when(k.not_null(bias)):
        b = bias.at(at).load(lanes)
        for total in sums:
            total.set(total.get() + b)
    out = first * n_rows * 4 + at
    for _ in k.when(k.not_null(residual)):
        for t, total in enumerate(sums):
            total.set(total.get() + residual.at(out + n_rows * (4 * t)).load(lanes))
    for t, total in enumerate(sums):
        y.at(out + n_rows * (4 * t)).store(total.get())

