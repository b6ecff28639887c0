"""exp(x) in float64 with the same bits on every machine.

Only operations that IEEE 754 rounds exactly (+ - * and scaling by a power of two) in a fixed order;
`numpy.exp` differs between instruction sets and versions, and one flipped bit can change a token.

Method: x = k ln 2 + r with |r| <= ln 2 / 2, then exp(x) = 2^k * (Taylor series of exp(r) to r^13,
whose first missing term is below 2^-57). The error is below 1 unit in the last place
(`tests/sampling` measures it against exact arithmetic).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

# ln 2 split so that k * _LN2_HIGH is exact for |k| < 2^21: its low 32 bits are zero.
_LN2_HIGH: Final = float.fromhex("0x1.62e42fee00000p-1")
_LN2_LOW: Final = float.fromhex("0x1.a39ef35793c76p-33")
_LOG2_E: Final = float.fromhex("0x1.71547652b82fep+0")
# 1/13!, ..., 1/1!, 1/0!: correctly rounded quotients of exact integers.
_COEFFICIENTS: Final = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))
# Below this even the smallest subnormal rounds to zero.
_SMALLEST: Final = -746.0


def exp_nonpositive(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """exp of every element; `x` is float64, at most 0, and may be -inf. Returns a new array."""
    bounded = np.maximum(x, _SMALLEST)
    k = np.rint(bounded * _LOG2_E)
    r = (bounded - k * _LN2_HIGH) - k * _LN2_LOW
    total = np.full_like(r, _COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        total = total * r + coefficient
    result: npt.NDArray[np.float64] = np.ldexp(total, k.astype(np.int32))
    return result
