"""Weights stored as floats (F32, F16, BF16), read as f32; the order of their sums (NUMERICS 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ignis.kernels.lang import Builder, Type, Value, f16, f32, i16, i32, i64

LANES = f32.x(16)  # the accumulators of an output, by k modulo 16
STORAGE: dict[str, Type] = {"f32": f32, "f16": f16, "bf16": i16}


def widen(k: Builder, raw: Value, format: str) -> Value:
    """Stored lanes as f32; BF16 is the upper half of an f32."""
    if format == "bf16":
        return (raw.zext(i32) << 16).bits(f32.x(raw.type.lanes) if raw.type.lanes else f32)
    return raw.to(f32) if format == "f16" else raw


def load_tail(
    k: Builder, scratch: Value, first: Value, stop: Value, lane: int, part: Type, start: Value,
    format: str,
) -> Value:  # fmt: skip
    """A part, from `lane` on, of the last n_values mod 16 values with zeros behind them.

    They pass through `LANES.nbytes` of scratch.
    """
    storage = STORAGE[format]
    scratch.store(k.const(LANES, 0.0))
    for i in k.range(first, stop):
        value = widen(k, start.at(i * storage.nbytes).load(storage), format)
        scratch.at((i - first) * 4).store(value)
    return scratch.at(lane * f32.nbytes).load(part)


def blocks(k: Builder, n_values: Value, most: int) -> Iterator[tuple[Value, Value]]:
    """Ranges of at most about so many values, of about the same size.

    All but the last are a multiple of 16.
    """
    n_blocks = (n_values + (most - 1)) // most
    size = (n_values + (n_blocks * 16 - 1)) // (n_blocks * 16) * 16
    first = k.var(k.const(i64, 0))
    for _ in k.loop(lambda: first.get() < n_values):
        stop = k.minimum(first.get() + size, n_values)
        yield first.get(), stop
        first.set(stop)


def fold(parts: Sequence[Sequence[Value]]) -> list[Value]:
    """The levels of the tree that add whole vectors: part i and part i + half, down to one."""
    vectors = [list(part) for part in parts]
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [
            [a + b for a, b in zip(low, high, strict=True)]
            for low, high in zip(vectors[:half], vectors[half:], strict=True)
        ]
    return vectors[0]
