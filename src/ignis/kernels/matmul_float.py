"""Matmul of F32, F16 and BF16 weights with f32 activations, rows as they lie (NUMERICS 3).

Lanes are k modulo 16: an output has 16 accumulators, fma with k ascending, then the tree
(lane i with lane i + half). Register tiles of 4 rows by up to 6 tokens reuse every load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ignis.kernels.lang import Builder, Type, Value, f16, f32, i16, i32, i64, kernel, ptr

ROWS = 4  # rows of a register tile
UNIT_ROWS = 32  # rows of a unit of work: their weights stay in L2 while the tokens pass
TILE_TOKENS = (6, 4, 2, 1)
LANES = f32.x(16)
_AHEAD_NBYTES = 4096  # past the next tile's start, whose first bytes are needed at once

STORAGE: dict[str, Type] = {"f32": f32, "f16": f16, "bf16": i16}


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

    def store(t: Value, row: Value, sums: Sequence[Value]) -> None:
        _store(k, sums, row, t * n_rows, y, bias, residual, n_rows)

    stop = k.minimum(end * unit_rows, n_rows)
    for_tiles(k, weight, (begin * unit_rows, stop), n_rows, n_values, format, scratch, n_tokens,
              token, store)  # fmt: skip


def for_tiles(
    k: Builder, weight: Value, span: tuple[Value, Value], n_rows: Value, n_values: Value,
    format: str, scratch: Value, n_tokens: Value, token: Callable[[Value], Value],
    store: Callable[[Value, Value, Sequence[Value]], None],
) -> None:  # fmt: skip
    """Walk the rows of `span` in tiles of 4 rows by up to 6 tokens.

    `token(t)` is where the values of token t lie; `store(t, row, sums)` takes its four sums from
    `row` on, of which those past the last row mean nothing.
    """
    t = k.var(k.const(i64, 0))
    for width in TILE_TOKENS:
        for _ in k.loop(lambda width=width: t.get() + width <= n_tokens):  # type: ignore[misc]
            first = t.get()
            tokens = [token(first + i) for i in range(width)]
            for row in k.range(*span, ROWS):
                sums = _tile(k, weight, row, n_rows, tokens, n_values, format, scratch)
                for i in range(width):
                    store(first + i, row, sums[i])
            t.set(first + width)


def _tile(
    k: Builder, weight: Value, row: Value, n_rows: Value, tokens: Sequence[Value],
    n_values: Value, format: str, scratch: Value,
) -> list[list[Value]]:  # fmt: skip
    """The finished sums [token][row] of a register tile; rows past the last repeat it."""
    storage = STORAGE[format]
    item_nbytes = storage.nbytes
    last = n_rows - 1
    starts = [
        weight.at(k.minimum(row + r, last) * n_values * item_nbytes) for r in range(ROWS)
    ]
    zero = k.const(LANES, 0.0)
    acc = [[k.var(zero) for _ in range(ROWS)] for _ in tokens]
    whole = n_values // 16 * 16
    for i in k.range(0, whole, 16):
        if len(tokens) == 1:
            # Four short rows side by side hide from the processor that their bytes come one
            # behind the other. The next tile lies in one piece: ask for as much of it.
            ahead = weight.at((row + ROWS) * n_values * item_nbytes + _AHEAD_NBYTES)
            for line in range(0, 16 * ROWS * item_nbytes, 64):
                k.prefetch(ahead.at(i * (ROWS * item_nbytes) + line), level=2)
        w = [_widen(k, p.at(i * item_nbytes).load(storage.x(16)), format) for p in starts]
        for token, sums in zip(tokens, acc, strict=True):
            value = token.at(i * 4).load(LANES)
            for r in range(ROWS):
                sums[r].set(k.fma(value, w[r], sums[r].get()))
    # The lanes past the last value hold zeros on both sides, which leaves their sums as they are.
    for _ in k.when(whole < n_values):
        w = [_tail(k, p, whole, n_values, format, scratch) for p in starts]
        for token, sums in zip(tokens, acc, strict=True):
            value = _tail(k, token, whole, n_values, "f32", scratch)
            for r in range(ROWS):
                sums[r].set(k.fma(value, w[r], sums[r].get()))
    flat = tree_sums(k, [cell.get() for sums in acc for cell in sums])
    return [flat[ROWS * i : ROWS * (i + 1)] for i in range(len(tokens))]


def _store(
    k: Builder, sums: Sequence[Value], row: Value, out: Value, y: Value, bias: Value,
    residual: Value, n_rows: Value,
) -> None:  # fmt: skip
    for r, total in enumerate(sums):
        for _ in k.when(row + r < n_rows):
            cell = k.var(total)
            for _ in k.when(k.not_null(bias)):
                cell.set(cell.get() + bias.at((row + r) * 4).load(f32))
            for _ in k.when(k.not_null(residual)):
                cell.set(cell.get() + residual.at((out + row + r) * 4).load(f32))
            y.at((out + row + r) * 4).store(cell.get())


def _widen(k: Builder, raw: Value, format: str) -> Value:
    """Stored lanes as f32; BF16 is the upper half of an f32."""
    if format == "bf16":
        return (raw.zext(i32) << 16).bits(f32.x(raw.type.lanes) if raw.type.lanes else f32)
    return raw.to(f32) if format == "f16" else raw


def _tail(
    k: Builder, start: Value, first: Value, stop: Value, format: str, scratch: Value
) -> Value:
    """The last n_values mod 16 values, zeros behind them."""
    storage = STORAGE[format]
    scratch.store(k.const(LANES, 0.0))
    for i in k.range(first, stop):
        value = _widen(k, start.at(i * storage.nbytes).load(storage), format)
        scratch.at((i - first) * 4).store(value)
    return scratch.load(LANES)


def tree_sums(k: Builder, vectors: Sequence[Value]) -> list[Value]:
    """The tree sum of each vector, two vectors sharing every addition.

    Each level adds lane i and lane i + half of every vector, as `Builder.tree_sum` does, and puts
    the partial sums of two vectors into one: the same additions in half the instructions.
    """
    width, level = 16, list(vectors)
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
    return [level[i // 16].lane(i % 16) for i in range(len(vectors))]
