"""What a kernel launch is, and what its makers share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from ignis.graph.ir import Operation, Value
from ignis.kernels import matmul_float
from ignis.kernels.lang import Kernel
from ignis.runtime.kv_cache import KVCache
from ignis.runtime.step import StepTables

_DECODE_UNIT_ROWS = 8  # of float weights for one token: small, for chunks to be cut from
_GRAIN_NBYTES = 65536  # of weights that a thread reads in one go for one token


class Private(NamedTuple):
    """An address in the memory that each thread has for itself: an offset in bytes."""

    offset: int


Argument = int | float | str | Private | None


class Launch(NamedTuple):
    """One kernel over `units` units of work, times the count `per` where there is one.

    `gate` names a count without which there is nothing to do. `shared` work is handed out in
    chunks as threads ask for it; other work, small and even, is divided beforehand.
    """

    op: Operation | None
    kernel: Kernel
    args: Mapping[str, Argument]
    units: int
    reads: frozenset[Hashable] = frozenset()  # values, and the KV cache of a layer
    writes: frozenset[Hashable] = frozenset()
    per: str | None = None
    gate: str | None = None
    shared: bool = False
    scratch_nbytes: int = 0
    grain: int = 0  # of work that streams weights: units of a chunk long enough to prefetch
    stage: int = 0  # of the op: which of its stages the launch belongs to
    release: tuple[int, int] = (0, 0)  # address and bytes of a mapped file: read for the last time
    part: Operation | None = None  # of a group of matmuls: the one that this launch computes

    @property
    def computes(self) -> Operation | None:
        """The op, or the part of it, that this launch computes."""
        return self.part or self.op

    @property
    def by_row(self) -> bool:
        """Whether a unit is one row (a token), computed from the same row of its operands."""
        return self.units == 1 and self.per is not None and not self.shared

    @property
    def is_whole(self) -> bool:
        """Whether one thread does it all: each may do it for itself."""
        return self.units == 1 and self.per is None and not self.shared


class Surroundings(NamedTuple):
    """Where everything that ops touch lies, for steps of up to `n_tokens` and `n_logits`."""

    n_tokens: int
    n_logits: int
    address: Callable[[Value], Argument]
    weights: Mapping[str, int]  # addresses
    tables: StepTables
    cache: KVCache
    rope_table: Callable[[Operation], int]

    def operand(self, op: Operation, name: str) -> Argument:
        """The address of an operand, or None for an optional one that is absent."""
        value = op.operand(name)
        if value is None:
            return None
        return self.weights[value.name] if value.is_weight else self.address(value)

    def is_single(self, rows: str) -> bool:
        """Whether steps have one row of that kind, "T" or "R", at most."""
        return (self.n_tokens if rows == "T" else self.n_logits) == 1


def rows_of(op: Operation) -> str:
    """Whether the op's results have a row a token, "T", or a row of logits, "R"."""
    return str(op.results[0].type.shape[0])


def launch_of(
    op: Operation, kernel: Kernel, args: Mapping[str, Argument], units: int, **more: Any
) -> Launch:
    """A launch that reads the op's activations and writes its results."""
    reads = frozenset(value for value in op.operands if not value.is_weight)
    return Launch(op, kernel, args, units, reads=reads, writes=frozenset(op.results), **more)


def count_of(op: Operation, name: str) -> int:
    return int(op.attributes[name])  # type: ignore[arg-type]


def number_of(op: Operation, name: str) -> float:
    return float(op.attributes[name])  # type: ignore[arg-type]


def unit_rows(single: bool) -> int:
    """Rows of float weights that are a unit of work; for one token fewer, to cut chunks from."""
    return _DECODE_UNIT_ROWS if single else matmul_float.UNIT_ROWS


def grain_of(unit_nbytes: int) -> int:
    """Units of a chunk that is long enough for the processor's prefetching to pay."""
    return max(1, _GRAIN_NBYTES // unit_nbytes)
