"""What the attention kernels share: a query's keys, and attention over one segment of them.

Keys are taken in segments of 256 by absolute position, each with a maximum of its own, so that a
result does not depend on where a step or a unit of work begins (NUMERICS 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ignis.kernels import math
from ignis.kernels.kv_pages import PAGE, PageTable
from ignis.kernels.lang import Builder, Value, f32, i32, i64
from ignis.kernels.register_tiles import Sums, divisors, widest_tiles

SEGMENT = 256  # keys that share one maximum
_PAGES_AHEAD = 4  # that are asked for; heads that do not fit the registers together take turns


class Visible(NamedTuple):
    """The positions that a query sees: those from 0 to `last`, or the last `window` of them."""

    k: Builder
    last: Value
    window: int = 0

    @property
    def first(self) -> Value:
        """The first position that is seen."""
        zero = self.k.const(i64, 0)
        return self.k.maximum(self.last - (self.window - 1), zero) if self.window else zero

    @property
    def first_segment(self) -> Value:
        """The first position of the segment that holds `first`."""
        return self.first // SEGMENT * SEGMENT

    def begin(self, segment: Value) -> Value:
        """The first key that is seen, counted from the segment's first; it may lie behind it."""
        zero = self.k.const(i64, 0)
        return self.k.maximum(self.first - segment, zero) if self.window else zero

    def end(self, segment: Value) -> Value:
        """One more than the last key that is seen, counted from the segment's first."""
        return self.k.minimum(self.last + 1 - segment, self.k.const(i64, SEGMENT))


class Keys(NamedTuple):
    """What one query sees of one segment of one key head; keys are counted from its first."""

    table: PageTable
    slot: Value
    head: Value
    visible: Visible
    segment: Value

    @property
    def begin(self) -> Value:
        return self.visible.begin(self.segment)

    @property
    def end(self) -> Value:
        return self.visible.end(self.segment)

    def page(self, index: Value) -> Value:
        """The address of page number `index` of the segment."""
        return self.table.page(self.slot, self.head, self.segment // PAGE + index)


def row_nbytes(head_dim: int) -> int:
    """The size of a row: what one head knows of one or more segments, f32 | o[C] | m | l | pad."""
    return (head_dim + PAGE) * f32.nbytes


class Rows(NamedTuple):
    """A row a head, `stride` bytes apart."""

    first: Value
    stride: Value

    def at(self, head: Value | int) -> Value:
        return self.first.at(self.stride * head)


class Scale(NamedTuple):
    """What makes a score of a product: times `factor`, then capped where there is a cap."""

    factor: Value
    softcap: float


def segment_scratch_nbytes(group: int) -> int:
    """Scratch of one `attend_segment`: a segment's scores and their maxima by lane, a head each."""
    return group * (SEGMENT + PAGE) * f32.nbytes


def attend_segment(
    keys: Keys, q: Value, scale: Value, scratch: Value, rows: Rows, group: int, softcap: float
) -> None:
    """One query, `group` heads of it, f32[C] each at `q`, over one segment, into a row each.

    `scratch` holds `segment_scratch_nbytes(group)` bytes: scores f32 [group][256], then the
    largest f32 [group][16].
    """
    k, head_dim = keys.table.k, keys.table.head_dim
    largest = scratch.at(group * SEGMENT * f32.nbytes)
    for i in k.range(group):
        largest.at(i * (PAGE * f32.nbytes)).store(k.const(f32.x(PAGE), float("-inf")))
    _scores(keys, q, Scale(scale, softcap), scratch, largest, group)
    for i in k.range(group):
        scores, row = scratch.at(i * (SEGMENT * f32.nbytes)), rows.at(i)
        lanes = largest.at(i * (PAGE * f32.nbytes)).load(f32.x(PAGE))
        maximum = k.tree(lanes, lambda a, b: larger(k, a, b))
        total = k.tree_sum(lane_weights(k, scores, keys.begin, keys.end, maximum))
        row.at(head_dim * f32.nbytes).store(maximum)
        row.at((head_dim + 1) * f32.nbytes).store(total)
        for at in k.range(0, head_dim * f32.nbytes, PAGE * f32.nbytes):
            row.at(at).store(k.const(f32.x(PAGE), 0.0))
    _weighted_sums(keys, scratch, rows, group)


def merge_row(k: Builder, row: Value, later: Value, head_dim: int) -> None:
    """Merge the row of a segment into that of the segments before it."""
    m_at, l_at = head_dim * f32.nbytes, (head_dim + 1) * f32.nbytes
    merged, a1, a2 = merge_factors(k, row.at(m_at).load(f32), later.at(m_at).load(f32))
    row.at(m_at).store(merged)
    row.at(l_at).store(k.fma(row.at(l_at).load(f32), a1, later.at(l_at).load(f32) * a2))
    old, new = a1.splat(PAGE), a2.splat(PAGE)
    for d in k.range(0, head_dim * f32.nbytes, PAGE * f32.nbytes):
        before, here = row.at(d).load(f32.x(PAGE)), later.at(d).load(f32.x(PAGE))
        row.at(d).store(k.fma(before, old, here * new))


def copy_row(k: Builder, row: Value, source: Value, head_dim: int) -> None:
    for at in k.range(0, row_nbytes(head_dim), PAGE * f32.nbytes):
        row.at(at).store(source.at(at).load(f32.x(PAGE)))


def finish_row(k: Builder, row: Value, y: Value, head_dim: int) -> None:
    """y = o / l."""
    total = row.at((head_dim + 1) * f32.nbytes).load(f32).splat(PAGE)
    for d in k.range(0, head_dim * f32.nbytes, PAGE * f32.nbytes):
        y.at(d).store(row.at(d).load(f32.x(PAGE)) / total)


def merge_factors(k: Builder, m1: Value, m2: Value) -> tuple[Value, Value, Value]:
    """The maximum of two runs of segments, and what to scale each of them by."""
    merged = k.maximum(m1, m2)
    return merged, math.exp_nonpositive(k, m1 - merged), math.exp_nonpositive(k, m2 - merged)


def keep_scores(
    k: Builder, products: Sequence[Value], scale: Scale, seen: Sequence[Value] | None,
    scores: Value, largest: Value,
) -> None:  # fmt: skip
    """Store the scores of 16 keys each, and fold them into `largest`, by key modulo 16.

    Where a key is not `seen` its score is minus infinity. NaNs may be lost from the maxima: they
    come back in the weights. All this happens while scores are in registers: masking them in memory
    would be a masked store, from which processors do not forward what is read again.
    """
    vector = f32.x(PAGE)
    most = largest.load(vector)
    for i, product in enumerate(products):
        score = product * scale.factor.splat(PAGE)
        if scale.softcap:
            score = math.softcap(k, score, k.const(vector, scale.softcap))
        if seen:
            score = k.select(seen[i], score, float("-inf"))
        scores.at(i * vector.nbytes).store(score)
        most = larger(k, score, most)
    largest.store(most)


def seen_lanes(k: Builder, begin: Value | None, end: Value, page: Value) -> Value:
    """Which keys of page number `page` lie from `begin` on, if given, and before `end`."""
    lanes = k.const(i32.x(PAGE), list(range(PAGE)))
    seen = lanes < (end - page * PAGE).to(i32).splat(PAGE)
    if begin is None:
        return seen
    return seen & (lanes >= (begin - page * PAGE).to(i32).splat(PAGE))


def lane_weights(k: Builder, scores: Value, begin: Value, end: Value, maximum: Value) -> Value:
    """Replace scores by exp(score - maximum); their sums by key modulo 16.

    Two pages at a time: the products of one wait for each other.
    """
    vector = f32.x(PAGE)
    sums = k.var(k.const(vector, 0.0))
    peak = maximum.splat(PAGE)

    def weigh(key: Value, n_pages: int) -> None:
        places = [scores.at(key * f32.nbytes + i * vector.nbytes) for i in range(n_pages)]
        weights = [math.exp_nonpositive(k, place.load(vector) - peak) for place in places]
        for place, weight in zip(places, weights, strict=True):
            place.store(weight)
            sums.set(sums.get() + weight)

    first = begin - begin % PAGE
    last = first + (end - first - 1) // (2 * PAGE) * (2 * PAGE)
    for key in k.range(first, last, 2 * PAGE):
        weigh(key, 2)
    for key in k.range(last, end, PAGE):
        weigh(key, 1)
    return sums.get()


def larger(k: Builder, a: Value, b: Value) -> Value:
    """The larger lane; where one is NaN, `b`."""
    return k.select(a > b, a, b)


def _scores(
    keys: Keys, q: Value, scale: Scale, scores: Value, largest: Value, group: int
) -> None:
    """scores[head][key] = (q . key) * scale over the segment, several pages at once.

    Past the last page it is read again in place of pages that are not there: none of their keys
    is seen.
    """
    k, visible = keys.table.k, keys.visible
    tiles = widest_tiles(k, group, (1, 2, 4))
    at_once = max(width for _, width in tiles)
    first, last = keys.begin // PAGE, (keys.end - 1) // PAGE
    begin = keys.begin if visible.window else None
    for index in k.range(first - first % at_once, last + 1, at_once):
        for heads, width in tiles:
            for page in k.range(index, k.minimum(index + at_once, last + 1), width):
                seen = [seen_lanes(k, begin, keys.end, page + i) for i in range(width)]
                for head, row in zip(heads, _products(keys, q, page, heads, width), strict=True):
                    place = scores.at(page * (PAGE * f32.nbytes) + head * (SEGMENT * f32.nbytes))
                    most = largest.at(head * (PAGE * f32.nbytes))
                    keep_scores(k, row, scale, seen, place, most)


def _products(keys: Keys, q: Value, page: Value, heads: range, width: int) -> list[list[Value]]:
    """q . key for some heads and 16 keys of each of `width` pages."""
    k, head_dim = keys.table.k, keys.table.head_dim
    first, last = keys.begin // PAGE, (keys.end - 1) // PAGE
    indices = [k.minimum(page + i, last) for i in range(width)]
    pages = [keys.page(k.maximum(i, first) if keys.visible.window else i) for i in indices]
    ahead = [_keys_ahead(keys, page + _PAGES_AHEAD + i, first, last) for i in range(width)]
    sums = Sums(k, [[k.const(f32.x(PAGE), 0.0)] * width for _ in heads])
    for d, columns in keys.table.columns(pages):
        sums.add([q.at((d + head * head_dim) * f32.nbytes) for head in heads], columns)
        for place in ahead if heads[0] == 0 else ():
            k.prefetch(place.at(d * (keys.table.half_nbytes // head_dim)), level=2)
    return sums.get()


def _keys_ahead(keys: Keys, index: Value, first: Value, last: Value) -> Value:
    """Where the keys of a page begin, for asking for them; behind the last page the first values.

    The processor's own prefetching ends where the values behind a page's keys begin.
    """
    k = keys.table.k
    is_key = index <= last
    values = k.minimum(first + index - (last + 1), last)
    page = keys.page(k.select(is_key, index, values))
    return page.at(k.select(is_key, k.const(i64, 0), k.const(i64, keys.table.half_nbytes)))


def _values_ahead(keys: Keys, index: Value) -> Value:
    """Where the values of a page begin, for asking for them; behind the segment the next keys."""
    k = keys.table.k
    page = keys.page(k.minimum(index, (keys.visible.last - keys.segment) // PAGE))
    is_here = index < SEGMENT // PAGE
    return page.at(k.select(is_here, k.const(i64, keys.table.half_nbytes), k.const(i64, 0)))


def _weighted_sums(keys: Keys, weights: Value, rows: Rows, group: int) -> None:
    """Add weight * value to each head's row, keys ascending.

    Heads and dimensions that do not fit the registers together take turns, a few pages each, so
    that memory is read as evenly as possible.
    """
    k, head_dim = keys.table.k, keys.table.head_dim
    tiles = widest_tiles(k, group, divisors(head_dim // PAGE))
    is_whole = [width * PAGE for _, width in tiles] == [head_dim]
    n_keys = SEGMENT if is_whole else _PAGES_AHEAD * PAGE
    begin, end = keys.begin, keys.end
    for first in k.range(begin - begin % n_keys, end, n_keys):
        seen = k.maximum(begin, first), k.minimum(end, first + n_keys)
        for heads, width in tiles:
            for first_d in k.range(0, head_dim, width * PAGE):
                _add_values(keys, weights, rows, heads, seen, (first_d, width))


def _add_values(
    keys: Keys, weights: Value, rows: Rows, heads: range, seen: tuple[Value, Value],
    dimensions: tuple[Value, int],
) -> None:  # fmt: skip
    """Add weight * value for some keys, heads, and vectors of dimensions: the first, how many."""
    k, table, nbytes = keys.table.k, keys.table, PAGE * f32.nbytes
    (begin, end), (first_d, width) = seen, dimensions
    row_size = table.half_nbytes // PAGE
    # The first heads ask for what all of them read.
    lines = range(0, width * PAGE * row_size // table.head_dim, 64) if heads[0] == 0 else ()
    places = [
        [rows.at(head).at(first_d * f32.nbytes + i * nbytes) for i in range(width)]
        for head in heads
    ]
    sums = Sums(k, [[place.load(f32.x(PAGE)) for place in row] for row in places])
    for first in k.range(begin - begin % PAGE, end, PAGE):
        page = keys.page(first // PAGE)
        ahead = _values_ahead(keys, first // PAGE + _PAGES_AHEAD)
        ahead = ahead.at(first_d * row_size // table.head_dim)
        row_begin = k.const(i64, 0)
        if keys.visible.window:
            row_begin = k.maximum(begin - first, row_begin)
        for row in k.range(row_begin, k.minimum(end - first, k.const(i64, PAGE))):
            numbers = [
                weights.at((first + row + head * SEGMENT) * f32.nbytes) for head in heads
            ]
            sums.add(numbers, table.vectors(page, row, first_d, width))
            for line in lines:
                k.prefetch(ahead.at(row * row_size + line), level=2)
    for row_places, row_sums in zip(places, sums.get(), strict=True):
        for place, total in zip(row_places, row_sums, strict=True):
            place.store(total)
