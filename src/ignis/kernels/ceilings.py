"""What this machine could do: reading memory, integer and float multiply-adds, nothing else.

All three work on whole vector registers and on no more of them than there are: a ceiling that
spills is the ceiling of the stack.
"""

from __future__ import annotations

from collections.abc import Callable

from ignis.kernels.lang import Builder, Type, Value, f32, i8, i32, kernel, ptr

STREAM_UNIT_NBYTES = 1 << 16
_STREAM_VECTORS = 8  # of a round
FMA_MACS = 3 << 18  # of a unit: rounds of 12 or 24 vectors of any width divide it
DOT4_MACS = 4 * FMA_MACS
SCRATCH_NBYTES = 24 * 64  # for as many sums as there may be


@kernel(x=ptr, y=ptr)
def read_stream(
    k: Builder, *, x: Value, y: Value, begin: Value, end: Value, scratch: Value
) -> None:
    """Read units of 64 KiB, eight vectors at a time."""
    vector = i32.x(k.vector_lanes)
    sums = [k.var(k.const(vector, 0)) for _ in range(_STREAM_VECTORS)]
    step = _STREAM_VECTORS * vector.nbytes
    for at in k.range(begin * STREAM_UNIT_NBYTES, end * STREAM_UNIT_NBYTES, step):
        for i, total in enumerate(sums):
            total.set(total.get() ^ x.at(at + i * vector.nbytes).load(vector))
    result = sums[0].get()
    for total in sums[1:]:
        result = result ^ total.get()
    scratch.store(result)


@kernel(x=ptr, y=ptr)
def chain_dot4(
    k: Builder, *, x: Value, y: Value, begin: Value, end: Value, scratch: Value
) -> None:
    """Units of `DOT4_MACS` multiply-adds of bytes; x holds bytes of at most 127.

    A sum is also what is multiplied next: products of the same bytes would be computed only once.
    """
    u = x.load(i8.x(4 * k.vector_lanes))

    def step(total: Value) -> Value:
        return k.dot4(total, u, total.bits(u.type), u_max=127)

    _chains(k, i32, begin, end, scratch, step)


@kernel(x=ptr, y=ptr)
def chain_fma(
    k: Builder, *, x: Value, y: Value, begin: Value, end: Value, scratch: Value
) -> None:
    """Units of `FMA_MACS` multiply-adds of f32."""
    a, b = (x.at(at).load(f32.x(k.vector_lanes)) for at in (0, 64))
    _chains(k, f32, begin, end, scratch, lambda total: k.fma(a, b, total))


def _chains(
    k: Builder, element: Type, begin: Value, end: Value, scratch: Value,
    step: Callable[[Value], Value],
) -> None:  # fmt: skip
    """Take units of steps, in turn on independent sums.

    Three quarters of the registers hold sums, enough to hide the latency of a step; the others
    are for its operands.
    """
    vector, n_chains = element.x(k.vector_lanes), k.vector_registers * 3 // 4
    sums = [k.var(k.const(vector, chain + 1)) for chain in range(n_chains)]
    n_rounds = FMA_MACS // (n_chains * vector.lanes)
    for _ in k.range(begin * n_rounds, end * n_rounds):
        for total in sums:
            total.set(step(total.get()))
    for i, total in enumerate(sums):
        scratch.at(i * vector.nbytes).store(total.get())
