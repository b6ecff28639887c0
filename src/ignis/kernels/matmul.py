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

from collections.abc import Sequence
from typing import Any

from ignis.kernels import a8, panels
from ignis.kernels.lang import Builder, Value, Variable, f32, i32, i64, kernel, ptr
from ignis.kernels.panels import FORMATS, ROWS, PanelFormat

LANES = f32.x(ROWS)


@kernel(weight=ptr, x=ptr, y=ptr, bias=ptr, residual=ptr, n_rows=i64, n_values=i64)
def matmul_rows(
    k: Builder, *, weight: Value, x: Value, y: Value, bias: Value, residual: Value,
    n_rows: Value, n_values: Value, begin: Value, end: Value, scratch: Value, format: str,
) -> None:  # fmt: skip
    """y[n] = sum of weight[n] * x, for one token."""
    fmt = FORMATS[format]
    n_blocks = n_values // 32
    for panel in k.range(begin, end):
        rows = _row_pointers(k, fmt, weight, panel, n_rows, n_blocks)
        acc = k.var(k.const(LANES, 0.0))
        for b in k.range(n_blocks):
            block = x.at(b * a8.BLOCK_NBYTES)
            here = [row.at(b * fmt.block_nbytes) for row in rows]
            isum = panels.dot_rows(k, fmt, here, block) + a8.start(k, block, fmt.offset, ROWS)
            dw = panels.row_scales(k, here)
            total = k.fma(isum.to(f32), dw * a8.scale(k, block, ROWS), acc.get())
            if fmt.has_min:
                total = k.fma(panels.row_minimums(k, here), a8.scaled_sum(k, block, ROWS), total)
            acc.set(total)
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
        rows = _row_pointers(k, fmt, weight, panel, n_rows, n_values // 32)
        packed = scratch.at(64)
        _pack(k, fmt, rows, packed, n_values // 32)
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
    panel_nbytes = (n_values // 32) * fmt.panel_block_nbytes
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
    n_blocks = n_values // 32
    for panel in k.range(begin, end):
        rows = _row_pointers(k, fmt, weight, panel, n_rows, n_blocks)
        _pack(k, fmt, rows, y.at(panel * (n_blocks * fmt.panel_block_nbytes)), n_blocks)


def scratch_nbytes(format: str, n_values: int) -> int:
    """Scratch of `matmul_mapped`, enough for the other kernels too."""
    return 64 + FORMATS[format].panel_nbytes(n_values)


def _row_pointers(
    k: Builder, fmt: PanelFormat, weight: Value, panel: Value, n_rows: Value, n_blocks: Value
) -> list[Value]:
    row_nbytes = n_blocks * fmt.block_nbytes
    last = n_rows - 1
    return [
        weight.at(k.minimum(panel * ROWS + row, last) * row_nbytes) for row in range(ROWS)
    ]


def _pack(
    k: Builder, fmt: PanelFormat, rows: Sequence[Value], out: Value, n_blocks: Value
) -> None:
    for b in k.range(n_blocks):
        here = [row.at(b * fmt.block_nbytes) for row in rows]
        panels.pack_block(k, fmt, here, out.at(b * fmt.panel_block_nbytes))


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
    for b in k.range(n_blocks):
        panel = packed.at(b * fmt.panel_block_nbytes)
        weights = panels.unpack(k, fmt, panel)
        dw = panels.scales(k, panel)
        minimum = panels.minimums(k, panel) if fmt.has_min else None
        blocks = x.at(b * (width * a8.BLOCK_NBYTES))
        for t in range(width):
            block = blocks.at(t * a8.BLOCK_NBYTES)
            isum = a8.start(k, block, fmt.offset, ROWS)
            for j, w in enumerate(weights):
                q = block.at(4 * j).load(i32).splat(ROWS).bits(w.type)
                isum = k.dot4(isum, w, q, fmt.u_max)
            total = k.fma(isum.to(f32), dw * a8.scale(k, block, ROWS), sums[t].get())
            if minimum is not None:
                total = k.fma(minimum, a8.scaled_sum(k, block, ROWS), total)
            sums[t].set(total)
    return sums


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

