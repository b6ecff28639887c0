"""Attention of a block: queries of one slot at consecutive positions, with heads that share keys.

A tile of keys, or of values, is widened to f32 once for the block and stays in the nearest cache
while every query runs over it. A block lies within a segment's bounds, so that all its queries
merge the same segments but for those that a window hides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ignis.kernels.kv_pages import PAGE, PageTable
from ignis.kernels.lang import Builder, Value, f32, i32, i64
from ignis.kernels.register_tiles import Sums, Tile, best_tile, divisors
from ignis.kernels.segments import (
    SEGMENT,
    Scale,
    Visible,
    keep_scores,
    lane_weights,
    larger,
    merge_factors,
    seen_lanes,
)

_VECTOR_NBYTES = PAGE * f32.nbytes
_KEY_PAGES = 4  # of a tile of keys at most
_TILE_NBYTES = 16384  # half of a small nearest cache
_M, _L, _A1, _A2 = (i * _VECTOR_NBYTES for i in range(4))  # what a head keeps of 16 queries
_STATE_NBYTES = 4 * _VECTOR_NBYTES


def block_queries(group: int) -> int:
    """Queries of a block at most: as many as leave their scores in the second cache."""
    return 64 if group <= 2 else 32 if group <= 4 else 16


class Scratch(NamedTuple):
    """Where a block keeps what. A row is one head of one query: rows of a query lie together.

    | scores f32 [rows][256] | sums f32 [rows][C] | merged f32 [rows][C] |
    | lanes f32 [rows][16] | states f32 [rows / 16][4][16] | tile f32 |
    """

    base: Value
    group: int
    head_dim: int

    @classmethod
    def size(cls, group: int, head_dim: int) -> int:
        """Bytes of it all."""
        tile_nbytes = max(_KEY_PAGES * PAGE * head_dim * f32.nbytes, _TILE_NBYTES)
        return cls._tile_at(group, head_dim) + tile_nbytes

    @staticmethod
    def _rows(group: int) -> int:
        return block_queries(group) * group

    @classmethod
    def _lanes_at(cls, group: int, head_dim: int) -> int:
        return cls._rows(group) * (SEGMENT + 2 * head_dim) * f32.nbytes

    @classmethod
    def _states_at(cls, group: int, head_dim: int) -> int:
        return cls._lanes_at(group, head_dim) + cls._rows(group) * _VECTOR_NBYTES

    @classmethod
    def _tile_at(cls, group: int, head_dim: int) -> int:
        return cls._states_at(group, head_dim) + cls._rows(group) // PAGE * _STATE_NBYTES

    def scores(self, row: Value) -> Value:
        """A row's scores, then weights, of a segment."""
        return self.base.at(row * (SEGMENT * f32.nbytes))

    def sums(self, row: Value) -> Value:
        """A row's weighted values of a segment."""
        sums_at = self._rows(self.group) * SEGMENT * f32.nbytes
        return self.base.at(sums_at + row * (self.head_dim * f32.nbytes))

    def merged(self, row: Value) -> Value:
        """A row's weighted values of the segments so far."""
        return self.sums(row + self._rows(self.group))

    def lanes(self, row: Value) -> Value:
        """A row's largest scores, then the sums of its weights, by key modulo 16."""
        return self.base.at(self._lanes_at(self.group, self.head_dim) + row * _VECTOR_NBYTES)

    def state(self, row: Value) -> Value:
        """Maxima, sums and factors of 16 rows, lanes = rows: where those of `row` begin."""
        states_at = self._states_at(self.group, self.head_dim)
        lane = row % PAGE
        return self.base.at(states_at + (row - lane) * (4 * f32.nbytes) + lane * f32.nbytes)

    @property
    def tile(self) -> Value:
        """Keys or values of a few pages as f32."""
        return self.base.at(self._tile_at(self.group, self.head_dim))


class Block(NamedTuple):
    """Queries at `position` and behind, with the heads of each that share a key head."""

    table: PageTable
    slot: Value
    head: Value
    position: Value
    n_queries: Value
    q: Value  # the first query's first head
    y: Value
    stride: Value  # bytes from a query to the next
    scale: Value
    scratch: Scratch
    group: int
    window: int
    softcap: float

    @property
    def k(self) -> Builder:
        return self.table.k

    def n_rows(self, segment: Value) -> Value:
        """The rows that see keys of a segment; the windows of others begin behind it."""
        if not self.window:
            return self.n_queries * self.group
        n_queries = segment + (SEGMENT + self.window - 1) - self.position
        return self.k.minimum(self.n_queries, n_queries) * self.group

    def visible(self, query: Value | int) -> Visible:
        return Visible(self.k, self.position + query, self.window)

    def seen_by(self, row: Value) -> Visible:
        return self.visible(row // self.group)

    def keys(self, segment: Value, row: Value) -> tuple[Value, Value]:
        """The first key of a segment that a row sees and one more than the last."""
        visible = self.seen_by(row)
        return visible.begin(segment), visible.end(segment)

    def n_pages(self, segment: Value) -> Value:
        """The segment's pages up to the last that the last query sees."""
        return (self.visible(self.n_queries - 1).end(segment) + (PAGE - 1)) // PAGE

    def first_seeing(self, segment: Value, page: Value) -> Value:
        """The first row that sees keys of a page or of one behind it."""
        first = segment + page * PAGE - self.position
        return self.k.maximum(first, self.k.const(i64, 0)) * self.group

    def rows(self, segment: Value, first: Value, count: int) -> list[Value]:
        """Some rows that see a segment; past the last that one is computed again."""
        last = self.n_rows(segment) - 1
        return [self.k.minimum(first + i, last) if i else first for i in range(count)]

    def place(self, first: Value, row: Value) -> Value:
        """Where the row's head begins, in q or y."""
        head = row % self.group
        return first.at(row // self.group * self.stride + head * (self.table.head_dim * f32.nbytes))

    def page(self, segment: Value, index: Value) -> Value:
        """The address of page number `index` of a segment."""
        return self.table.page(self.slot, self.head, segment // PAGE + index)


def attend_block(b: Block) -> None:
    """Write y for all queries and heads of the block."""
    k, head_dim = b.k, b.table.head_dim
    value_tile = best_tile(k, divisors(head_dim // PAGE))
    for segment in k.range(b.visible(0).first_segment, b.position + 1, SEGMENT):
        _scores(b, segment)
        for row in k.range(0, b.n_rows(segment), PAGE):
            _weights(b, segment, row)
        for first in k.range(0, head_dim, value_tile.width * PAGE):
            _sums(b, segment, first, value_tile)
        for _ in k.when(segment + SEGMENT <= b.position):
            for row in k.range(b.n_rows(segment)):
                _merge(b, segment, row)
        for _ in k.when(segment + SEGMENT > b.position):
            for row in k.range(b.n_queries * b.group):
                _finish(b, segment, row)


def _scores(b: Block, segment: Value) -> None:
    """Every row's scores of the pages it sees any key of.

    Several pages at once as far as the first query sees all of their keys, then page by page.
    """
    k, tile = b.k, best_tile(b.k, (4, 2, 1))
    at_once = min(_KEY_PAGES, _TILE_NBYTES // (b.table.head_dim * _VECTOR_NBYTES))
    at_once = max(tile.width, at_once // tile.width * tile.width)
    for row in k.range(b.n_rows(segment)):
        b.scratch.lanes(row).store(k.const(f32.x(PAGE), float("-inf")))
    first = b.visible(0).begin(segment) // PAGE
    seen_by_all = b.visible(0).end(segment) // PAGE
    rest = seen_by_all - seen_by_all % at_once
    for page in k.range(first - first % at_once, rest, at_once):
        _score_tile(b, segment, page, at_once, tile, is_seen=True)
    for page in k.range(rest, b.n_pages(segment)):
        _score_tile(b, segment, page, 1, best_tile(k, (1,)), is_seen=False)


def _score_tile(
    b: Block, segment: Value, page: Value, n_pages: int, tile: Tile, is_seen: bool
) -> None:
    """Scores with the keys of a few pages; pages before all windows are not touched.

    `is_seen`: no query is before any of the keys.
    """
    k, width = b.k, tile.width
    first = b.visible(0).begin(segment) // PAGE
    for at in k.range(0, n_pages, width):
        indices = [page + at + i for i in range(width)]
        sources = [b.page(segment, k.maximum(i, first) if b.window else i) for i in indices]
        for d, columns in b.table.columns(sources):
            for i, column in enumerate(columns):
                _column(b, at, d, width).at(i * _VECTOR_NBYTES).store(column)
    for row in k.range(b.first_seeing(segment, page), b.n_rows(segment), tile.rows):
        rows = b.rows(segment, row, tile.rows)
        for at in k.range(0, n_pages, width):
            for r, products in zip(rows, _products(b, rows, at, width), strict=True):
                seen = None
                if b.window or not is_seen:
                    seen = [_seen_lanes(b, segment, r, page + at + i) for i in range(width)]
                scores = b.scratch.scores(r).at((page + at) * _VECTOR_NBYTES)
                keep_scores(k, products, Scale(b.scale, b.softcap), seen, scores,
                            b.scratch.lanes(r))  # fmt: skip


def _seen_lanes(b: Block, segment: Value, row: Value, page: Value) -> Value:
    """Which keys of a segment's page a row sees."""
    begin, end = b.keys(segment, row)
    return seen_lanes(b.k, begin if b.window else None, end, page)


def _column(b: Block, page: Value, d: Value, width: int) -> Value:
    """Where the tile keeps element d of the keys of `width` pages, side by side."""
    return b.scratch.tile.at((page * b.table.head_dim + d * width) * _VECTOR_NBYTES)


def _products(b: Block, rows: Sequence[Value], page: Value, width: int) -> list[list[Value]]:
    """q . key for some rows and 16 keys of each of `width` pages of the tile."""
    k, vector = b.k, f32.x(PAGE)
    sums = Sums(k, [[k.const(vector, 0.0)] * width for _ in rows])
    queries = [b.place(b.q, row) for row in rows]
    for d in k.range(b.table.head_dim):
        column = _column(b, page, d, width)
        keys = [column.at(i * _VECTOR_NBYTES).load(vector) for i in range(width)]
        sums.add([query.at(d * f32.nbytes) for query in queries], keys)
    return sums.get()


def _weights(b: Block, segment: Value, first_row: Value) -> None:
    """Scores to weights for 16 rows, and how to merge what they weigh."""
    k, vector = b.k, f32.x(PAGE)
    state = b.scratch.state(first_row)
    n_rows = k.minimum(b.n_rows(segment) - first_row, k.const(i64, PAGE))
    maxima = _over_lanes(b, first_row, lambda x, y: larger(k, x, y))
    is_first = _first_segments(b, first_row) == segment.to(i32).splat(PAGE)
    merged, a1, a2 = merge_factors(k, state.at(_M).load(vector), maxima)
    b.scratch.tile.store(maxima)  # nothing else is in the tile between two of them
    for i in k.range(n_rows):
        begin, end = b.keys(segment, first_row + i)
        maximum = b.scratch.tile.at(i * f32.nbytes).load(f32)
        sums = lane_weights(k, b.scratch.scores(first_row + i), begin, end, maximum)
        b.scratch.lanes(first_row + i).store(sums)
    totals = _over_lanes(b, first_row, lambda x, y: x + y)
    total = k.fma(state.at(_L).load(vector), a1, totals * a2)
    state.at(_M).store(k.select(is_first, maxima, merged))
    state.at(_L).store(k.select(is_first, totals, total))
    state.at(_A1).store(a1)
    state.at(_A2).store(a2)


def _first_segments(b: Block, row: Value) -> Value:
    """The first segment that each of 16 rows sees, i32 lanes."""
    k, vector = b.k, i32.x(PAGE)
    if not b.window:
        return k.const(vector, 0)
    query = (row.to(i32).splat(PAGE) + k.const(vector, list(range(PAGE)))) // b.group
    first = (b.position - (b.window - 1)).to(i32).splat(PAGE) + query
    first = k.select(first > 0, first, 0)
    return first - (first & (SEGMENT - 1))


def _over_lanes(b: Block, row: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """The vectors in `lanes` of 16 rows, each folded as `Builder.tree` does it; lanes = rows.

    A round folds the groups of two vectors into one vector with groups of half the size.
    """
    k, size = b.k, PAGE
    rows = [b.scratch.lanes(row + i).load(f32.x(PAGE)) for i in range(PAGE)]
    while size > 1:
        low = [lane for lane in range(2 * PAGE) if lane % size < size // 2]
        high = [lane + size // 2 for lane in low]
        rows = [
            combine(k.shuffle(x, y, low), k.shuffle(x, y, high))
            for x, y in zip(rows[::2], rows[1::2], strict=True)
        ]
        size //= 2
    return rows[0]


def _sums(b: Block, segment: Value, first_d: Value, tile: Tile) -> None:
    """Every row's weighted values of a segment, keys ascending, for one tile of dimensions."""
    k, nbytes = b.k, tile.width * _VECTOR_NBYTES
    first, n_pages = b.visible(0).begin(segment) // PAGE, b.n_pages(segment)
    at_once = max(1, _TILE_NBYTES // (PAGE * nbytes))
    for page in k.range(first, n_pages, at_once):
        count = k.minimum(n_pages - page, k.const(i64, at_once))
        for i in k.range(count):
            source = b.page(segment, page + i)
            for key in k.range(PAGE):
                target = b.scratch.tile.at((i * PAGE + key) * nbytes)
                for place, vector in enumerate(b.table.vectors(source, key, first_d, tile.width)):
                    target.at(place * _VECTOR_NBYTES).store(vector)
        for row in k.range(b.first_seeing(segment, page), b.n_rows(segment), tile.rows):
            rows = b.rows(segment, row, tile.rows)
            _sum_tile(b, segment, rows, (page * PAGE, count * PAGE), page == first, first_d, tile)


def _sum_tile(
    b: Block, segment: Value, rows: Sequence[Value], keys: tuple[Value, Value], is_first: Value,
    first_d: Value, tile: Tile,
) -> None:  # fmt: skip
    """Add what some rows weigh of the values in the tile: its first key, and how many.

    Together as far as all of them see the same keys; others are selected away.
    """
    k, vector = b.k, f32.x(PAGE)
    zero, (first_key, n_keys) = k.const(i64, 0), keys
    seen = [b.keys(segment, row) for row in rows]
    begins = [k.minimum(k.maximum(begin - first_key, zero), n_keys) for begin, _ in seen]
    ends = [k.minimum(end - first_key, n_keys) for _, end in seen]
    weights = [b.scratch.scores(row).at(first_key * f32.nbytes) for row in rows]
    places = [
        [b.scratch.sums(row).at(first_d * f32.nbytes + i * _VECTOR_NBYTES)
         for i in range(tile.width)]
        for row in rows
    ]  # fmt: skip
    sums = Sums(k, [[k.select(is_first, 0.0, p.load(vector)) for p in row] for row in places])

    def add(start: Value, stop: Value, shared: bool) -> None:
        for key in k.range(start, stop):
            source = b.scratch.tile.at(key * (tile.width * _VECTOR_NBYTES))
            values = [source.at(i * _VECTOR_NBYTES).load(vector) for i in range(tile.width)]
            is_seen = [(key >= i) & (key < end) for i, end in zip(begins, ends, strict=True)]
            numbers = [row.at(key * f32.nbytes) for row in weights]
            sums.add(numbers, values, where=None if shared else is_seen)

    seen_by_all = k.maximum(begins[-1], ends[0])
    if b.window:
        add(begins[0], begins[-1], shared=False)
    add(begins[-1], seen_by_all, shared=True)
    add(seen_by_all, ends[-1], shared=False)
    for row_places, row in zip(places, sums.get(), strict=True):
        for place, total in zip(row_places, row, strict=True):
            place.store(total)


def _merge(b: Block, segment: Value, row: Value) -> None:
    """Merge the segment's weighted values with those of the segments before it."""
    for d, merged in _merged(b, segment, row):
        b.scratch.merged(row).at(d).store(merged)


def _finish(b: Block, segment: Value, row: Value) -> None:
    """Merge the last segment, which every row sees: y = o / l."""
    y = b.place(b.y, row)
    total = b.scratch.state(row).at(_L).load(f32).splat(PAGE)
    for d, merged in _merged(b, segment, row):
        y.at(d).store(merged / total)


def _merged(b: Block, segment: Value, row: Value) -> Iterator[tuple[Value, Value]]:
    """Where a vector of dimensions begins, in bytes, and what is weighed of it up to a segment."""
    k, vector = b.k, f32.x(PAGE)
    is_first = segment == b.seen_by(row).first_segment
    sums, merged, state = b.scratch.sums(row), b.scratch.merged(row), b.scratch.state(row)
    a1, a2 = (state.at(at).load(f32).splat(PAGE) for at in (_A1, _A2))
    for d in k.range(0, b.table.head_dim * f32.nbytes, _VECTOR_NBYTES):
        here = sums.at(d).load(vector)
        both = k.fma(merged.at(d).load(vector), a1, here * a2)
        yield d, k.select(is_first, here, both)
