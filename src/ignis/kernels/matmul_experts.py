"""Matmuls of each token with the experts that it has chosen; as `matmul` and `matmul_float`.

A unit of work is a panel of rows (of floats, `unit_rows`) of every expert there is, so threads
are equally busy however tokens are spread. A thread takes the experts in ascending order, and all
tokens of an expert together: its weights are read once.

An output is summed as in any other matmul. In a sum of experts (`summed`) y begins as the
residual, and each expert adds fma(gate, output, y); a product (not `summed`) has a row of
outputs for each slot. Inputs are one row a token in a product, one a slot in a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ignis.kernels import a8
from ignis.kernels.floats import STORAGE
from ignis.kernels.lang import Builder, Value, f32, i64, kernel, ptr
from ignis.kernels.matmul import (
    LANES,
    SUMS_NBYTES,
    Tokens,
    pack_panel,
    panel_nbytes,
    panel_sums,
    passes,
    row_sums,
)
from ignis.kernels.matmul_float import for_tiles
from ignis.kernels.panels import BLOCK, FORMATS
from ignis.kernels.routing import Group, Routing
from ignis.kernels.rows import ROWS

_PLACES_NBYTES = a8.MAX_ROWS * i64.nbytes
PACKED_SCRATCH_NBYTES = SUMS_NBYTES + _PLACES_NBYTES

_PARAMS = {
    "weight": ptr, "x": ptr, "y": ptr, "experts": ptr, "gates": ptr, "residual": ptr,
    "n_rows": i64, "n_values": i64, "n_tokens": i64, "n_used": i64,
}  # fmt: skip


@kernel(**_PARAMS)
def experts_packed(
    k: Builder, *, weight: Value, x: Value, n_rows: Value, n_values: Value, begin: Value,
    end: Value, scratch: Value, format: str, summed: bool, **rest: Any,
) -> None:  # fmt: skip
    """Panels packed beforehand, those of an expert behind the other's."""
    fmt = FORMATS[format]
    out = _Outputs(k, n_rows=n_rows, summed=summed, **rest)
    out.begin(begin * ROWS, end * ROWS)
    n_panels = (n_rows + (ROWS - 1)) // ROWS
    for group in out.routing.groups():
        place = _places(k, group, n_values, scratch.at(SUMS_NBYTES), summed)
        for tokens in passes(k, group.count):
            for panel in k.range(begin, end):
                index = group.expert * n_panels + panel
                packed = weight.at(index * panel_nbytes(fmt, n_values))
                panel_sums(k, fmt, packed, x, n_values, out.routing.n_tokens, scratch, tokens,
                           place)  # fmt: skip
                out.store_panel(group, tokens, panel, scratch)


@kernel(**_PARAMS)
def experts_mapped(
    k: Builder, *, weight: Value, x: Value, n_rows: Value, n_values: Value, begin: Value,
    end: Value, scratch: Value, format: str, summed: bool, **rest: Any,
) -> None:  # fmt: skip
    """Rows as they lie in the file; for an expert of several tokens a panel is packed first."""
    fmt = FORMATS[format]
    out = _Outputs(k, n_rows=n_rows, summed=summed, **rest)
    out.begin(begin * ROWS, end * ROWS)
    n_tokens, packed = out.routing.n_tokens, scratch.at(PACKED_SCRATCH_NBYTES)
    expert_nbytes = n_rows * fmt.n_groups(n_values) * fmt.group_nbytes
    for group in out.routing.groups():
        own = weight.at(group.expert * expert_nbytes)
        place = _places(k, group, n_values, scratch.at(SUMS_NBYTES), summed)
        for panel in k.range(begin, end):
            for _ in k.when(group.count == 1):
                one = Tokens.one(k)
                only = x.at(place(one.first))
                row_sums(k, fmt, own, panel, n_rows, n_values, only, n_tokens, scratch)
                out.store_panel(group, one, panel, scratch)
            for _ in k.when(group.count > 1):
                pack_panel(k, fmt, own, panel, n_rows, n_values, packed)
                for tokens in passes(k, group.count):
                    panel_sums(k, fmt, packed, x, n_values, n_tokens, scratch, tokens, place)
                    out.store_panel(group, tokens, panel, scratch)


@kernel(**_PARAMS, unit_rows=i64)
def experts_float(
    k: Builder, *, weight: Value, x: Value, n_rows: Value, n_values: Value, unit_rows: Value,
    begin: Value, end: Value, scratch: Value, format: str, summed: bool, **rest: Any,
) -> None:  # fmt: skip
    """F32, F16 and BF16 rows as they lie. A unit is `unit_rows` rows, a multiple of 4."""
    out = _Outputs(k, n_rows=n_rows, summed=summed, **rest)
    first, last = begin * unit_rows, end * unit_rows
    out.begin(first, last)
    expert_nbytes = n_rows * n_values * STORAGE[format].nbytes
    for group in out.routing.groups():

        def token(i: Value, group: Group = group) -> Value:
            t, slot = group.entry(i)
            row = t * out.routing.n_used + slot if summed else t
            return x.at(row * n_values * f32.nbytes)

        def store(i: Value, row: Value, sums: Value, group: Group = group) -> None:
            out.store(group, i, row, sums)

        own, span = weight.at(group.expert * expert_nbytes), (first, k.minimum(last, n_rows))
        for_tiles(k, own, span, n_rows, n_values, format, scratch, group.count, token, store)


def mapped_scratch_nbytes(format: str, n_values: int) -> int:
    """Scratch of `experts_mapped`."""
    return PACKED_SCRATCH_NBYTES + FORMATS[format].panel_nbytes(n_values)


def _places(
    k: Builder, group: Group, n_values: Value, table: Value, summed: bool
) -> Callable[[Value], Value]:
    """Where the blocks of a group's i-th token begin, in bytes behind x; kept in a table."""
    n_tokens = group.routing.n_tokens
    for i in k.range(group.count):
        row, slot = group.entry(i)
        if summed:
            row = row + slot * (n_values // BLOCK * n_tokens)
        table.at(i * i64.nbytes).store(row * a8.BLOCK_NBYTES)
    return lambda i: table.at(i * i64.nbytes).load(i64)


class _Outputs(NamedTuple):
    """Where the outputs of experts go."""

    k: Builder
    y: Value
    experts: Value
    gates: Value
    residual: Value
    n_rows: Value
    n_tokens: Value
    n_used: Value
    summed: bool

    @property
    def routing(self) -> Routing:
        return Routing(self.k, self.experts, self.n_tokens, self.n_used)

    def begin(self, first: Value, last: Value) -> None:
        """Sums begin as the residual: copy its columns; it may be y."""
        k = self.k
        for t in k.range(self.n_tokens) if self.summed else ():
            row = t * self.n_rows
            for column in k.range(first, k.minimum(last, self.n_rows), _UNIT_COLUMNS):
                place = (row + column) * f32.nbytes
                for _ in k.when(column + _UNIT_COLUMNS <= self.n_rows):
                    four = f32.x(_UNIT_COLUMNS)
                    self.y.at(place).store(self.residual.at(place).load(four))
                for _ in k.when(column + _UNIT_COLUMNS > self.n_rows):
                    for i in k.range(self.n_rows - column):
                        cell = place + i * f32.nbytes
                        self.y.at(cell).store(self.residual.at(cell).load(f32))

    def store_panel(self, group: Group, tokens: Tokens, panel: Value, sums: Value) -> None:
        """The sums of 16 rows by some tokens of a group, fewer rows in the last panel."""
        k, row = self.k, panel * ROWS
        for t in k.range(tokens.n):
            i, here = tokens.first + t, sums.at(t * LANES.nbytes)
            for _ in k.when(row + ROWS <= self.n_rows):
                self.store(group, i, row, here.load(LANES))
            for _ in k.when(row + ROWS > self.n_rows):
                for r in k.range(self.n_rows - row):
                    self.store(group, i, row + r, here.at(r * f32.nbytes).load(f32))

    def store(self, group: Group, i: Value, row: Value, total: Value) -> None:
        """One output of a group's i-th token, or 16 neighbours, from `row` on."""
        k = self.k
        token, slot = group.entry(i)
        entry = token * self.n_used + slot
        if not self.summed:
            self.y.at((entry * self.n_rows + row) * f32.nbytes).store(total)
            return
        gate = self.gates.at(entry * f32.nbytes).load(f32)
        gate = gate.splat(total.type.lanes) if total.type.lanes else gate
        place = self.y.at((token * self.n_rows + row) * f32.nbytes)
        place.store(k.fma(gate, total, place.load(total.type)))


_UNIT_COLUMNS = 4  # units are whole numbers of these
