"""Attention of a step's tokens over the KV cache (NUMERICS 6).

Queries of one slot at consecutive positions are taken together (`attention_block`); a query that
is alone reads keys and values directly. What a query computes, and in which order, is the same.
"""

from __future__ import annotations

from ignis.kernels.attention_block import Block, Scratch, attend_block, block_queries
from ignis.kernels.kv_pages import PageTable, check_head_dim
from ignis.kernels.lang import Builder, Value, f32, i32, i64, kernel, ptr
from ignis.kernels.segments import (
    SEGMENT,
    Keys,
    Rows,
    attend_segment,
    copy_row,
    finish_row,
    merge_row,
    row_nbytes,
)


def attend_scratch_nbytes(group: int, head_dim: int) -> int:
    """Scratch of one `attend`."""
    return Scratch.size(group, head_dim)


@kernel(q=ptr, y=ptr, base=ptr, positions=ptr, slots=ptr, pages=ptr, pages_per_slot=i64,
        n_pages=i64, n_heads=i64, n_kv_heads=i64, n_tokens=i64, scale=f32)  # fmt: skip
def attend(
    k: Builder, *, q: Value, y: Value, base: Value, positions: Value, slots: Value,
    pages: Value, pages_per_slot: Value, n_pages: Value, n_heads: Value, n_kv_heads: Value,
    n_tokens: Value, scale: Value, begin: Value, end: Value, scratch: Value,
    head_dim: int, group: int, kv_type: str = "f16", window: int = 0, softcap: float = 0.0,
) -> None:  # fmt: skip
    """Each query head's softmax-weighted mean of the values at positions 0 to its own.

    With a `window` only its last positions, the own included, are seen; segments that lie outside
    altogether are not merged. With a `softcap` scores become softcap * tanh(score / softcap).

    q and y are f32[T, H*C]; y may be q. Unit u is token T - 1 - u % T, so that the longest come
    first, and the chunk u // T of `group` query heads, which share one key head: `group` divides
    H / K. The keys of the step's own tokens must already be stored. `scratch` holds
    `attend_scratch_nbytes(group, head_dim)` bytes.
    """
    kind = check_head_dim(head_dim, kv_type)
    table = PageTable(k, base, pages, pages_per_slot, n_pages, head_dim, kind)
    unit = k.var(begin)
    for _ in k.loop(lambda: unit.get() < end):
        chunk, behind = unit.get() // n_tokens, unit.get() % n_tokens
        last = n_tokens - 1 - behind
        left = k.minimum(end - unit.get(), last + 1)
        n_queries = _block_size(k, positions.at(last * 4), slots.at(last * 4), left, group)
        token = last + 1 - n_queries
        position = positions.at(token * 4).load(i32).to(i64)
        slot = slots.at(token * 4).load(i32).to(i64)
        offset = (token * n_heads + chunk * group) * (head_dim * f32.nbytes)
        block = Block(
            table, slot, chunk * group * n_kv_heads // n_heads, position, n_queries,
            q.at(offset), y.at(offset), n_heads * (head_dim * f32.nbytes), scale,
            Scratch(scratch, group, head_dim), group, window, softcap,
        )  # fmt: skip
        for _ in k.when(n_queries == 1):
            _attend_one(block)
        for _ in k.when(n_queries > 1):
            attend_block(block)
        unit.set(unit.get() + n_queries)


def _block_size(
    k: Builder, positions: Value, slots: Value, n_tokens: Value, group: int
) -> Value:
    """How many tokens up to this one are a block: one slot, consecutive positions."""
    position, slot = positions.load(i32), slots.load(i32)
    limit = k.minimum(n_tokens, position.to(i64) % block_queries(group) + 1)
    size = k.var(k.const(i64, 1))
    for i in k.range(1, limit):
        precedes = slots.at(i * -4).load(i32) == slot
        precedes = precedes & (positions.at(i * -4).load(i32) == position - i.to(i32))
        precedes = precedes & (size.get() == i)
        size.set(size.get() + precedes.zext(i64))
    return size.get()


def _attend_one(b: Block) -> None:
    """A block of one query, whose keys and values are worth no tile."""
    k, head_dim, visible = b.k, b.table.head_dim, b.visible(0)
    zero = k.const(i64, 0)
    nbytes = k.const(i64, row_nbytes(head_dim))
    here, merged = (
        Rows(place, nbytes) for place in (b.scratch.sums(zero), b.scratch.merged(zero))
    )
    first = visible.first_segment
    for segment in k.range(first, b.position + 1, SEGMENT):
        keys = Keys(b.table, b.slot, b.head, visible, segment)
        attend_segment(keys, b.q, b.scale, b.scratch.base, here, b.group, b.softcap)
        for head in k.range(b.group):
            for _ in k.when(segment == first):
                copy_row(k, merged.at(head), here.at(head), head_dim)
            for _ in k.when(segment != first):
                merge_row(k, merged.at(head), here.at(head), head_dim)
    for head in k.range(b.group):
        finish_row(k, merged.at(head), b.y.at(head * (head_dim * f32.nbytes)), head_dim)
