"""Walks a row 16 values at a time, the last few values included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ignis.kernels.lang import Builder, Type, Value, f32

LANES = 16


@dataclass(frozen=True, slots=True)
class Part:
    """Up to 16 consecutive values of a row: all 16, or `count` of them at its end."""

    k: Builder
    first: Value  # index of the first value, i64
    count: Value | None = None  # None: all 16 lanes

    def load(self, row: Value, element: Type = f32) -> Value:
        """The values of this part; lanes past the end of the row hold zero."""
        place, vector = row.at(self.first * element.nbytes), element.x(LANES)
        if self.count is None:
            return place.load(vector)
        k, cell = self.k, self.k.var(self.k.const(vector, 0))
        for lane in range(LANES - 1):
            for _ in k.when(self.count > lane):
                value = place.at(lane * element.nbytes).load(element)
                cell.set(k.insert(cell.get(), lane, value))
        return cell.get()

    def store(self, row: Value, value: Value) -> None:
        """Write the lanes that lie inside the row."""
        nbytes = value.type.element.nbytes
        place = row.at(self.first * nbytes)
        if self.count is None:
            place.store(value)
            return
        for lane in range(LANES - 1):
            for _ in self.k.when(self.count > lane):
                place.at(lane * nbytes).store(value.lane(lane))


def parts(k: Builder, n: Value) -> Iterator[Part]:
    """The parts of a row of `n` values in order; the body is traced for whole parts and the rest.

    Lane i of every part is value i modulo 16 of the row, as the order of sums asks (NUMERICS 3).
    """
    whole = n - n % LANES
    for first in k.range(0, whole, LANES):
        yield Part(k, first)
    for _ in k.when(whole < n):
        yield Part(k, whole, n - whole)
