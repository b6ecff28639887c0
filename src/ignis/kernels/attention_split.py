"""Attention of a single token, cut at segments of 256 positions: a long context for all threads.

A unit is one chunk of heads and one segment. It leaves the segment's maximum, sum and weighted
values in `partials`; whoever finishes the last segment of a chunk merges them, in ascending order
and by the same formula as `attention.attend`, so the bits are the same and no barrier is needed.

    partials: f32 [H][max_segments][C + 16], a row | o[C] | m | l | unused |
"""

from __future__ import annotations

from ignis.kernels import math
from ignis.kernels.attention import (
    PAGE,
    SEGMENT,
    Keys,
    PageTable,
    check_head_dim,
    kv_element,
    scores_of_segment,
    softmax_of_segment,
    value_tiles,
    weighted_sum,
)
from ignis.kernels.lang import Builder, Value, f32, i32, i64, kernel, ptr


def partials_nbytes(n_heads: int, n_ctx: int, head_dim: int) -> int:
    """The size of `partials` for contexts of up to `n_ctx` positions."""
    return n_heads * max_segments(n_ctx) * (head_dim + PAGE) * f32.nbytes


def max_segments(n_ctx: int) -> int:
    return -(-n_ctx // SEGMENT)


@kernel(q=ptr, y=ptr, base=ptr, positions=ptr, slots=ptr, pages=ptr, pages_per_slot=i64,
        n_pages=i64, n_heads=i64, n_kv_heads=i64, scale=f32, partials=ptr, arrived=ptr,
        n_segments=i64, max_segments=i64)  # fmt: skip
def attend_split(
    k: Builder, *, q: Value, y: Value, base: Value, positions: Value, slots: Value,
    pages: Value, pages_per_slot: Value, n_pages: Value, n_heads: Value, n_kv_heads: Value,
    scale: Value, partials: Value, arrived: Value, n_segments: Value, max_segments: Value,
    begin: Value, end: Value, scratch: Value, head_dim: int, group: int, kv_type: str = "f16",
    window: int = 0, softcap: float = 0.0,
) -> None:  # fmt: skip
    """`attend` for one token. Unit u is chunk u // n_segments and segment u % n_segments.

    `arrived` is i64 a chunk, zero before and after. y may be q: it is written when all segments of
    the chunk have read it.
    """
    check_head_dim(head_dim)
    table = PageTable(k, base, pages, pages_per_slot, n_pages, head_dim, kv_element(kv_type))
    position = positions.load(i32).to(i64)
    slot = slots.load(i32).to(i64)
    row_nbytes = (head_dim + PAGE) * f32.nbytes
    for unit in k.range(begin, end):
        chunk, segment = unit // n_segments, unit % n_segments
        kv_head = chunk * group * n_kv_heads // n_heads
        keys = Keys(table, slot, kv_head, position, window, softcap)
        offset = chunk * (group * head_dim * f32.nbytes)
        rows = [
            partials.at((chunk * group + head) * max_segments * row_nbytes)
            for head in range(group)
        ]
        here = [row.at(segment * row_nbytes) for row in rows]
        first = keys.first // SEGMENT
        if window:
            for _ in k.when(segment >= first):
                _segment(k, q.at(offset), keys, segment * SEGMENT, scale, scratch, here)
        else:
            _segment(k, q.at(offset), keys, segment * SEGMENT, scale, scratch, here)
        count = k.fetch_add(arrived.at(chunk * 8), k.const(i64, 1))
        for _ in k.when(count + 1 == n_segments):
            arrived.at(chunk * 8).store(k.const(i64, 0), align=8)
            for head, row in enumerate(rows):
                out = y.at(offset + head * head_dim * f32.nbytes)
                _merge(k, row.at(first * row_nbytes), row_nbytes, n_segments - first, out, head_dim)


def _segment(
    k: Builder, q: Value, keys: Keys, first: Value, scale: Value, scratch: Value,
    rows: list[Value],
) -> None:  # fmt: skip
    """One segment of a chunk of heads, into a row of `partials` each."""
    head_dim, group = keys.table.head_dim, len(rows)
    scores_of_segment(k, q, keys, first, scale, scratch, group)
    for head, row in enumerate(rows):
        scores = scratch.at(head * SEGMENT * f32.nbytes)
        maximum, total = softmax_of_segment(k, scores, first, keys)
        row.at(head_dim * f32.nbytes).store(maximum)
        row.at((head_dim + 1) * f32.nbytes).store(total)
    for dims in value_tiles(head_dim, group):
        chains = weighted_sum(k, keys, first, scratch, group, dims)
        for row, chain in zip(rows, chains, strict=True):
            for d, vector in zip(dims, chain, strict=True):
                row.at(d * f32.nbytes).store(vector)


def _merge(
    k: Builder, rows: Value, row_nbytes: int, n_segments: Value, y: Value, head_dim: int
) -> None:
    """Merge the segments of one head in ascending order (NUMERICS 6)."""
    m_at, l_at = head_dim * f32.nbytes, (head_dim + 1) * f32.nbytes
    m, total = k.var(rows.at(m_at).load(f32)), k.var(rows.at(l_at).load(f32))
    for segment in k.range(1, n_segments):
        row = rows.at(segment * row_nbytes)
        m1, l1 = m.get(), total.get()
        m2, l2 = row.at(m_at).load(f32), row.at(l_at).load(f32)
        merged = k.maximum(m1, m2)
        a1, a2 = math.exp(k, m1 - merged), math.exp(k, m2 - merged)
        m.set(merged)
        total.set(k.fma(l1, a1, l2 * a2))
        old, new = a1.splat(PAGE), a2.splat(PAGE)
        for d in range(0, head_dim * f32.nbytes, PAGE * f32.nbytes):
            # The first row collects the merged values.
            before, here = rows.at(d).load(f32.x(PAGE)), row.at(d).load(f32.x(PAGE))
            rows.at(d).store(k.fma(before, old, here * new))
    for d in range(0, head_dim * f32.nbytes, PAGE * f32.nbytes):
        y.at(d).store(rows.at(d).load(f32.x(PAGE)) / total.get().splat(PAGE))
