"""What the encoders that search for scales share: how values lie meanwhile, sums, weights.

A block's bytes depend on its own values alone, on every processor: operations go value by value,
in f32 without contraction, and sums are trees of a fixed shape.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ignis.gguf.records import Bytes, Floats

Values: TypeAlias = NDArray[np.float32]     # [W, S, n]: W values of each of S sub-blocks
PerScale: TypeAlias = NDArray[np.float32]   # [S, n]
PerBlock: TypeAlias = NDArray[np.float32]   # [n]

F = TypeVar("F", bound=NamedTuple)

_SMALLEST_F16 = np.float32(2**-24)
_WORTH_IT = np.float32(2**-32)      # less comes to nothing even 128 times


class Spread(NamedTuple):
    """Blocks with the values of a sub-block along the first axis, so that lanes are sub-blocks.

    x       the values over `unit`: a block's largest lies in [0.5, 1), so that squares and fourth
            powers stay within f32
    unit    a power of two for each block
    """

    x: Values
    unit: PerBlock

    @classmethod
    def of(cls, values: Floats, n_scales: int) -> Spread:
        """Spread [n, block_size] values over [block_size / n_scales, n_scales, n]."""
        exponent = np.frexp(np.abs(values).max(axis=1))[1].clip(-126, 126)
        unit = np.ldexp(np.float32(1), exponent)
        x = (values / unit[:, None]).reshape(len(values), n_scales, -1).transpose(2, 1, 0)
        return cls(np.ascontiguousarray(x), unit)

    def stored(self, scale: PerBlock) -> PerBlock:
        """Return `scale` as the file's f16 will have it: rounded, if possible not down to zero."""
        real = scale * self.unit
        half = real.astype(np.float16).astype(np.float32)
        lost = (half == 0) & (np.abs(real) > _WORTH_IT)
        kept = np.where(lost, np.copysign(_SMALLEST_F16, real), half)
        result: PerBlock = np.divide(kept, self.unit)
        return result


def gathered(whole: NDArray[np.float32]) -> Bytes:
    """[..., n] whole numbers -> [n, ...] bytes in the order of the block, -1 as 255.

    The inverse of what `Spread.of` does to the axes. NaN, of blocks that are not finite, gives 0.
    """
    numbers = np.nan_to_num(whole, nan=0.0).astype(np.int16).astype(np.uint8)
    return np.ascontiguousarray(numbers.T).reshape(whole.shape[-1], -1)


def better(kept: F, other: F) -> F:
    """Take the fits of `other` whose error, the first field, is smaller; NaN never is."""
    smaller = other[0] < kept[0]
    return kept._make(np.where(smaller, o, k) for k, o in zip(kept, other, strict=True))


def by_magnitude(x: Values, floor: float) -> Values:
    """Weigh the squared error of a value by |x| + floor * the root mean square of its sub-block."""
    return np.abs(x) + np.float32(floor) * np.sqrt(_mean_square(x))


def by_square(x: Values, floor: float) -> Values:
    """Weigh the squared error of a value by x^2 + floor * the mean square of its sub-block."""
    return x * x + np.float32(floor) * _mean_square(x)


def _mean_square(x: Values) -> PerScale:
    return total(x * x) / np.float32(len(x))


def total(a: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sum the first axis, whose length is a power of two, as a tree: i with i + half."""
    while len(a) > 1:
        half = len(a) // 2
        a = a[:half] + a[half:]
    result: NDArray[np.float32] = a[0]
    return result


def inverse(a: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / a, and 0 for 0."""
    return np.where(a == 0, np.float32(0), np.float32(1) / a)
