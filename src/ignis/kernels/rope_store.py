"""Rope and the KV cache's writer in one: rotated keys go from registers' reach to their page."""

from __future__ import annotations

from ignis.kernels.kv_pages import PageTable, find_kv_type, store_head
from ignis.kernels.lang import Builder, Value, f32, i32, i64, kernel, ptr
from ignis.kernels.rope import rotate_head


def rope_store_scratch_nbytes(head_dim: int) -> int:
    """Scratch of `rope_store`: one rotated key."""
    return head_dim * f32.nbytes


@kernel(q=ptr, k=ptr, v=ptr, y=ptr, table=ptr, base=ptr, positions=ptr, slots=ptr, pages=ptr,
        pages_per_slot=i64, n_pages=i64, n_heads=i64, n_kv_heads=i64)  # fmt: skip
def rope_store(
    builder: Builder, *, q: Value, k: Value, v: Value, y: Value, table: Value, base: Value,
    positions: Value, slots: Value, pages: Value, pages_per_slot: Value, n_pages: Value,
    n_heads: Value, n_kv_heads: Value, begin: Value, end: Value, scratch: Value,
    head_dim: int, n_rot: int, style: str, kv_type: str = "f16",
) -> None:  # fmt: skip
    """y = rope(q), and rope(k) and v stored in the cache; q, y: f32[T, H*C], k, v: [T, K*C].

    Rotation as in `rope`, pages as in `kv_store`, in the same bits. A unit is a token; y may be q.
    `scratch` holds one head of f32.
    """
    kind = find_kv_type(kv_type)
    cache = PageTable(builder, base, pages, pages_per_slot, n_pages, head_dim, kind)
    head_nbytes = head_dim * f32.nbytes
    for token in builder.range(begin, end):
        position = positions.at(token * 4).load(i32).to(i64)
        slot = slots.at(token * 4).load(i32).to(i64)
        turn = table.at(position * (n_rot * f32.nbytes))
        for head in builder.range(n_heads):
            offset = (token * n_heads + head) * head_nbytes
            rotate_head(builder, q.at(offset), y.at(offset), turn, head_dim, n_rot, style)
        for head in builder.range(n_kv_heads):
            offset = (token * n_kv_heads + head) * head_nbytes
            rotate_head(builder, k.at(offset), scratch, turn, head_dim, n_rot, style)
            store_head(builder, cache, slot, head, position, scratch, v.at(offset))
