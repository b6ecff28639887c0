"""What this machine could do: reading memory, integer and float multiply-adds, nothing else."""

from __future__ import annotations

from ignis.kernels.lang import Builder, Value, f32, i8, i32, i64, kernel, ptr

STREAM_UNIT_NBYTES = 1 << 16
CHAINS = 12  # independent accumulators, enough to hide the latency of an instruction
ROUNDS = 1 << 12  # of a unit of arithmetic
DOT4_MACS = CHAINS * ROUNDS * 64
FMA_MACS = CHAINS * ROUNDS * 16


@kernel(x=ptr, y=ptr)
def read_stream(
    k: Builder, *, x: Value, y: Value, begin: Value, end: Value, scratch: Value
) -> None:
    """Read units of 64 KiB, eight cache lines at a time."""
    sums = [k.var(k.const(i64.x(8), 0)) for _ in range(8)]
    for at in k.range(begin * STREAM_UNIT_NBYTES, end * STREAM_UNIT_NBYTES, 512):
        for line, total in enumerate(sums):
            total.set(total.get() ^ x.at(at + 64 * line).load(i64.x(8)))
    result = sums[0].get()
    for total in sums[1:]:
        result = result ^ total.get()
    scratch.store(result)


@kernel(x=ptr, y=ptr)
def chain_dot4(
    k: Builder, *, x: Value, y: Value, begin: Value, end: Value, scratch: Value
) -> None:
    """Units of `DOT4_MACS` multiply-adds of bytes."""
    a, b = x.load(i8.x(64)), x.at(64).load(i8.x(64))
    sums = [k.var(k.const(i32.x(16), chain)) for chain in range(CHAINS)]
    for _ in k.range(begin * ROUNDS, end * ROUNDS):
        for total in sums:
            total.set(k.dot4(total.get(), a, b))
    result = sums[0].get()
    for total in sums[1:]:
        result = result ^ total.get()
    scratch.store(result)


@kernel(x=ptr, y=ptr)
def chain_fma(
    k: Builder, *, x: Value, y: Value, begin: Value, end: Value, scratch: Value
) -> None:
    """Units of `FMA_MACS` multiply-adds of f32."""
    a, b = x.load(f32.x(16)), x.at(64).load(f32.x(16))
    sums = [k.var(k.const(f32.x(16), float(chain))) for chain in range(CHAINS)]
    for _ in k.range(begin * ROUNDS, end * ROUNDS):
        for total in sums:
            total.set(k.fma(a, b, total.get()))
    result = sums[0].get()
    for total in sums[1:]:
        result = result + total.get()
    scratch.store(result)
