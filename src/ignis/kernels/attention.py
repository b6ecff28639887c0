"""The KV cache's writer, and attention over it (NUMERICS 6).

A page holds 16 positions of one key head: K transposed, so that scores have lanes = keys, then V
row by row, so that weighted values have lanes = dimensions.

    page of key head h, page p = base + (h * n_pages + p) * page_nbytes
    0                              2 * 16 * C                     2 * 2 * 16 * C
    | K: f16 [C][16 keys]          | V: f16 [16 keys][C]          |

Position `pos` of slot `s` lies in page `pages[s * pages_per_slot + pos // 16]`, row `pos % 16`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ignis.errors import KernelError
from ignis.kernels import math
from ignis.kernels.lang import Builder, Type, Value, f16, f32, i32, i64, kernel, ptr

PAGE = 16  # positions, and lanes of a score vector
SEGMENT = 256  # keys that share one maximum
_PAGES_AT_ONCE = 4  # score chains a head, enough to hide the latency of fma
_MAX_CHAINS = 24  # accumulators that still fit the registers beside their operands
_KV_TYPES = {"f16": f16}


def page_nbytes(head_dim: int, kv_type: str = "f16") -> int:
    """The size of a page of one key head: 16 keys and 16 values."""
    return 2 * PAGE * head_dim * kv_element(kv_type).nbytes


def attend_scratch_nbytes(group: int, head_dim: int = 256) -> int:
    """Scratch of one `attend`: scores of a segment and the values summed so far, a head each."""
    return group * (SEGMENT + head_dim) * f32.nbytes


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


@kernel(q=ptr, y=ptr, base=ptr, positions=ptr, slots=ptr, pages=ptr,
        pages_per_slot=i64, n_pages=i64, n_heads=i64, n_kv_heads=i64, scale=f32)  # fmt: skip
def attend(
    k: Builder, *, q: Value, y: Value, base: Value, positions: Value, slots: Value,
    pages: Value, pages_per_slot: Value, n_pages: Value, n_heads: Value, n_kv_heads: Value,
    scale: Value, begin: Value, end: Value, scratch: Value,
    head_dim: int, group: int, kv_type: str = "f16", window: int = 0, softcap: float = 0.0,
) -> None:  # fmt: skip
    """Each query head's softmax-weighted mean of the values at positions 0 to its own.

    With a `window` only its last positions, the own included, are seen; segments that lie outside
    altogether are not merged. With a `softcap` scores become softcap * tanh(score / softcap).

    q and y are f32[T, H*C]; y may be q. Unit u is token u // (H / group) and the chunk
    u % (H / group) of `group` query heads, which share one key head: `group` divides H / K.
    The keys of the step's own tokens must already be stored. `scratch` holds
    `attend_scratch_nbytes(group, head_dim)` bytes.
    """
    check_head_dim(head_dim)
    table = PageTable(k, base, pages, pages_per_slot, n_pages, head_dim, kv_element(kv_type))
    n_chunks = n_heads // group
    for unit in k.range(begin, end):
        token, chunk = unit // n_chunks, unit % n_chunks
        position = positions.at(token * 4).load(i32).to(i64)
        slot = slots.at(token * 4).load(i32).to(i64)
        head = chunk * group * n_kv_heads // n_heads
        offset = (token * n_heads + chunk * group) * (head_dim * f32.nbytes)
        keys = Keys(table, slot, head, position, window, softcap)
        _attend_unit(k, q.at(offset), y.at(offset), keys, scale, scratch, group)


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


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys and values that one query sees: positions up to `last` of one key head.

    Those from 0 on, or the last `window` of them; scores beyond `softcap` are bent to it.
    """

    table: PageTable
    slot: Value
    head: Value
    last: Value
    window: int = 0
    softcap: float = 0.0

    @property
    def first(self) -> Value:
        """The first position that is seen."""
        k = self.table.k
        if not self.window:
            return k.const(i64, 0)
        return k.maximum(self.last - (self.window - 1), k.const(i64, 0))

    def first_page(self, segment: Value) -> Value:
        """The first position, relative to the segment's, of a page that holds a seen key."""
        k = self.table.k
        if not self.window:
            return k.const(i64, 0)
        first = k.maximum(self.first - segment, k.const(i64, 0))
        return first - first % PAGE

    def page(self, index: Value) -> Value:
        return self.table.page(self.slot, self.head, index)


def _attend_unit(
    k: Builder, q: Value, y: Value, keys: Keys, scale: Value, scratch: Value, group: int
) -> None:
    head_dim = keys.table.head_dim
    outputs = scratch.at(group * SEGMENT * f32.nbytes)  # f32[group][C], unnormalized
    maxima = [k.var(k.const(f32, 0.0)) for _ in range(group)]
    sums = [k.var(k.const(f32, 0.0)) for _ in range(group)]
    begin = keys.first // SEGMENT * SEGMENT
    for first in k.range(begin, keys.last + 1, SEGMENT):
        scores_of_segment(k, q, keys, first, scale, scratch, group)
        old_factors, new_factors = [], []
        for head in range(group):
            row = scratch.at(head * SEGMENT * f32.nbytes)
            maximum, total = softmax_of_segment(k, row, first, keys)
            # The first segment has nothing before it; its factors are not used.
            m1, l1 = maxima[head].get(), sums[head].get()
            m = k.select(first == begin, maximum, k.maximum(m1, maximum))
            a1, a2 = math.exp(k, m1 - m), math.exp(k, maximum - m)
            maxima[head].set(m)
            sums[head].set(k.select(first == begin, total, k.fma(l1, a1, total * a2)))
            old_factors.append(a1)
            new_factors.append(a2)
        _values(k, keys, first, first == begin, scratch, outputs, old_factors, new_factors)
    for head in range(group):
        total = sums[head].get().splat(PAGE)
        for d in range(0, head_dim, PAGE):
            place = (head * head_dim + d) * f32.nbytes
            y.at(place).store(outputs.at(place).load(f32.x(PAGE)) / total)


def scores_of_segment(
    k: Builder, q: Value, keys: Keys, first: Value, scale: Value, scores: Value, group: int
) -> None:
    """scores[head][key - first] = (q . key) * scale over the segment, several pages at once.

    Past the last page it is read again in place of pages that are not there;
    `softmax_of_segment` selects those lanes away.
    """
    head_dim, element = keys.table.head_dim, keys.table.element
    vector, factor = f32.x(PAGE), scale.splat(PAGE)
    n_pages = k.minimum(keys.last + 1 - first, k.const(i64, SEGMENT)) + (PAGE - 1)
    for index in k.range(keys.first_page(first) // PAGE, n_pages // PAGE, _PAGES_AT_ONCE):
        pages = [
            keys.page(k.minimum(first // PAGE + index + i, keys.last // PAGE))
            for i in range(_PAGES_AT_ONCE)
        ]
        chains = [[k.var(k.const(vector, 0.0)) for _ in pages] for _ in range(group)]
        for d in k.range(head_dim):
            columns = [
                page.at(d * (PAGE * element.nbytes)).load(element.x(PAGE)).to(f32)
                for page in pages
            ]
            for head in range(group):
                x = q.at(d * f32.nbytes + head * head_dim * f32.nbytes).load(f32).splat(PAGE)
                for chain, column in zip(chains[head], columns, strict=True):
                    chain.set(k.fma(x, column, chain.get()))
        for head in range(group):
            for i, chain in enumerate(chains[head]):
                place = index * (PAGE * f32.nbytes) + (head * SEGMENT + i * PAGE) * f32.nbytes
                scores.at(place).store(chain.get() * factor)


def softmax_of_segment(k: Builder, scores: Value, first: Value, keys: Keys) -> tuple[Value, Value]:
    """Replace the scores of a segment by exp(score - maximum); return maximum and sum.

    Scores are capped first, where there is a cap.
    """
    vector = f32.x(PAGE)
    n_keys = k.minimum(keys.last + 1 - first, k.const(i64, SEGMENT))
    begin = keys.first_page(first)
    lanes = k.const(i32.x(PAGE), list(range(PAGE)))

    def visible(key: Value) -> Value:
        seen = lanes < (n_keys - key).to(i32).splat(PAGE)
        if keys.window:
            seen = seen & (lanes >= (keys.first - first - key).to(i32).splat(PAGE))
        return seen

    largest = k.var(k.const(vector, float("-inf")))
    for key in k.range(begin, n_keys, PAGE):
        place = scores.at(key * f32.nbytes)
        score = place.load(vector)
        if keys.softcap:
            score = math.softcap(k, score, k.const(vector, keys.softcap))
            place.store(score)
        masked = k.select(visible(key), score, float("-inf"))
        largest.set(k.maximum(largest.get(), masked))
    maximum = k.tree_max(largest.get())
    sums = k.var(k.const(vector, 0.0))
    for key in k.range(begin, n_keys, PAGE):
        place = scores.at(key * f32.nbytes)
        weight = math.exp(k, place.load(vector) - maximum.splat(PAGE))
        weight = k.select(visible(key), weight, 0.0)
        place.store(weight)
        sums.set(sums.get() + weight)
    return maximum, k.tree_sum(sums.get())


def _values(
    k: Builder, keys: Keys, first: Value, is_first: Value, weights: Value, outputs: Value,
    old_factors: Sequence[Value], new_factors: Sequence[Value],
) -> None:  # fmt: skip
    """outputs[head][d]: the segment's weighted values, merged with those of earlier segments."""
    group = len(old_factors)
    for dims in value_tiles(keys.table.head_dim, group):
        chains = weighted_sum(k, keys, first, weights, group, dims)
        for head in range(group):
            for d, chain in zip(dims, chains[head], strict=True):
                place = outputs.at((head * keys.table.head_dim + d) * f32.nbytes)
                a1, a2 = old_factors[head].splat(PAGE), new_factors[head].splat(PAGE)
                for _ in k.when(is_first):
                    place.store(chain)
                for _ in k.when(is_first == 0):
                    place.store(k.fma(place.load(f32.x(PAGE)), a1, chain * a2))


def value_tiles(head_dim: int, group: int) -> Iterator[list[int]]:
    """Cut the dimensions of a head into tiles whose accumulators fit the registers."""
    n_vectors = head_dim // PAGE
    width = max(w for w in range(1, n_vectors + 1)
                if n_vectors % w == 0 and (w * group <= _MAX_CHAINS or w == 1))  # fmt: skip
    for start in range(0, n_vectors, width):
        yield [d * PAGE for d in range(start, start + width)]


def weighted_sum(
    k: Builder, keys: Keys, first: Value, weights: Value, group: int, dims: Sequence[int]
) -> list[list[Value]]:
    """For each head and each 16 dimensions: sum of weight * value, keys ascending."""
    table = keys.table
    vector, element = f32.x(PAGE), table.element
    chains = [[k.var(k.const(vector, 0.0)) for _ in dims] for _ in range(group)]
    n_keys = k.minimum(keys.last + 1 - first, k.const(i64, SEGMENT))
    for page_key in k.range(keys.first_page(first), n_keys, PAGE):
        page = keys.page((first + page_key) // PAGE).at(table.values_at)
        begin = k.const(i64, 0)
        if keys.window:
            begin = k.maximum(keys.first - first - page_key, begin)
        for row in k.range(begin, k.minimum(n_keys - page_key, k.const(i64, PAGE))):
            value_row = page.at(row * (table.head_dim * element.nbytes))
            values = [
                value_row.at(d * element.nbytes).load(element.x(PAGE)).to(f32) for d in dims
            ]
            for head in range(group):
                place = (page_key + row) * f32.nbytes + head * SEGMENT * f32.nbytes
                weight = weights.at(place).load(f32).splat(PAGE)
                for chain, value in zip(chains[head], values, strict=True):
                    chain.set(k.fma(weight, value, chain.get()))
    return [[chain.get() for chain in row] for row in chains]


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
