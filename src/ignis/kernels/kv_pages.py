"""The KV cache's pages and their writer.

A page holds 16 positions of one key head: K transposed, so that scores have lanes = keys, then V
row by row, so that weighted values have lanes = dimensions.

    page of key head h, page p = base + (h * n_pages + p) * page_nbytes
    0                              2 * 16 * C                     2 * 2 * 16 * C
    | K: f16 [C][16 keys]          | V: f16 [16 keys][C]          |

Position `pos` of slot `s` lies in page `pages[s * pages_per_slot + pos // 16]`, row `pos % 16`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ignis.errors import KernelError
from ignis.kernels.lang import Builder, Type, Value, f16, f32, i32, i64, kernel, ptr

PAGE = 16  # positions, and lanes of a score vector
_KV_TYPES = {"f16": f16}


def page_nbytes(head_dim: int, kv_type: str = "f16") -> int:
    """The size of a page of one key head: 16 keys and 16 values."""
    return 2 * PAGE * head_dim * kv_element(kv_type).nbytes


@kernel(k=ptr, v=ptr, base=ptr, positions=ptr, slots=ptr, pages=ptr,
        pages_per_slot=i64, n_pages=i64, n_kv_heads=i64)  # fmt: skip
def kv_store(
    builder: Builder, *, k: Value, v: Value, base: Value, positions: Value, slots: Value,
    pages: Value, pages_per_slot: Value, n_pages: Value, n_kv_heads: Value,
    begin: Value, end: Value, scratch: Value, head_dim: int, kv_type: str = "f16",
) -> None:  # fmt: skip
    """Round each token's K and V, f32[T, K*C], to the cache type and store them in their page.

    A unit is a token.
    """
    check_head_dim(head_dim)
    element = kv_element(kv_type)
    table = PageTable(builder, base, pages, pages_per_slot, n_pages, head_dim, element)
    for token in builder.range(begin, end):
        position = positions.at(token * 4).load(i32).to(i64)
        slot = slots.at(token * 4).load(i32).to(i64)
        for head in builder.range(n_kv_heads):
            offset = (token * n_kv_heads + head) * (head_dim * f32.nbytes)
            store_head(builder, table, slot, head, position, k.at(offset), v.at(offset))


def store_head(
    builder: Builder, table: PageTable, slot: Value, head: Value, position: Value,
    k: Value, v: Value,
) -> None:  # fmt: skip
    """Round one key and one value, f32[C] each, to the cache type and store them in their page."""
    head_dim, element = table.head_dim, table.element
    page, row = table.page(slot, head, position // PAGE), position % PAGE
    keys = page.at(row * element.nbytes)
    values = page.at(table.values_at + row * (head_dim * element.nbytes))
    for first in builder.range(0, head_dim, PAGE):
        key = k.at(first * f32.nbytes).load(f32.x(PAGE)).to(element)
        column = keys.at(first * (PAGE * element.nbytes))
        for lane in range(PAGE):
            column.at(lane * PAGE * element.nbytes).store(key.lane(lane))
        value = v.at(first * f32.nbytes).load(f32.x(PAGE)).to(element)
        values.at(first * element.nbytes).store(value)


@dataclass(frozen=True, slots=True)
class PageTable:
    """Where the cache of one layer lies."""

    k: Builder
    base: Value
    pages: Value
    pages_per_slot: Value
    n_pages: Value
    head_dim: int
    element: Type

    @property
    def values_at(self) -> int:
        """The offset of V inside a page."""
        return PAGE * self.head_dim * self.element.nbytes

    def page(self, slot: Value, head: Value, index: Value) -> Value:
        """The address of a slot's page number `index` of one key head."""
        number = self.pages.at((slot * self.pages_per_slot + index) * 4).load(i32).to(i64)
        return self.base.at((head * self.n_pages + number) * (2 * self.values_at))

    def keys(self, page: Value, d: Value) -> Value:
        """Element `d` of a page's 16 keys, f32."""
        place = page.at(d * (PAGE * self.element.nbytes))
        return place.load(self.element.x(PAGE)).to(f32)

    def values(self, page: Value, row: Value, d: Value | int) -> Value:
        """Elements `d` to `d` + 15 of a page's value number `row`, f32."""
        place = page.at(self.values_at + row * (self.head_dim * self.element.nbytes))
        return place.at(d * self.element.nbytes).load(self.element.x(PAGE)).to(f32)


def check_head_dim(head_dim: int) -> None:
    if head_dim <= 0 or head_dim % PAGE:
        raise KernelError(
            "attention needs heads of whole vectors", got=f"head_dim {head_dim}",
            wanted=f"a multiple of {PAGE}",
        )  # fmt: skip


def kv_element(kv_type: str) -> Type:
    if kv_type not in _KV_TYPES:
        raise KernelError("unknown cache type", got=kv_type, wanted=", ".join(_KV_TYPES))
    return _KV_TYPES[kv_type]
