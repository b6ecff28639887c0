"""Copies bytes, on as many threads as the launch has: float weights into memory of our own."""

from __future__ import annotations

from ignis.kernels.lang import Builder, Value, i8, i64, kernel, ptr

UNIT_NBYTES = 1 << 16
_LINE = i64.x(8)


@kernel(x=ptr, y=ptr, n_bytes=i64)
def copy_bytes(
    k: Builder, *, x: Value, y: Value, n_bytes: Value, begin: Value, end: Value, scratch: Value
) -> None:
    """y[i] = x[i]; a unit is 64 KiB, or what is left of `n_bytes`."""
    stop = k.minimum(end * UNIT_NBYTES, n_bytes)
    whole = stop - stop % _LINE.nbytes
    for at in k.range(begin * UNIT_NBYTES, whole, _LINE.nbytes):
        y.at(at).store(x.at(at).load(_LINE))
    for at in k.range(whole, stop):
        y.at(at).store(x.at(at).load(i8))
