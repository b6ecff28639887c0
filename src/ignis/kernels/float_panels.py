"""Float matmul of many tokens: rows are made f32 and transposed once, so that lanes are rows.

Rows as they lie are converted again for every few tokens, on the ports that multiply, and the 16
accumulators of each output end as a tree across lanes. Here a vector holds one accumulator of 16
rows: the same sums in the same order (NUMERICS 3), and a tree of whole vectors.

    panel    [8][n_steps][2][32] f32: at [p][s][h] the weights of 32 rows at k = 16 s + 8 h + p
    tile     32 rows x 6 tokens x accumulators p and p + 8; of fewer tokens more accumulators

A tile takes a few accumulators a pass, over a block of values that stays in the first cache;
accumulators wait in scratch for their next block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ignis.kernels.floats import LANES, STORAGE, blocks, fold, widen
from ignis.kernels.lang import Builder, Value, Variable, f32, i64
from ignis.kernels.rows import transpose

_ROWS = 32
_WIDTH = _ROWS // LANES.lanes  # vectors of rows
_ROWS_NBYTES = _ROWS * f32.nbytes
_STREAMS = 8
_STEP_NBYTES = 16 // _STREAMS * _ROWS_NBYTES  # of a stream
_TILE_TOKENS = 6
_N_CELLS = 24  # accumulators of a tile, three quarters of 32 registers
_BLOCK = 640  # values of a pass: those of its tokens and of its rows fit 32 KiB
_SUMS_NBYTES = 16 * _TILE_TOKENS * _ROWS_NBYTES
_MAX_VALUES = 10240  # of rows whose panel stays in the second cache, or mostly
# Tokens for which a panel pays; F32 rows as they lie need no conversion.
FEWEST_TOKENS = {"f32": 256, "f16": 96, "bf16": 96}


def scratch_nbytes(n_values: int) -> int:
    """Accumulators that wait and a panel of rows of `n_values`."""
    n_steps = n_values // 16 + 1 if n_values <= _MAX_VALUES else 0
    return _SUMS_NBYTES + n_steps * _STREAMS * _STEP_NBYTES


def for_panels(
    k: Builder, weight: Value, span: tuple[Value, Value], n_values: Value, format: str,
    scratch: Value, n_tokens: Value, token: Callable[[Value], Value],
    store: Callable[[Value, Value, Value], None],
) -> Value:  # fmt: skip
    """Walk as many rows of `span` as fill panels, if that is faster; the row to go on from.

    Arguments are those of `matmul_float.for_tiles`. Registers of fewer than 16 lanes hold few
    accumulators, so their passes would be short: such processors take rows as they lie.
    """
    begin = k.var(span[0])
    if k.vector_lanes == LANES.lanes:
        panel = _Panel(k, n_values, scratch)
        fits = (n_values <= _MAX_VALUES) & (n_values % 16 == 0)
        for _ in k.when(fits & (n_tokens >= FEWEST_TOKENS[format])):
            for _ in k.loop(lambda: begin.get() + _ROWS <= span[1]):
                panel.pack(weight, begin.get(), format)
                panel.multiply(n_tokens, token, lambda t, r, sums: store(t, begin.get() + r, sums))
                begin.set(begin.get() + _ROWS)
    return begin.get()


class _Panel(NamedTuple):
    """32 rows, transposed in scratch."""

    k: Builder
    n_values: Value
    scratch: Value

    def weights(self, residue: Value, step: Value) -> Value:
        """Where the weights of k = 16 step + residue lie."""
        panel = self.scratch.at(_SUMS_NBYTES)
        # A step more, for streams not to lie a power of two apart.
        n_steps = self.n_values // 16 + 1
        stream = panel.at(residue % _STREAMS * (n_steps * _STEP_NBYTES))
        return stream.at(step * _STEP_NBYTES + residue // _STREAMS * _ROWS_NBYTES)

    def pack(self, weight: Value, row: Value, format: str) -> None:
        """Fill it with rows from `row` on of the matrix at `weight`."""
        k, n, storage = self.k, LANES.lanes, STORAGE[format]
        row_nbytes = self.n_values * storage.nbytes
        for half in k.range(0, _WIDTH):
            start = weight.at((row + half * n) * row_nbytes)
            starts = [start.at(row_nbytes * r) for r in range(n)]
            for step in k.range(self.n_values // 16):
                done = step * (16 * storage.nbytes)
                for line in range(0, 16 * n * storage.nbytes, 64):  # of the next 16 rows
                    k.prefetch(start.at(row_nbytes * n + done * n + line), level=2)
                rows = [widen(k, p.at(done).load(storage.x(n)), format) for p in starts]
                for residue, column in enumerate(transpose(k, rows)):
                    here = self.weights(k.const(i64, residue), step)
                    here.at(half * LANES.nbytes).store(column)

    def multiply(
        self, n_tokens: Value, token: Callable[[Value], Value],
        store: Callable[[Value, int, Value], None],
    ) -> None:  # fmt: skip
        """Give `store` of each token the sums of all rows, a vector at a time."""
        k = self.k
        t = k.var(k.const(i64, 0))
        for _ in k.loop(lambda: t.get() + _TILE_TOKENS <= n_tokens):
            self._tile(t.get(), _TILE_TOKENS, n_tokens, token, store)
            t.set(t.get() + _TILE_TOKENS)
        for width in range(1, _TILE_TOKENS):
            for _ in k.when(n_tokens - t.get() == width):
                self._tile(t.get(), width, n_tokens, token, store)

    def _tile(
        self, first_token: Value, n: int, n_tokens: Value, token: Callable[[Value], Value],
        store: Callable[[Value, int, Value], None],
    ) -> None:  # fmt: skip
        """`multiply` for some tokens, `n` of them."""
        k = self.k
        tile = _Tile(k, self, [token(first_token + i) for i in range(n)])
        zero = k.const(i64, 0)
        for first, stop in blocks(k, self.n_values, _BLOCK):
            ends = stop == self.n_values
            for i in k.range(tile.n_passes):
                # Each pass asks for what one token has in the block or tile to come.
                later = first_token + i + k.select(ends, k.const(i64, n), zero)
                later = k.select(later < n_tokens, later, i)
                tile.add(i, first, stop, token(later).at(k.select(ends, zero, stop) * f32.nbytes))
        for t in k.range(n):
            for half, total in enumerate(tile.sums(t)):
                store(first_token + t, half * LANES.lanes, total)


class _Tile(NamedTuple):
    """A panel by some tokens: of each output a few of its 16 accumulators a pass.

    In scratch accumulators [pass][n_at_once][token][vector] wait for their next block, and after
    the last one sums of them, [pass][token][vector], for each other.
    """

    k: Builder
    panel: _Panel
    tokens: Sequence[Value]

    @property
    def n_sums(self) -> int:
        """Vectors of outputs."""
        return len(self.tokens) * _WIDTH

    @property
    def n_at_once(self) -> int:
        """Accumulators of an output in a pass, as far apart as the tree first adds them."""
        return max(n for n in (1, 2, 4, 8) if n * self.n_sums <= _N_CELLS)

    @property
    def n_passes(self) -> int:
        return 16 // self.n_at_once

    def add(self, i: Value, first: Value, stop: Value, ahead: Value) -> None:
        """Pass `i` over the values from `first` to `stop`; `ahead` is what to ask for meanwhile."""
        k, n_values, n = self.k, self.panel.n_values, self.n_at_once * self.n_sums
        kept = self._kept(i * n)
        cells = [k.var(k.const(LANES, 0.0)) for _ in range(n)]
        places = [kept.at(j * LANES.nbytes) for j in range(n)]
        for _ in k.when(first > 0):
            for cell, place in zip(cells, places, strict=True):
                cell.set(place.load(LANES))
        begin = first // 16
        for step in k.range(begin, stop // 16):
            line = (step - begin) * 64
            k.prefetch(ahead.at(line), level=2)
            k.prefetch(kept.at(n * LANES.nbytes + line))  # the next pass begins with it
            self._multiply(cells, i, step)
        for _ in k.when(stop < n_values):
            for cell, place in zip(cells, places, strict=True):
                place.store(cell.get())
        for _ in k.when(stop == n_values):
            totals = fold([[cell.get() for cell in cells[j : j + self.n_sums]]
                           for j in range(0, n, self.n_sums)])  # fmt: skip
            for j, total in enumerate(totals):
                self._kept(i * self.n_sums + j).store(total)

    def sums(self, t: Value) -> list[Value]:
        """The finished vectors of a token, after the last pass."""
        places = [self._kept(t * _WIDTH + i * self.n_sums) for i in range(self.n_passes)]
        return fold([[place.at(j * LANES.nbytes).load(LANES) for j in range(_WIDTH)]
                     for place in places])  # fmt: skip

    def _kept(self, index: Value) -> Value:
        return self.panel.scratch.at(index * LANES.nbytes)

    def _multiply(self, cells: Sequence[Variable], i: Value, step: Value) -> None:
        """Add a product to each accumulator [n_at_once][token][vector] of pass `i`."""
        chains = iter(cells)
        for residue in range(0, 16, self.n_passes):
            here = self.panel.weights(i + residue, step)
            rows = [here.at(j * LANES.nbytes).load(LANES) for j in range(_WIDTH)]
            for token in self.tokens:
                place = token.at(i * f32.nbytes).at(step * LANES.nbytes).at(residue * f32.nbytes)
                x = place.load(f32).splat(LANES.lanes)
                for row in rows:
                    cell = next(chains)
                    cell.set(self.k.fma(x, row, cell.get()))
