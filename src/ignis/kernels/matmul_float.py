"""Matmul of F32, F16 and BF16 weights with f32 activations, rows as they lie (NUMERICS 3).

Lanes are k modulo 16: an output has 16 accumulators, fma with k ascending, then the tree
(lane i with lane i + half). Register tiles of up to 4 rows by up to 6 tokens reuse every load.
Of many tokens `float_panels` takes most rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ignis.kernels import float_panels
from ignis.kernels.float_panels import for_panels
from ignis.kernels.floats import LANES, STORAGE, blocks, fold, load_tail, widen
from ignis.kernels.lang import Builder, Type, Value, Variable, f32, i32, i64, kernel, ptr

UNIT_ROWS = 32  # rows of a unit of work
_GROUP_ROWS = 64  # rows at most whose weights stay in L2 while the tokens pass
TILE_TOKENS = (6, 4, 2, 1)
BLOCK = 640  # values of a pass: those of its tokens stay in the first cache
_KEPT_NBYTES = TILE_TOKENS[0] * LANES.nbytes  # accumulators of a row
_SCRATCH_NBYTES = LANES.nbytes + _GROUP_ROWS * _KEPT_NBYTES
_AHEAD_NBYTES = 4096  # past the next tile's start, whose first bytes are needed at once
_AHEAD_TILES = 4  # where tiles take blocks of values: memory answers after about two of them


def scratch_nbytes(n_values: int) -> int:
    """Scratch of a matmul with rows of `n_values`."""
    return max(_SCRATCH_NBYTES, float_panels.scratch_nbytes(n_values))


@kernel(
    weight=ptr, x=ptr, y=ptr, bias=ptr, residual=ptr, n_rows=i64, n_values=i64, rows=ptr,
    n_tokens=i64, unit_rows=i64,
)  # fmt: skip
def matmul_float(
    k: Builder, *, weight: Value, x: Value, y: Value, bias: Value, residual: Value, n_rows: Value,
    n_values: Value, rows: Value, n_tokens: Value, unit_rows: Value, begin: Value, end: Value,
    scratch: Value, format: str,
) -> None:  # fmt: skip
    """y[t, n] = sum over k of x[rows[t], k] * weight[n, k], plus bias[n], plus residual[t, n].

    A unit of work is `unit_rows` rows (a multiple of 4). `rows` (i32) names the row of x of each
    token. `bias` and `residual` may be null; `residual` may be `y`.
    """

    def token(t: Value) -> Value:
        return x.at(rows.at(t * 4).load(i32).to(i64) * n_values * 4)

    def store(t: Value, row: Value, sums: Value) -> None:
        column = row * f32.nbytes
        here = t * n_rows * f32.nbytes + column
        cell = k.var(sums)
        for _ in k.when(k.not_null(bias)):
            cell.set(cell.get() + bias.at(column).load(sums.type))
        for _ in k.when(k.not_null(residual)):
            cell.set(cell.get() + residual.at(here).load(sums.type))
        y.at(here).store(cell.get())

    stop = k.minimum(end * unit_rows, n_rows)
    for_tiles(k, weight, (begin * unit_rows, stop), n_rows, n_values, format, scratch, n_tokens,
              token, store)  # fmt: skip


def for_tiles(
    k: Builder, weight: Value, span: tuple[Value, Value], n_rows: Value, n_values: Value,
    format: str, scratch: Value, n_tokens: Value, token: Callable[[Value], Value],
    store: Callable[[Value, Value, Value], None],
) -> None:  # fmt: skip
    """Walk the rows of `span` in register tiles of rows by tokens.

    `token(t)` is where the values of token t lie; `store(t, row, sums)` takes its sum of a row,
    or a vector of sums from `row` on.
    """
    begin = for_panels(k, weight, span, n_values, format, scratch, n_tokens, token, store)
    for first in k.range(begin, span[1], _GROUP_ROWS):
        rows = first, k.minimum(first + _GROUP_ROWS, span[1])
        t = k.var(k.const(i64, 0))

        def some_left(width: int, t: Variable = t) -> Value:
            return t.get() + width <= n_tokens

        for width in TILE_TOKENS:
            for _ in k.loop(partial(some_left, width)):
                at = t.get()
                tile = _Tile(k, weight, n_rows, n_values, format, scratch,
                             [token(at + i) for i in range(width)])  # fmt: skip
                for row, sums in tile.walk(rows):
                    for _ in k.when(row + tile.n_rows <= n_rows):
                        for i, vector in enumerate(sums):
                            store(at + i, row, vector)
                    for _ in k.when(row + tile.n_rows > n_rows):
                        for r in range(tile.n_rows - 1):
                            for _ in k.when(row + r < n_rows):
                                for i, vector in enumerate(sums):
                                    store(at + i, row + r, vector.lane(r))
                t.set(at + width)


class _Tile(NamedTuple):
    """Some rows by some tokens, whose accumulators fit the registers beside their operands.

    Where registers are narrower than the 16 accumulators of an output, these are cut into parts,
    each of which takes a pass over the values. Passes are cut into blocks of values that stay in
    the first cache for all rows, and accumulators wait in scratch for their next block.
    """

    k: Builder
    weight: Value
    n_matrix_rows: Value
    n_values: Value
    format: str
    scratch: Value
    tokens: Sequence[Value]

    @property
    def is_small(self) -> bool:
        """Whether its tokens are few, which wait for memory rather than for arithmetic."""
        return len(self.tokens) < TILE_TOKENS[0]

    @property
    def part(self) -> Type:
        """Accumulators of an output that are summed in one pass."""
        return LANES if self.is_small else f32.x(self.k.vector_lanes)

    @property
    def n_rows(self) -> int:
        """As many as leave operands a quarter of the registers."""
        lanes = self.k.vector_registers * 3 // 4 * self.k.vector_lanes
        room = lanes // (len(self.tokens) * self.part.lanes)
        return 4 if room >= 4 else 2 if room >= 2 else 1

    def walk(self, rows: tuple[Value, Value]) -> Iterator[tuple[Value, list[Value]]]:
        """From each row on the finished sums of a tile: of each token a vector of rows."""
        if self.part == LANES:
            for row in self.k.range(*rows, self.n_rows):
                cells = self._cells()
                self._add(cells, row, self.k.const(i64, 0), self.n_values, 0)
                yield row, self._sums([cells])
            return
        for first, stop in blocks(self.k, self.n_values, BLOCK):
            for row in self.k.range(*rows, self.n_rows):
                kept = self.scratch.at(LANES.nbytes + (row - rows[0]) * _KEPT_NBYTES)
                parts = [self._cells() for _ in range(LANES.lanes // self.part.lanes)]
                for i, cells in enumerate(parts):
                    size = self.part.nbytes
                    places = [kept.at((i * len(cells) + j) * size) for j in range(len(cells))]
                    for _ in self.k.when(first > 0):
                        for cell, place in zip(cells, places, strict=True):
                            cell.set(place.load(self.part))
                    self._add(cells, row, first, stop, i)
                    for _ in self.k.when(stop < self.n_values):
                        for cell, place in zip(cells, places, strict=True):
                            place.store(cell.get())
                for _ in self.k.when(stop == self.n_values):
                    yield row, self._sums(parts)

    def _cells(self) -> list[Variable]:
        """New accumulators [token * row] of a part."""
        zero = self.k.const(self.part, 0.0)
        return [self.k.var(zero) for _ in self.tokens for _ in range(self.n_rows)]

    def _add(
        self, cells: Sequence[Variable], row: Value, first: Value, stop: Value, part: int
    ) -> None:
        """Add the products of the values from `first` to `stop` to the accumulators of a part."""
        k, n, storage = self.k, self.n_rows, STORAGE[self.format]
        last, item_nbytes, lane = self.n_matrix_rows - 1, storage.nbytes, part * self.part.lanes
        starts = [
            self.weight.at(k.minimum(row + r, last) * self.n_values * item_nbytes)
            for r in range(n)
        ]  # fmt: skip
        whole = stop // 16 * 16
        for i in k.range(first, whole, 16):
            self._ask_ahead(row, i, part)
            stored = storage.x(self.part.lanes)
            at = i + lane
            w = [widen(k, p.at(at * item_nbytes).load(stored), self.format) for p in starts]
            for t, token in enumerate(self.tokens):
                _multiply(k, cells[t * n : (t + 1) * n], token.at(at * 4).load(self.part), w)
        # The lanes past the last value hold zeros on both sides: their sums stay as they are.
        for _ in k.when(whole < stop):
            tail = partial(load_tail, k, self.scratch, whole, stop, lane, self.part)
            w = [tail(p, self.format) for p in starts]
            for t, token in enumerate(self.tokens):
                _multiply(k, cells[t * n : (t + 1) * n], tail(token, "f32"), w)

    def _ask_ahead(self, row: Value, i: Value, part: int) -> None:
        """Prefetch what a tile to come needs: a share at each 16 values, from the i-th on."""
        k, n = self.k, self.n_rows
        row_nbytes = self.n_values * STORAGE[self.format].nbytes
        done = i * STORAGE[self.format].nbytes
        if self.is_small:
            # Short rows side by side hide from the processor that their bytes come one behind the
            # other. The next tile lies in one piece: ask for as much of it.
            ahead = self.weight.at((row + n) * row_nbytes + _AHEAD_NBYTES)
            for line in range(0, 16 * n * STORAGE[self.format].nbytes, 64):
                k.prefetch(ahead.at(done * n + line), level=2)
        elif self.part != LANES:
            # Passes take blocks of values: ask for the same ones, each pass for some of the rows.
            asked = [end * n * self.part.lanes // LANES.lanes for end in (part, part + 1)]
            for r in range(*asked):
                ahead = self.weight.at((row + (_AHEAD_TILES * n + r)) * row_nbytes)
                k.prefetch(ahead.at(done), level=2)

    def _sums(self, parts: Sequence[Sequence[Variable]]) -> list[Value]:
        """The tree over accumulators [part][token * row]: of each token a vector of rows."""
        vectors = fold([[cell.get() for cell in cells] for cells in parts])
        return tree_sums(self.k, vectors, self.n_rows)


def _multiply(k: Builder, cells: Sequence[Variable], x: Value, w: Sequence[Value]) -> None:
    """Add a token's products with every row."""
    for cell, row in zip(cells, w, strict=True):
        cell.set(k.fma(x, row, cell.get()))


def tree_sums(k: Builder, vectors: Sequence[Value], n: int) -> list[Value]:
    """The tree sums of every `n` vectors as a vector; two vectors share every addition.

    Each level adds lane i and lane i + half of every vector, as `Builder.tree_sum` does, and puts
    the partial sums of two vectors into one: the same additions in half the instructions.
    """
    n_lanes = width = vectors[0].type.lanes
    level = list(vectors)
    counts = 1  # vectors that share one
    while width > 1:
        if len(level) % 2:
            level.append(level[-1])
        half = width // 2
        low = [g * width + i for g in range(2 * counts) for i in range(half)]
        high = [g * width + half + i for g in range(2 * counts) for i in range(half)]
        level = [
            k.shuffle(a, b, low) + k.shuffle(a, b, high)
            for a, b in zip(level[::2], level[1::2], strict=True)
        ]
        counts, width = 2 * counts, half
    level = [level[i // n_lanes] for i in range(0, len(vectors), n)]
    places = [i % n_lanes for i in range(0, len(vectors), n)]
    return [
        k.shuffle(sums, sums, list(range(at, at + n)))
        for sums, at in zip(level, places, strict=True)
    ]
