"""Rotary position embedding: rotates pairs of each head's values by the token's position."""

from __future__ import annotations

from ignis.errors import KernelError
from ignis.kernels.lang import Builder, Value, f32, i32, i64, kernel, ptr
from ignis.kernels.vectors import LANES

STYLES = ("neox", "interleaved")


@kernel(x=ptr, y=ptr, positions=ptr, table=ptr, n=i64)
def rope(
    k: Builder, *, x: Value, y: Value, positions: Value, table: Value, n: Value,
    begin: Value, end: Value, scratch: Value, head_dim: int, n_rot: int, style: str,
) -> None:  # fmt: skip
    """Rotate the first `n_rot` values of each head, copy the others; f32[T, n], n = heads x width.

    `table` is f32[position][2][n_rot / 2], cosines then sines. A pair is (i, i + n_rot/2) in the
    style "neox" and (2i, 2i + 1) in "interleaved". With (a, b) the pair and (c, s) its cosine and
    sine, the result is (fma(a, c, -(b * s)), fma(a, s, b * c)). A unit is a token; y may be x.
    """
    _check(head_dim, n_rot, style)
    head_nbytes = head_dim * f32.nbytes
    for token in k.range(begin, end):
        position = positions.at(token * 4).load(i32).to(i64)
        cosines = table.at(position * (n_rot * f32.nbytes))
        row_bytes = token * n * f32.nbytes
        for head_bytes in k.range(0, n * f32.nbytes, head_nbytes):
            offset = row_bytes + head_bytes
            rotate_head(k, x.at(offset), y.at(offset), cosines, head_dim, n_rot, style)


def rotate_head(
    k: Builder, x: Value, y: Value, cosines: Value, head_dim: int, n_rot: int, style: str
) -> None:
    """Rotate one head x, f32[C], to y by a row of the table; y may be x."""
    _rotate(k, x, y, cosines, n_rot, style)
    _copy(x, y, n_rot, head_dim)


def _rotate(k: Builder, x: Value, y: Value, cosines: Value, n_rot: int, style: str) -> None:
    half = n_rot // 2
    for first in range(0, half, LANES):
        lanes = min(LANES, half - first)
        vector = f32.x(lanes)
        c = cosines.at(first * 4).load(vector)
        s = cosines.at((half + first) * 4).load(vector)
        if style == "neox":
            a, b = x.at(first * 4).load(vector), x.at((half + first) * 4).load(vector)
        else:
            pairs = x.at(first * 8).load(f32.x(2 * lanes))
            a = k.shuffle(pairs, pairs, range(0, 2 * lanes, 2))
            b = k.shuffle(pairs, pairs, range(1, 2 * lanes, 2))
        rotated_a, rotated_b = k.fma(a, c, -(b * s)), k.fma(a, s, b * c)
        if style == "neox":
            y.at(first * 4).store(rotated_a)
            y.at((half + first) * 4).store(rotated_b)
        else:
            order = [lane + side * lanes for lane in range(lanes) for side in (0, 1)]
            y.at(first * 8).store(k.shuffle(rotated_a, rotated_b, order))


def _copy(x: Value, y: Value, begin: int, end: int) -> None:
    for first in range(begin, end, LANES):
        vector = f32.x(min(LANES, end - first))
        y.at(first * 4).store(x.at(first * 4).load(vector))


def _check(head_dim: int, n_rot: int, style: str) -> None:
    if style not in STYLES:
        raise KernelError("unknown rope style", got=style, wanted=" or ".join(STYLES))
    if n_rot % 2 or not 0 < n_rot <= head_dim:
        raise KernelError(
            "rope cannot rotate this many values", got=n_rot, wanted=f"even, at most {head_dim}"
        )
