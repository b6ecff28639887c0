"""Attention of a block: queries of one slot at consecutive positions, with heads that share keys.

A tile of keys, or of values, is widened to f32 once for the block and stays in the nearest cache
while every query runs over it. A block lies within a segment's bounds, so that all its queries
merge the same segments but for those that a window hides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ignis.kernels import math
from ignis.kernels.kv_pages import PAGE, PageTable
from ignis.kernels.lang import Builder, Value, f32, i32, i64
from ignis.kernels.segments import (
    SEGMENT,
    Visible,
    key_pages,
    lane_weights,
    larger,
    merge_factors,
    value_width,
)

_VECTOR_NBYTES = PAGE * f32.nbytes
_TILE_NBYTES = 16384  # of values: half of a small nearest cache
_M, _L, _A1, _A2 = (i * _VECTOR_NBYTES for i in range(4))  # what a head keeps of 16 queries
_STATE_NBYTES = 4 * _VECTOR_NBYTES


def block_queries(group: int) -> int:
    """Queries of a block at most: as many as leave their scores in the second cache."""
    return 32 if group <= 4 else 16


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where a block keeps what. A row is one query of one head: rows of a head lie together.

    | scores f32 [rows][256] | sums f32 [rows][C] | merged f32 [rows][C] |
    | lanes f32 [rows][16] | states f32 [rows / 16][4][16] | tile f32 |
    """

    base: Value
    group: int
    head_dim: int

    @classmethod
    def size(cls, group: int, head_dim: int) -> int:
        """Bytes of it all."""
        pages = max(_tile_pages(group), _value_pages(head_dim, group))
        return cls._tile_at(group, head_dim) + pages * PAGE * head_dim * f32.nbytes

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

    def row(self, query: Value, head: Value | int) -> Value:
        return query + head * block_queries(self.group)

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


@dataclass(frozen=True, slots=True)
class Block:
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

    def visible(self, query: Value | int) -> Visible:
        return Visible(self.k, self.position + query, self.window)

    def n_pages(self, segment: Value) -> Value:
        """The segment's pages up to the last that the last query sees."""
        return (self.visible(self.n_queries - 1).end(segment) + (PAGE - 1)) // PAGE

    def first_seeing(self, segment: Value, page: Value) -> Value:
        """The first query that sees keys of a page or of one behind it."""
        first = segment + page * PAGE - self.position
        return self.k.maximum(first, self.k.const(i64, 0))

    def page(self, segment: Value, index: Value) -> Value:
        """The address of page number `index` of a segment."""
        return self.table.page(self.slot, self.head, segment // PAGE + index)


def attend_block(b: Block) -> None:
    """Write y for all queries and heads of the block."""
    k = b.k
    for segment in k.range(b.visible(0).first_segment, b.position + 1, SEGMENT):
        _scores(b, segment)
        for head in k.range(b.group):
            for query in k.range(0, b.n_queries, PAGE):
                _weights(b, segment, head, query)
        for first in k.range(0, b.table.head_dim, value_width(b.table.head_dim, b.group) * PAGE):
            _sums(b, segment, first)
        for query in k.range(b.n_queries):
            for _ in k.when(b.visible(query).first_segment <= segment):
                _merge(b, segment, query)
    for query in k.range(b.n_queries):
        _finish(b, query)


def _queries_at_once(group: int) -> int:
    """Queries that share each load of a key, so that loads do not hold up the products."""
    return next(n for n in (1, 2, 4) if n * group >= 4)


def _tile_pages(group: int) -> int:
    """Pages of a wide tile of keys."""
    return key_pages(group * _queries_at_once(group))


def _value_pages(head_dim: int, group: int) -> int:
    """Pages of a tile of values that fits the nearest cache."""
    nbytes = PAGE * value_width(head_dim, group) * _VECTOR_NBYTES
    return max(1, min(4, _TILE_NBYTES // nbytes))


def _scores(b: Block, segment: Value) -> None:
    """Every row's scores, capped, minus infinity where a key is not seen; their largest by lane.

    Wide tiles as far as the first query sees all of their keys, then page by page.
    """
    k, width = b.k, _tile_pages(b.group)
    first = b.visible(0).begin(segment) // PAGE
    seen_by_all = b.visible(0).end(segment) // PAGE
    rest, start = seen_by_all - seen_by_all % width, first - first % width
    for page in k.range(start, rest, width):
        _score_tile(b, segment, page, width, page == start)
    for page in k.range(rest, b.n_pages(segment)):
        _score_tile(b, segment, page, 1, page == start)


def _score_tile(
    b: Block, segment: Value, page: Value, width: int, is_first: Value
) -> None:
    """Scores with the keys of `width` pages; pages before all windows are not touched."""
    k = b.k
    first = b.visible(0).begin(segment) // PAGE
    indices = [k.maximum(page + i, first) if b.window else page + i for i in range(width)]
    sources = [b.page(segment, index) for index in indices]
    for d, columns in b.table.columns(sources):
        for i, column in enumerate(columns):
            b.scratch.tile.at((d * width + i) * _VECTOR_NBYTES).store(column)
    at_once = _queries_at_once(b.group)
    for query in k.range(b.first_seeing(segment, page), b.n_queries, at_once):
        # Past the last query it is computed again.
        queries = [k.minimum(query + i, b.n_queries - 1) if i else query for i in range(at_once)]
        rows = [(q, head) for q in queries for head in range(b.group)]
        for (q, head), products in zip(rows, _products(b, rows, width), strict=True):
            scores = b.scratch.scores(b.scratch.row(q, head)).at(page * _VECTOR_NBYTES)
            for i, product in enumerate(products):
                scores.at(i * _VECTOR_NBYTES).store(product * b.scale.splat(PAGE))
        for q in k.range(query, k.minimum(query + at_once, b.n_queries)):
            for h in k.range(b.group):
                _mask(b, segment, page, width, q, h, is_first)


def _products(b: Block, rows: Sequence[tuple[Value, int]], width: int) -> list[list[Value]]:
    """q . key for rows given as (query, head) and 16 keys of each page of the tile."""
    k, head_dim, vector = b.k, b.table.head_dim, f32.x(PAGE)
    chains = [[k.var(k.const(vector, 0.0)) for _ in range(width)] for _ in rows]
    for d in k.range(head_dim):
        column = b.scratch.tile.at(d * (width * _VECTOR_NBYTES))
        keys = [column.at(i * _VECTOR_NBYTES).load(vector) for i in range(width)]
        for (query, head), row_chains in zip(rows, chains, strict=True):
            q = b.q.at(query * b.stride + head * (head_dim * f32.nbytes))
            x = q.at(d * f32.nbytes).load(f32).splat(PAGE)
            for chain, key in zip(row_chains, keys, strict=True):
                chain.set(k.fma(x, key, chain.get()))
    return [[chain.get() for chain in row_chains] for row_chains in chains]


def _mask(
    b: Block, segment: Value, page: Value, width: int, query: Value, head: Value, is_first: Value
) -> None:
    """Cap and mask a row's scores of the tile, and keep the largest by lane."""
    k, visible, row = b.k, b.visible(query), b.scratch.row(query, head)
    lanes = k.const(i32.x(PAGE), list(range(PAGE)))
    place = b.scratch.lanes(row)
    largest = k.var(k.select(is_first, float("-inf"), place.load(f32.x(PAGE))))
    for i in k.range(width) if b.softcap else range(width):
        key = (page + i) * PAGE
        scores = b.scratch.scores(row).at(key * f32.nbytes)
        score = scores.load(f32.x(PAGE))
        if b.softcap:
            score = math.softcap(k, score, k.const(score.type, b.softcap))
        if width == 1:  # all keys of wider tiles are seen, but for windows
            seen = lanes < (visible.end(segment) - key).to(i32).splat(PAGE)
            score = k.select(seen, score, float("-inf"))
        if b.window:
            seen = lanes >= (visible.begin(segment) - key).to(i32).splat(PAGE)
            score = k.select(seen, score, float("-inf"))
        if b.softcap or b.window or width == 1:
            scores.store(score)
        largest.set(larger(k, score, largest.get()))
    place.store(largest.get())


def _weights(b: Block, segment: Value, head: Value, query: Value) -> None:
    """Scores to weights for 16 queries of a head, and how to merge what they weigh."""
    k, vector = b.k, f32.x(PAGE)
    first_row = b.scratch.row(query, head)
    state = b.scratch.state(first_row)
    maxima = _over_lanes(b, first_row, lambda x, y: larger(k, x, y))
    is_first = _first_segments(b, query) == segment.splat(PAGE)
    merged, a1, a2 = merge_factors(k, state.at(_M).load(vector), maxima)
    b.scratch.tile.store(maxima)  # nothing else is in the tile between two of them
    for i in k.range(k.minimum(b.n_queries - query, k.const(i64, PAGE))):
        visible, row = b.visible(query + i), first_row + i
        maximum = b.scratch.tile.at(i * f32.nbytes).load(f32)
        begin, end = visible.begin(segment), visible.end(segment)
        sums = lane_weights(k, b.scratch.scores(row), begin, end, maximum)
        b.scratch.lanes(row).store(sums)
    totals = _over_lanes(b, first_row, lambda x, y: x + y)
    total = k.fma(state.at(_L).load(vector), a1, totals * a2)
    state.at(_M).store(k.select(is_first, maxima, merged))
    state.at(_L).store(k.select(is_first, totals, total))
    state.at(_A1).store(a1)
    state.at(_A2).store(a2)


def _first_segments(b: Block, query: Value) -> Value:
    """The first segment that each of 16 queries sees, i64 lanes."""
    k, vector = b.k, i64.x(PAGE)
    if not b.window:
        return k.const(vector, 0)
    lanes = k.const(vector, list(range(PAGE)))
    first = (b.position + query - (b.window - 1)).splat(PAGE) + lanes
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


def _sums(b: Block, segment: Value, first_d: Value) -> None:
    """Every row's weighted values of a segment, keys ascending, for one tile of dimensions."""
    k, width = b.k, value_width(b.table.head_dim, b.group)
    first, n_pages = b.visible(0).begin(segment) // PAGE, b.n_pages(segment)
    at_once = _value_pages(b.table.head_dim, b.group)
    for page in k.range(first, n_pages, at_once):
        for i in k.range(k.minimum(n_pages - page, k.const(i64, at_once))):
            source = b.page(segment, page + i)
            for row in k.range(PAGE):
                target = b.scratch.tile.at((i * PAGE + row) * (width * PAGE * f32.nbytes))
                for place, vector in enumerate(b.table.vectors(source, row, first_d, width)):
                    target.at(place * _VECTOR_NBYTES).store(vector)
        for query in k.range(b.first_seeing(segment, page), b.n_queries):
            _sum_tile(b, segment, query, page * PAGE, page == first, first_d)


def _sum_tile(
    b: Block, segment: Value, query: Value, first_key: Value, is_first: Value, first_d: Value
) -> None:
    """Add what one query's heads weigh of the values in the tile."""
    k, width, vector = b.k, value_width(b.table.head_dim, b.group), f32.x(PAGE)
    nbytes = PAGE * f32.nbytes
    visible, zero = b.visible(query), k.const(i64, 0)
    begin = k.maximum(visible.begin(segment) - first_key, zero) if b.window else zero
    tile_keys = _value_pages(b.table.head_dim, b.group) * PAGE
    end = k.minimum(visible.end(segment) - first_key, k.const(i64, tile_keys))
    rows = [b.scratch.row(query, head) for head in range(b.group)]
    weights = [b.scratch.scores(row).at(first_key * f32.nbytes) for row in rows]
    sums = [b.scratch.sums(row).at(first_d * f32.nbytes) for row in rows]
    chains = [
        [
            k.var(k.select(is_first, 0.0, place.at(i * nbytes).load(vector)))
            for i in range(width)
        ]
        for place in sums
    ]
    for key in k.range(begin, end):
        values = [b.scratch.tile.at((key * width + i) * nbytes).load(vector) for i in range(width)]
        for weight_row, row in zip(weights, chains, strict=True):
            weight = weight_row.at(key * f32.nbytes).load(f32).splat(PAGE)
            for chain, value in zip(row, values, strict=True):
                chain.set(k.fma(weight, value, chain.get()))
    for place, row in zip(sums, chains, strict=True):
        for i, chain in enumerate(row):
            place.at(i * nbytes).store(chain.get())


def _merge(b: Block, segment: Value, query: Value) -> None:
    """Merge the segment's weighted values with those of the segments before it."""
    k, vector = b.k, f32.x(PAGE)
    is_first = segment == b.visible(query).first_segment
    for head in k.range(b.group):
        row = b.scratch.row(query, head)
        sums, merged, state = b.scratch.sums(row), b.scratch.merged(row), b.scratch.state(row)
        a1, a2 = (state.at(at).load(f32).splat(PAGE) for at in (_A1, _A2))
        for d in k.range(0, b.table.head_dim * f32.nbytes, _VECTOR_NBYTES):
            here = sums.at(d).load(vector)
            both = k.fma(merged.at(d).load(vector), a1, here * a2)
            merged.at(d).store(k.select(is_first, here, both))


def _finish(b: Block, query: Value) -> None:
    """y = o / l for every head of a query."""
    k, nbytes = b.k, b.table.head_dim * f32.nbytes
    for head in k.range(b.group):
        row, y = b.scratch.row(query, head), b.y.at(query * b.stride + head * nbytes)
        total = b.scratch.state(row).at(_L).load(f32).splat(PAGE)
        for d in k.range(0, nbytes, _VECTOR_NBYTES):
            y.at(d).store(b.scratch.merged(row).at(d).load(f32.x(PAGE)) / total)
