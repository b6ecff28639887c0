"""Tensor types: what a value's elements are, and how many of them there are.

    f32[T,896]         activations; T is the number of tokens in the step, R the rows with logits
    a8[T,896]          activations quantized to blocks of 32 (NUMERICS 1)
    experts[T,8]       the experts that each token has chosen, ascending, and who has which token
    q8_0[4864,896]     weights, typed by their GGUF format; rows first, then the contiguous k axis
    q8_0[4864,896] panels    the same, packed when the model loads: here into panels of 16 rows

The textual form is the one that `str` gives and `TensorType.parse` reads.
"""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

from ignis.errors import GraphError

Dim: TypeAlias = "int | str"

SYMBOLS = ("T", "R")
"""The symbolic sizes: tokens in the step, rows that need logits."""

A8_BLOCK = 32
"""Values in one block of quantized activations."""

A8_BLOCK_NBYTES = 48
"""Bytes of such a block: 32 int8, the scale, and sums in the forms that kernels use."""

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""

ELEMENT = 4
"""Bytes of an f32, what activations are made of."""

FLOAT_FORMATS = ("f32", "f16", "bf16")
BLOCK_FORMATS = (
    "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl",
    "iq4_xs", "mxfp4", "tq1_0", "tq2_0", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s",
    "iq3_xxs", "iq3_s",
)  # fmt: skip
"""Weight formats whose matmuls read A8 activations."""

MAPPED, PANELS, ROWS = LAYOUTS = ("mapped", "panels", "rows")
"""Where a weight lies: in the mapped file, or packed in memory, in panels of 16 rows or as rows."""

WEIGHT_FORMATS = FLOAT_FORMATS + BLOCK_FORMATS
KV_TYPES = ("f32", "f16", "q8_0")
"""How the KV cache keeps keys and values; see `kv_types`."""

ACTIVATION_DTYPES = ("f32", "a8", "experts")

_TYPE = re.compile(r"([a-z][a-z0-9_]*)\[([^\]]*)\](?: (\w+))?")


class TensorType(NamedTuple):
    """An element type and a shape, outermost axis first; entries are sizes or "T" and "R".

    Weights have a layout besides, which is written where they do not lie as in the file.
    """

    dtype: str
    shape: tuple[Dim, ...]
    layout: str = MAPPED

    def __str__(self) -> str:
        layout = "" if self.layout == MAPPED else f" {self.layout}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{layout}"

    @classmethod
    def parse(cls, text: str) -> TensorType:
        """Read the form that `str` writes, or raise GraphError."""
        match = _TYPE.fullmatch(text.strip())
        if match is None:
            raise GraphError("not a type", got=repr(text), wanted="dtype[dim,...]")
        dims = tuple(_parse_dim(dim.strip(), text) for dim in match[2].split(","))
        if match[1] not in ACTIVATION_DTYPES + WEIGHT_FORMATS:
            raise GraphError(
                f"unknown element type in {text!r}",
                got=match[1],
                wanted=" or ".join(ACTIVATION_DTYPES + WEIGHT_FORMATS[1:]),
            )
        if match[3] not in (None, *LAYOUTS[1:]):
            raise GraphError(f"unknown layout in {text!r}", got=match[3],
                             wanted=" or ".join(LAYOUTS[1:]))  # fmt: skip
        return cls(match[1], dims, match[3] or MAPPED)

    @property
    def is_symbolic(self) -> bool:
        """Whether the size depends on the step."""
        return any(isinstance(dim, str) for dim in self.shape)

    def sizes(self, n_tokens: int, n_logits: int) -> tuple[int, ...]:
        """The shape of a step of `n_tokens` tokens with `n_logits` rows of logits."""
        given = {"T": n_tokens, "R": n_logits}
        return tuple([given[dim] if isinstance(dim, str) else dim for dim in self.shape])

    def nbytes(self, n_tokens: int, n_logits: int) -> int:
        """Bytes of an activation in a step of `n_tokens` tokens and `n_logits` rows of logits.

        Raises GraphError for block-quantized weights: their size is the file's business.
        """
        sizes = self.sizes(n_tokens, n_logits)
        if self.dtype == "a8":
            return a8_nbytes(*sizes)
        if self.dtype == "experts":
            return experts_nbytes(*sizes)
        if self.dtype not in FLOAT_FORMATS:
            raise GraphError("only activations have a size in the arena", got=self)
        count = 4 if self.dtype == "f32" else 2
        for size in sizes:
            count *= size
        return count


def a8_nbytes(n_tokens: int, width: int) -> int:
    """Bytes of `n_tokens` rows of `width` quantized activations: a whole number of blocks."""
    return n_tokens * (width // A8_BLOCK) * A8_BLOCK_NBYTES


def experts_nbytes(n_tokens: int, n_used: int) -> int:
    """Bytes of `n_tokens` rows of `n_used` chosen experts, as `kernels.routing` draws them."""
    return align(20 * n_tokens * n_used + 8)


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to`."""
    return -(-nbytes // to) * to


def _parse_dim(dim: str, text: str) -> Dim:
    if dim in SYMBOLS:
        return dim
    if re.fullmatch(r"[1-9][0-9]{0,17}", dim) is None:
        raise GraphError(f"bad dimension in {text!r}", got=repr(dim), wanted="a size, T or R")
    return int(dim)
