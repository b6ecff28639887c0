"""Attention of a single token, cut at segments of 256 positions: a long context for all threads.

A unit is one chunk of heads and one segment. It leaves the segment's maximum, sum and weighted
values in `partials`; whoever finishes the last segment of a chunk merges them, in ascending order
and by the same formula as `attention.attend`, so the bits are the same and no barrier is needed.

    partials: [H][max_segments], a row each (`segments.row_nbytes`)
"""

from __future__ import annotations

from ignis.kernels.kv_pages import PageTable, check_head_dim
from ignis.kernels.lang import Builder, Value, f32, i32, i64, kernel, ptr
from ignis.kernels.segments import (
    SEGMENT,
    Keys,
    Rows,
    Visible,
    attend_segment,
    finish_row,
    merge_row,
    row_nbytes,
    segment_scratch_nbytes,
)


def partials_nbytes(n_heads: int, n_ctx: int, head_dim: int) -> int:
    """The size of `partials` for contexts of up to `n_ctx` positions."""
    return n_heads * max_segments(n_ctx) * row_nbytes(head_dim)


def max_segments(n_ctx: int) -> int:
    return -(-n_ctx // SEGMENT)


def attend_split_scratch_nbytes(group: int) -> int:
    """Scratch of one `attend_split`."""
    return segment_scratch_nbytes(group)


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
    kind = check_head_dim(head_dim, kv_type)
    table = PageTable(k, base, pages, pages_per_slot, n_pages, head_dim, kind)
    position = positions.load(i32).to(i64)
    slot = slots.load(i32).to(i64)
    nbytes = row_nbytes(head_dim)
    visible = Visible(k, position, window)
    first = visible.first // SEGMENT
    for unit in k.range(begin, end):
        chunk, segment = unit // n_segments, unit % n_segments
        kv_head = chunk * group * n_kv_heads // n_heads
        keys = Keys(table, slot, kv_head, visible, segment * SEGMENT)
        offset = chunk * (group * head_dim * f32.nbytes)
        rows = Rows(partials.at(chunk * group * max_segments * nbytes), max_segments * nbytes)
        here = Rows(rows.first.at(segment * nbytes), rows.stride)
        if window:
            for _ in k.when(segment >= first):
                attend_segment(keys, q.at(offset), scale, scratch, here, group, softcap)
        else:
            attend_segment(keys, q.at(offset), scale, scratch, here, group, softcap)
        count = k.fetch_add(arrived.at(chunk * 8), k.const(i64, 1))
        for _ in k.when(count + 1 == n_segments):
            arrived.at(chunk * 8).store(k.const(i64, 0), align=8)
            for head in k.range(group):
                merged = rows.at(head).at(first * nbytes)
                for later in k.range(first + 1, n_segments):
                    merge_row(k, merged, rows.at(head).at(later * nbytes), head_dim)
                finish_row(k, merged, y.at(offset + head * (head_dim * f32.nbytes)), head_dim)
