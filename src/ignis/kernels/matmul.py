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

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from ignis.kernels import a8, panels
from ignis.kernels.lang import SMALL_BYTE, Builder, TiledDot4, Value, f32, i64, kernel, ptr
from ignis.kernels.panels import (
    FORMATS,
    VECTORS,
    PanelFormat,
    PanelProducts,
    ReadyProducts,
    RowProducts,
)  # fmt: skip
from ignis.kernels.rows import ROWS, Index, PanelRows
from ignis.kernels.scales import FileHeader, Halves, Header, PanelHeader, Terms, Whole

LANES = f32.x(ROWS)
PASS_TOKENS = 128  # whose block of values and sums of a panel stay in the first cache
SUMS_NBYTES = PASS_TOKENS * LANES.nbytes  # scratch for the sums of a panel
_LINE, _PAGE = 64, 4096  # bytes of a cache line and of a page
_UNROLL = 4  # tokens a round of the innermost loop


@kernel(weight=ptr, x=ptr, y=ptr, bias=ptr, residual=ptr, n_rows=i64, n_values=i64)
def matmul_rows(
    k: Builder, *, weight: Value, x: Value, y: Value, bias: Value, residual: Value,
    n_rows: Value, n_values: Value, begin: Value, end: Value, scratch: Value, format: str,
) -> None:  # fmt: skip
    """y[n] = sum of weight[n] * x, for one token."""
    fmt = FORMATS[format]
    for panel in k.range(begin, end):
        one = Tokens.one(k)
        row_sums(k, fmt, weight, panel, n_rows, n_values, x, one.n, scratch)
        _finish(k, scratch, panel, one, y, bias, residual, n_rows)


@kernel(
    weight=ptr, x=ptr, y=ptr, bias=ptr, residual=ptr, n_rows=i64, n_values=i64, n_tokens=i64,
)  # fmt: skip
def matmul_mapped(
    k: Builder, *, weight: Value, n_rows: Value, n_values: Value, n_tokens: Value, scratch: Value,
    begin: Value, end: Value, format: str, **rest: Any,
) -> None:  # fmt: skip
    """y[t, n] for all tokens; scratch holds a panel's sums and the panel."""
    fmt = FORMATS[format]
    for panel in k.range(begin, end):
        packed = scratch.at(SUMS_NBYTES)
        pack_panel(k, fmt, weight, panel, n_rows, n_values, packed)
        for tokens in passes(k, n_tokens):
            _panel(k, fmt, packed, panel, n_rows, n_values, scratch, tokens, n_tokens, **rest)


@kernel(
    weight=ptr, x=ptr, y=ptr, bias=ptr, residual=ptr, n_rows=i64, n_values=i64, n_tokens=i64,
)  # fmt: skip
def matmul_packed(
    k: Builder, *, weight: Value, n_rows: Value, n_values: Value, n_tokens: Value, scratch: Value,
    begin: Value, end: Value, format: str, **rest: Any,
) -> None:  # fmt: skip
    """The same on panels packed beforehand, which all pass before the next tokens come."""
    fmt = FORMATS[format]
    for tokens in passes(k, n_tokens):
        for panel in k.range(begin, end):
            packed = weight.at(panel * panel_nbytes(fmt, n_values))
            _panel(k, fmt, packed, panel, n_rows, n_values, scratch, tokens, n_tokens, **rest)


@kernel(weight=ptr, y=ptr, n_rows=i64, n_values=i64)
def pack_panels(
    k: Builder, *, weight: Value, y: Value, n_rows: Value, n_values: Value, begin: Value,
    end: Value, scratch: Value, format: str,
) -> None:  # fmt: skip
    """Rows of the file -> panels; rows past the last repeat it."""
    fmt = FORMATS[format]
    for panel in k.range(begin, end):
        out = y.at(panel * panel_nbytes(fmt, n_values))
        pack_panel(k, fmt, weight, panel, n_rows, n_values, out)


def scratch_nbytes(format: str, n_values: int) -> int:
    """Scratch of `matmul_mapped`; the other kernels take `SUMS_NBYTES`."""
    return SUMS_NBYTES + FORMATS[format].panel_nbytes(n_values)


def panel_nbytes(fmt: PanelFormat, n_values: Value) -> Value:
    """The size of a panel of rows of `n_values`."""
    return fmt.n_groups(n_values) * fmt.panel_group_nbytes


def row_sums(
    k: Builder, fmt: PanelFormat, weight: Value, panel: Value, n_rows: Value, n_values: Value,
    x: Value, n_tokens: Value, sums: Value,
) -> None:  # fmt: skip
    """The sums of 16 rows as they lie by the token at `x`, one of `n_tokens`; f32 [16] at `sums`.

    Until then scales that a loop needs by number wait there.
    """
    n_groups = fmt.n_groups(n_values)
    rows = _rows(k, fmt, weight, panel, n_rows, n_groups)
    acc = k.var(k.const(LANES, 0.0))
    ahead = _next_panel(fmt, weight, panel, n_groups)
    for g in k.range(n_groups):
        here = rows.at(g * fmt.group_nbytes)
        file_header = FileHeader(fmt.scheme.fields, here)
        header: Header = file_header.store(sums) if fmt.looks_up else file_header
        for b in k.range(fmt.group_blocks) if fmt.looks_up else range(fmt.group_blocks):
            _prefetch(k, fmt, ahead, g, b)
            block = x.at((g * fmt.group_blocks + b) * (n_tokens * a8.BLOCK_NBYTES))
            terms = fmt.scheme.terms(k, header, b, fmt.offset)
            products = RowProducts(k, fmt, here, b, block)
            acc.set(terms.add(k, acc.get(), products, block))
    sums.store(acc.get())


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


def _prefetch(k: Builder, fmt: PanelFormat, ahead: Value, g: Value, b: Index) -> None:
    """While block b of group g is read, ask for as many bytes of the next panel.

    Sixteen short rows side by side are too many streams for the processor to foresee, but the
    next panel lies in one piece. It does not fit the first cache beside the rows being read.
    """
    nbytes = ROWS * fmt.group_nbytes
    here, n_blocks = ahead.at(g * nbytes), fmt.group_blocks
    if isinstance(b, Value):
        per_block = -(-nbytes // (_LINE * n_blocks))
        lines: Iterable[Index] = [b * per_block + i for i in range(per_block)]
    else:
        first, last = (-(-nbytes * i // (_LINE * n_blocks)) for i in (b, b + 1))
        lines = range(first, last)
    for line in lines:
        k.prefetch(here.at(line * _LINE), level=2)


def pack_panel(
    k: Builder, fmt: PanelFormat, weight: Value, panel: Value, n_rows: Value, n_values: Value,
    out: Value,
) -> None:  # fmt: skip
    """16 rows as they lie -> a panel at `out`; rows past the last repeat it."""
    n_groups = fmt.n_groups(n_values)
    rows = _rows(k, fmt, weight, panel, n_rows, n_groups)
    ahead = _next_panel(fmt, weight, panel, n_groups)
    for g in k.range(n_groups):
        for b in range(fmt.group_blocks):
            _prefetch(k, fmt, ahead, g, b)
        here = rows.at(g * fmt.group_nbytes)
        panels.pack_group(k, fmt, here, out.at(g * fmt.panel_group_nbytes))


class Tokens(NamedTuple):
    """Some neighbours among the tokens of a matmul: n of them from `first` on."""

    first: Value
    n: Value

    @classmethod
    def one(cls, k: Builder) -> Tokens:
        """The first alone."""
        return cls(k.const(i64, 0), k.const(i64, 1))


def passes(k: Builder, n_tokens: Value) -> Iterator[Tokens]:
    """All tokens, as many at a time as `SUMS_NBYTES` has room for."""
    for first in k.range(0, n_tokens, PASS_TOKENS):
        yield Tokens(first, k.minimum(n_tokens - first, PASS_TOKENS))


def _panel(
    k: Builder, fmt: PanelFormat, packed: Value, panel: Value, n_rows: Value, n_values: Value,
    scratch: Value, tokens: Tokens, n_tokens: Value, *, x: Value, y: Value, bias: Value,
    residual: Value,
) -> None:  # fmt: skip
    """One panel times the tokens of a pass."""
    for _ in k.when(tokens.n > _UNROLL):
        # Outputs lie a row of y apart: ask for their lines now, they are written after the sums.
        for t in k.range(tokens.n):
            k.prefetch(y.at(_output(tokens, t, panel * ROWS, n_rows)), level=2)
    panel_sums(
        k, fmt, packed, x, n_values, n_tokens, scratch, tokens, lambda t: t * a8.BLOCK_NBYTES
    )
    _finish(k, scratch, panel, tokens, y, bias, residual, n_rows)


def panel_sums(
    k: Builder, fmt: PanelFormat, packed: Value, x: Value, n_values: Value, n_tokens: Value,
    sums: Value, tokens: Tokens, place: Callable[[Value], Value],
) -> None:  # fmt: skip
    """The sums of 16 rows by the tokens of a pass, f32 [n][16] at `sums`.

    The blocks of x lie by `n_tokens`, those of token t `place(t)` bytes behind the first's.
    """
    n_groups = fmt.n_groups(n_values)
    for _ in k.when(tokens.n == 1):
        total, first = k.var(k.const(LANES, 0.0)), place(tokens.first)
        for weights, block in _blocks(k, fmt, packed, x, n_groups, n_tokens):
            total.set(weights.signed(k).add(k, total.get(), block.at(first)))
        sums.store(total.get())
    for _ in k.when(tokens.n > 1):
        _sums(k, fmt, packed, x, n_groups, n_tokens, sums, tokens, place)


def _sums(
    k: Builder, fmt: PanelFormat, packed: Value, x: Value, n_groups: Value, n_tokens: Value,
    sums: Value, tokens: Tokens, place: Callable[[Value], Value],
) -> None:  # fmt: skip
    """`panel_sums` of several tokens.

    A block of weights is unpacked into registers once, as many rows as a vector has lanes, and
    meets every token, whose sums wait in the first cache: loads and stores have ports of their
    own, so they cost nothing beside the products, and any number of tokens runs at the same speed.
    Where a tile of tokens is faster side by side, all rows of a block meet it.
    """
    for t in k.range(tokens.n):
        sums.at(t * LANES.nbytes).store(k.const(LANES, 0.0))
    for block_weights, blocks in _blocks(k, fmt, packed, x, n_groups, n_tokens):
        for first, weights in block_weights.for_many(k).parts(k):

            def add(
                ts: Sequence[Value], first: int = first, weights: _BlockWeights = weights,
                blocks: Value = blocks,
            ) -> None:  # fmt: skip
                totals = [sums.at(t * LANES.nbytes + first * f32.nbytes) for t in ts]
                accs = [total.load(f32.x(weights.n_rows)) for total in totals]
                xs = [blocks.at(place(tokens.first + t)) for t in ts]
                after = weights.add_tile(k, accs, xs)
                for total, result in zip(totals, after, strict=True):
                    total.store(result)

            whole = tokens.n // _UNROLL * _UNROLL
            for t in k.range(0, whole, _UNROLL):
                for i in range(0, _UNROLL, weights.tile):
                    add([t + j for j in range(i, i + weights.tile)])
            for t in k.range(whole, tokens.n):
                add([t])


@dataclass(frozen=True, slots=True)
class _BlockWeights:
    """One block of a panel, or of some of its rows, in registers."""

    fmt: PanelFormat
    vectors: Sequence[Value]
    terms: Terms
    u_max: int | None  # of the bytes in `vectors`; None: they are signed
    tiled: TiledDot4 | None = None  # the vectors, where tokens are faster side by side

    @property
    def tile(self) -> int:
        """How many tokens they should meet at a time."""
        return 1 if self.tiled is None else self.tiled.tile

    @property
    def n_rows(self) -> int:
        return self.vectors[0].type.lanes // 4

    def add(self, k: Builder, acc: Value, block: Value) -> Value:
        """`acc` and the block's products with one token's block of A8."""
        return self.terms.add(k, acc, PanelProducts(k, self.u_max, self.vectors, block), block)

    def add_tile(
        self, k: Builder, accs: Sequence[Value], blocks: Sequence[Value]
    ) -> list[Value]:
        """`add` of several tokens."""
        if self.tiled is None:
            return [self.add(k, *one) for one in zip(accs, blocks, strict=True)]
        # The integers of all tokens side by side, then the rest one by one.
        middle = [VECTORS // 2] if isinstance(self.terms, Halves) else []
        starts = [self.terms.start(k, block, self.n_rows) for block in blocks]
        spans = pairwise([0, *middle, VECTORS])
        sums = zip(*[self.tiled.sums(starts, blocks, *span) for span in spans], strict=True)
        return [
            self.terms.add(k, acc, ReadyProducts(of_token), block)
            for acc, of_token, block in zip(accs, sums, blocks, strict=True)
        ]

    def signed(self, k: Builder) -> _BlockWeights:
        """The same sums from signed bytes, where large unsigned ones cost more."""
        if k.wide_dot4 or self.u_max is None or self.u_max <= SMALL_BYTE:
            return self
        assert isinstance(self.terms, Whole) and self.terms.offset == 128
        vectors = [v ^ -128 for v in self.vectors]  # subtracts 128
        return _BlockWeights(self.fmt, vectors, replace(self.terms, offset=0), None)

    def for_many(self, k: Builder) -> _BlockWeights:
        """The same sums from weights that take longer to unpack, where that saves products."""
        to = self.fmt.scaled
        if to is None or not (to.u_max <= SMALL_BYTE or k.wide_dot4):
            weights = self.around_128() if k.wide_dot4 else self
            assert weights.u_max is not None
            tiled = k.tile_dot4(weights.vectors, weights.u_max)
            return self.signed(k) if tiled is None else replace(weights, tiled=tiled)
        assert isinstance(self.terms, Halves)
        vectors, terms = self.terms.scale_codes(k, self.vectors, to)
        tiled = k.tile_dot4(vectors, to.u_max) if k.wide_dot4 else None
        return _BlockWeights(self.fmt, vectors, terms, to.u_max, tiled)

    def around_128(self) -> _BlockWeights:
        """The same sums from larger bytes: what those start from is in A8 without a shift."""
        if not isinstance(self.terms, Whole) or self.terms.offset in (0, 128):
            return self
        assert self.u_max is not None
        more = 128 - self.terms.offset
        terms = replace(self.terms, offset=128)
        return _BlockWeights(self.fmt, [v + more for v in self.vectors], terms, self.u_max + more)

    def parts(self, k: Builder) -> Iterator[tuple[int, _BlockWeights]]:
        """As many rows at a time as a vector has lanes, and the number of the first."""
        if self.tiled is not None:
            yield 0, self
            return
        n_rows = min(k.vector_lanes, self.n_rows)
        for first in range(0, self.n_rows, n_rows):
            yield first, _of_rows(self, first, n_rows)


def _of_rows(whole: Any, first: int, n_rows: int) -> Any:
    """`whole` with rows `first` and behind alone, in every vector that it holds."""
    if isinstance(whole, Value):
        per_row = whole.type.lanes // ROWS
        indices = range(first * per_row, (first + n_rows) * per_row)
        return whole if n_rows == ROWS else whole.k.shuffle(whole, whole, indices)
    if isinstance(whole, (list, tuple)):
        return type(whole)(_of_rows(item, first, n_rows) for item in whole)
    if is_dataclass(whole) and not isinstance(whole, (type, PanelFormat)):
        names = [field.name for field in fields(whole)]
        return replace(whole, **{n: _of_rows(getattr(whole, n), first, n_rows) for n in names})
    return whole


def _blocks(
    k: Builder, fmt: PanelFormat, packed: Value, x: Value, n_groups: Value, n_tokens: Value
) -> Iterator[tuple[_BlockWeights, Value]]:
    """The blocks of a panel in order, each with the A8 blocks of all tokens that it meets."""
    for g in k.range(n_groups):
        group = packed.at(g * fmt.panel_group_nbytes)
        header = PanelHeader(fmt.scheme.fields, group)
        for b in _group_blocks(k, fmt):
            quants = group.at(fmt.header_nbytes + b * fmt.quants_nbytes)
            if k.stream_ahead:  # panels lie one behind the other
                for line in range(0, fmt.panel_group_nbytes // fmt.group_blocks, _LINE):
                    k.prefetch(quants.at(k.stream_ahead + line), level=2)
            vectors = panels.unpack_block(k, fmt, quants)
            terms = fmt.scheme.terms(k, header, b, fmt.offset)
            index = g * fmt.group_blocks + b
            weights = _BlockWeights(fmt, vectors, terms, fmt.u_max)
            yield weights, x.at(index * (n_tokens * a8.BLOCK_NBYTES))


def _group_blocks(k: Builder, fmt: PanelFormat) -> Iterable[Index]:
    """The numbers of a group's blocks: a loop where there are several."""
    return k.range(fmt.group_blocks) if fmt.group_blocks > 1 else (0,)


def _finish(
    k: Builder, sums: Value, panel: Value, tokens: Tokens, y: Value, bias: Value,
    residual: Value, n_rows: Value,
) -> None:  # fmt: skip
    """Add bias and residual and store 16 outputs of each token, fewer in the last panel."""
    row = panel * ROWS
    for t in k.range(tokens.n):
        here, out = sums.at(t * LANES.nbytes), _output(tokens, t, row, n_rows)
        for _ in k.when(row + ROWS <= n_rows):
            _epilogue(k, here.load(LANES), row, out, y, bias, residual)
        for _ in k.when(row + ROWS > n_rows):
            for i in k.range(n_rows - row):
                total = here.at(i * f32.nbytes).load(f32)
                _epilogue(k, total, row + i, out + i * f32.nbytes, y, bias, residual)


def _output(tokens: Tokens, t: Value, row: Value, n_rows: Value) -> Value:
    """Where y has the output of the t-th token and a row, in bytes."""
    return ((tokens.first + t) * n_rows + row) * f32.nbytes


def _epilogue(
    k: Builder, total: Value, row: Value, out: Value, y: Value, bias: Value, residual: Value
) -> None:
    """Finish one output or 16 neighbours; `out` is their place in y and residual, in bytes."""
    result = k.var(total)
    for _ in k.when(k.not_null(bias)):
        result.set(result.get() + bias.at(row * f32.nbytes).load(total.type))
    for _ in k.when(k.not_null(residual)):
        result.set(result.get() + residual.at(out).load(total.type))
    y.at(out).store(result.get())
