"""Many `dot4` of the same bytes, for x86 processors with AVX2 and no dot product of bytes.

Sixteen registers of 256 bits do not hold a block of 16 rows and 32 values, and eight rows of it
would need a load of activations for each product. So the block waits on the stack and a tile of
tokens meets it: a load of weights serves all of them, and a load of activations all rows.
`vpmaddubsw` makes words of pairs of products; as many as fit a word are added before one
`vpmaddwd` widens the sum:

    up to 15    eight pairs, all of a block
    up to 31    four
    up to 63    two
    up to 129   one
    more        a pair would not fit: the low and the high four bits are multiplied apart, eight
                pairs each, and the high ones' sum is widened by 16
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ignis.kernels.lang import SMALL_BYTE, TiledDot4, Value, i32
from ignis.kernels.rows import shift_bytes
from ignis.native import dot2, dot4

if TYPE_CHECKING:
    from ignis.native.emit import LlvmBuilder

_TOKENS = 4  # their sums are eight registers: half of what there is


def tiled(k: LlvmBuilder, us: Sequence[Value], u_max: int) -> TiledDot4 | None:
    """`Builder.tile_dot4` for such processors."""
    if not k.target.is_x86 or k.target.vector_bits != 256:
        return None
    if u_max <= SMALL_BYTE:
        parts: tuple[_Part, ...] = (_Part(us, 1, max(1, dot4.pairs_in_word(u_max))),)
    else:
        low, high = [u & 15 for u in us], [shift_bytes(u, 4) & 15 for u in us]
        n_added = dot4.pairs_in_word(15)
        parts = _Part(low, 1, n_added), _Part(high, 16, n_added)
    return _Tiled(k, parts)


class _Part(NamedTuple):
    """Bytes that stand for `factor` times as much; sums of `n_added` of their pairs fit a word."""

    us: Sequence[Value]
    factor: int
    n_added: int


class _Tiled(NamedTuple):
    k: LlvmBuilder
    parts: tuple[_Part, ...]
    tile: int = _TOKENS

    def sums(
        self, starts: Sequence[Value], xs: Sequence[Value], first: int, last: int
    ) -> list[Value]:
        totals = list(starts)
        for part in self.parts:
            for begin in range(first, last, part.n_added):
                words = self._added(part, xs, begin, min(begin + part.n_added, last))
                factor = self.k.const(words[0].type, part.factor)
                totals = [
                    dot2.emit(self.k, total, word, factor)
                    for total, word in zip(totals, words, strict=True)
                ]
        return totals

    def _added(self, part: _Part, xs: Sequence[Value], first: int, last: int) -> list[Value]:
        """Of each x, the sums of its pairs of products with vectors `first` to `last`."""
        words = self._pairs(part.us[first], xs, first)
        for j in range(first + 1, last):
            words = [a + b for a, b in zip(words, self._pairs(part.us[j], xs, j), strict=True)]
        return words

    def _pairs(self, u: Value, xs: Sequence[Value], j: int) -> list[Value]:
        fours = [x.at(4 * j).load(i32).splat(u.type.lanes // 4).bits(u.type) for x in xs]
        return [dot4.pairs(self.k, u, four) for four in fours]
