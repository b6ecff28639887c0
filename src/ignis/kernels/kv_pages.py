"""The KV cache's pages and their writer.

A page holds 16 positions of one key head: K transposed, so that scores have lanes = keys, then V
row by row, so that weighted values have lanes = dimensions. Both halves have the same size.

    page of key head h, page p = base + (h * n_pages + p) * page_nbytes
    f16, f32   | K: [C][16 keys]                          | V: [16 keys][C]                    |
    q8_0       | K: [C/32]{f16 d[16 keys], i8 q[32][16]}  | V: [16 keys]{f16 d[C/32], i8 q[C]} |

Position `pos` of slot `s` lies in page `pages[s * pages_per_slot + pos // 16]`, row `pos % 16`.

Rounding to q8_0 takes 32 values of a head at a time: d = f16(max|x| / 127), and with r = f32(d)
q = roundeven(x * (1 / r)), at most 127 in size. Where r is zero all q are. A NaN or an infinity
in x, or a d beyond f16, has q = 0 and a d that is not finite: the block reads as NaN. What is read
is r * q, which is exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ignis.errors import KernelError
from ignis.kernels.lang import Builder, Type, Value, f16, f32, i8, i16, i32, i64, kernel, ptr

PAGE = 16  # positions, and lanes of a score vector
BLOCK = 32  # values of q8_0 that share a scale


class KVType(ABC):
    """How keys and values are kept: everything that depends on it."""

    @abstractmethod
    def row_nbytes(self, head_dim: int) -> int:
        """Bytes of one key, or of one value."""

    @abstractmethod
    def store(
        self, k: Builder, keys: Value, values: Value, row: Value, key: Value, value: Value,
        head_dim: int,
    ) -> None:  # fmt: skip
        """Round a key and a value, f32[C] each, into row `row` of a page's two halves."""

    @abstractmethod
    def columns(
        self, k: Builder, keys: Sequence[Value], head_dim: int
    ) -> Iterator[tuple[Value, list[Value]]]:
        """For each d in order: d, and element d of 16 keys of every page, f32; emits the loops."""

    @abstractmethod
    def vectors(
        self, k: Builder, values: Value, row: Value, first_d: Value, width: int, head_dim: int
    ) -> list[Value]:
        """`width` vectors of 16 elements of one value from `first_d` on, f32.

        `first_d` is a multiple of 16 times the width.
        """


class FloatKV(KVType):
    """Keys and values as floats."""

    def __init__(self, element: Type) -> None:
        self.element = element

    def row_nbytes(self, head_dim: int) -> int:
        return head_dim * self.element.nbytes

    def store(
        self, k: Builder, keys: Value, values: Value, row: Value, key: Value, value: Value,
        head_dim: int,
    ) -> None:  # fmt: skip
        nbytes = self.element.nbytes
        keys, values = keys.at(row * nbytes), values.at(row * (head_dim * nbytes))
        for first in k.range(0, head_dim, PAGE):
            rounded = key.at(first * f32.nbytes).load(f32.x(PAGE)).to(self.element)
            column = keys.at(first * (PAGE * nbytes))
            for lane in range(PAGE):
                column.at(lane * PAGE * nbytes).store(rounded.lane(lane))
            rounded = value.at(first * f32.nbytes).load(f32.x(PAGE)).to(self.element)
            values.at(first * nbytes).store(rounded)

    def columns(
        self, k: Builder, keys: Sequence[Value], head_dim: int
    ) -> Iterator[tuple[Value, list[Value]]]:
        vector = self.element.x(PAGE)
        for d in k.range(head_dim):
            yield d, [page.at(d * vector.nbytes).load(vector).to(f32) for page in keys]

    def vectors(
        self, k: Builder, values: Value, row: Value, first_d: Value, width: int, head_dim: int
    ) -> list[Value]:
        place = values.at((row * head_dim + first_d) * self.element.nbytes)
        vector = self.element.x(PAGE)
        return [place.at(i * vector.nbytes).load(vector).to(f32) for i in range(width)]


class Q8KV(KVType):
    """Keys and values as bytes, with a scale for 32 of them."""

    def row_nbytes(self, head_dim: int) -> int:
        if head_dim % BLOCK:
            raise KernelError("a head is no whole number of blocks", where="q8_0 cache",
                              got=f"head_dim {head_dim}", wanted=f"a multiple of {BLOCK}",
                              hint="take f16")  # fmt: skip
        return head_dim // BLOCK * (f16.nbytes + BLOCK)

    def store(
        self, k: Builder, keys: Value, values: Value, row: Value, key: Value, value: Value,
        head_dim: int,
    ) -> None:  # fmt: skip
        values = values.at(row * self.row_nbytes(head_dim))
        for block in k.range(head_dim // BLOCK):
            d, halves = _quantized(k, key.at(block * (BLOCK * f32.nbytes)))
            column = keys.at(block * self._columns_nbytes)
            column.at(row * f16.nbytes).store(d)
            for i, half in enumerate(halves):
                for lane in range(PAGE):
                    at = PAGE * f16.nbytes + (i * PAGE + lane) * PAGE
                    column.at(row + at).store(half.lane(lane))
            d, halves = _quantized(k, value.at(block * (BLOCK * f32.nbytes)))
            values.at(block * f16.nbytes).store(d)
            for i, half in enumerate(halves):
                place = head_dim // BLOCK * f16.nbytes + i * PAGE
                values.at(block * BLOCK + place).store(half)

    def columns(
        self, k: Builder, keys: Sequence[Value], head_dim: int
    ) -> Iterator[tuple[Value, list[Value]]]:
        for block in k.range(head_dim // BLOCK):
            columns = [page.at(block * self._columns_nbytes) for page in keys]
            scales = [column.load(f16.x(PAGE)).to(f32) for column in columns]
            bytes_ = [column.at(PAGE * f16.nbytes) for column in columns]
            for d in k.range(BLOCK):
                loaded = [place.at(d * PAGE).load(i8.x(PAGE)) for place in bytes_]
                yield block * BLOCK + d, [
                    q.to(i32).to(f32) * scale for q, scale in zip(loaded, scales, strict=True)
                ]

    def vectors(
        self, k: Builder, values: Value, row: Value, first_d: Value, width: int, head_dim: int
    ) -> list[Value]:
        values = values.at(row * self.row_nbytes(head_dim))
        found: list[Value] = []
        scale = None
        for i in range(width):
            d = first_d + i * PAGE
            if scale is None or i % 2 == 0 or width % 2:  # two vectors share one
                bits = values.at(d // BLOCK * f16.nbytes).load(i16).splat(PAGE)
                scale = bits.bits(f16.x(PAGE)).to(f32)
            q = values.at(d + head_dim // BLOCK * f16.nbytes).load(i8.x(PAGE))
            found.append(q.to(i32).to(f32) * scale)
        return found

    @property
    def _columns_nbytes(self) -> int:
        """Bytes of 32 dimensions of 16 keys."""
        return PAGE * (f16.nbytes + BLOCK)


def _quantized(k: Builder, x: Value) -> tuple[Value, list[Value]]:
    """The scale, f16, and 2 x 16 bytes of 32 values, as the module's docstring defines them."""
    vector = f32.x(PAGE)
    halves = [x.at(i * vector.nbytes).load(vector) for i in range(2)]
    largest = k.tree_max(k.maximum(*(k.absolute(half) for half in halves))).splat(PAGE)
    d = (largest / k.const(vector, 127.0)).to(f16)
    r = d.to(f32)
    usable = (r > 0.0) & (r < float("inf"))
    inverse = 1.0 / k.select(usable, r, 1.0)
    found = []
    for half in halves:
        q = k.round_even(k.select(usable, half, 0.0) * inverse)
        q = k.select(q > 127.0, 127.0, k.select(q < -127.0, -127.0, q))
        found.append(q.to(i32).to(i8))
    return d.lane(0), found


_KV_TYPES: dict[str, KVType] = {"f32": FloatKV(f32), "f16": FloatKV(f16), "q8_0": Q8KV()}


def page_nbytes(head_dim: int, kv_type: str = "f16") -> int:
    """The size of a page of one key head: 16 keys and 16 values."""
    return 2 * PAGE * find_kv_type(kv_type).row_nbytes(head_dim)


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
    kind = check_head_dim(head_dim, kv_type)
    table = PageTable(builder, base, pages, pages_per_slot, n_pages, head_dim, kind)
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
    page, row = table.page(slot, head, position // PAGE), position % PAGE
    values = page.at(table.half_nbytes)
    table.kv_type.store(builder, page, values, row, k, v, table.head_dim)


class PageTable(NamedTuple):
    """Where the cache of one layer lies, and how its pages are read."""

    k: Builder
    base: Value
    pages: Value
    pages_per_slot: Value
    n_pages: Value
    head_dim: int
    kv_type: KVType

    @property
    def half_nbytes(self) -> int:
        """The offset of V inside a page."""
        return PAGE * self.kv_type.row_nbytes(self.head_dim)

    def page(self, slot: Value, head: Value, index: Value) -> Value:
        """The address of a slot's page number `index` of one key head."""
        number = self.pages.at((slot * self.pages_per_slot + index) * 4).load(i32).to(i64)
        return self.base.at((head * self.n_pages + number) * (2 * self.half_nbytes))

    def columns(self, pages: Sequence[Value]) -> Iterator[tuple[Value, list[Value]]]:
        """For each d in order: d, and element d of 16 keys of every page, f32."""
        return self.kv_type.columns(self.k, pages, self.head_dim)

    def vectors(self, page: Value, row: Value, first_d: Value, width: int) -> list[Value]:
        """Elements `first_d` and on of a page's value number `row`, f32, `width` vectors of 16."""
        values = page.at(self.half_nbytes)
        return self.kv_type.vectors(self.k, values, row, first_d, width, self.head_dim)


def check_head_dim(head_dim: int, kv_type: str) -> KVType:
    """The cache type, if heads of that width may be kept as such."""
    if head_dim <= 0 or head_dim % PAGE:
        raise KernelError(
            "attention needs heads of whole vectors", got=f"head_dim {head_dim}",
            wanted=f"a multiple of {PAGE}",
        )  # fmt: skip
    kind = find_kv_type(kv_type)
    kind.row_nbytes(head_dim)
    return kind


def find_kv_type(name: str) -> KVType:
    if name not in _KV_TYPES:
        raise KernelError("unknown cache type", got=name, wanted=", ".join(_KV_TYPES))
    return _KV_TYPES[name]
