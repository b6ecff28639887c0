"""Runs a kernel body on NumPy: the executable specification of what the emitted code computes.

Every pointer knows its memory, so an access outside it is an error that names the offset, and
memory that the test marked as poisoned or as a red zone shows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ignis.errors import KernelError
from ignis.kernels.lang import Builder, Kernel, Operand, Type, Value, f64, i1, i32, i64, ptr

_DTYPES: dict[tuple[str, int], Any] = {
    ("i", 1): np.bool_, ("i", 8): np.int8, ("i", 16): np.int16, ("i", 32): np.int32,
    ("i", 64): np.int64, ("f", 16): np.float16, ("f", 32): np.float32, ("f", 64): np.float64,
}  # fmt: skip


def dtype_of(type_: Type) -> Any:
    return np.dtype(_DTYPES[type_.kind, type_.bits])


@dataclass(frozen=True, slots=True)
class Pointer:
    """A place in a byte array; `memory` is one-dimensional and uint8."""

    memory: NDArray[np.uint8]
    offset: int = 0

    @classmethod
    def to(cls, array: NDArray[Any]) -> Pointer:
        """A pointer to the first byte of a C-contiguous array (shared, not copied)."""
        if not array.flags.c_contiguous:
            raise KernelError("an eager pointer needs a C-contiguous array")
        return cls(array.reshape(-1).view(np.uint8))

    def slice(self, nbytes: int) -> NDArray[np.uint8]:
        if self.offset < 0 or self.offset + nbytes > len(self.memory):
            raise KernelError(
                "a kernel leaves its memory",
                got=f"bytes {self.offset}..{self.offset + nbytes}",
                wanted=f"0..{len(self.memory)}",
            )
        return self.memory[self.offset : self.offset + nbytes]


class EagerVariable:
    """A cell that holds the current value."""

    def __init__(self, k: EagerBuilder, initial: Value) -> None:
        self._k, self._type, self._value = k, initial.type, initial

    def get(self) -> Value:
        return self._value

    def set(self, value: Operand) -> None:
        self._value = self._k.like(value, self._value)


class EagerBuilder(Builder):
    """Computes at once. Raw values are NumPy arrays of shape (lanes,), or () for scalars."""

    def _new(self, type_: Type, raw: Any) -> Value:
        shape = (type_.lanes,) if type_.lanes else ()
        return Value(self, type_, np.asarray(raw, dtype=dtype_of(type_)).reshape(shape))

    def const(self, type_: Type, value: float | Sequence[float]) -> Value:
        dtype = dtype_of(type_)
        if dtype.kind == "i":
            modulus = 1 << type_.bits  # Python ints: a constant may be given as signed or unsigned
            wrapped = [int(v) % modulus for v in np.ravel(np.asarray(value, dtype=object))]
            unsigned = np.array(wrapped, dtype=f"u{dtype.itemsize}").view(dtype)
            raw = unsigned if type_.lanes and len(wrapped) > 1 else unsigned[0]
        else:
            raw = np.asarray(value, dtype=dtype)
        return self._new(type_, np.broadcast_to(raw, (type_.lanes,) if type_.lanes else ()))

    def binary(self, op: str, a: Value, b: Operand) -> Value:
        x, y = a.raw, self.like(b, a).raw
        with np.errstate(all="ignore"):
            return self._new(a.type, _BINARY[op](x, y))

    def compare(self, op: str, a: Value, b: Operand) -> Value:
        y = self.like(b, a).raw
        return self._new(Type("i", 1, a.type.lanes), _COMPARE[op](a.raw, y))

    def negate(self, a: Value) -> Value:
        return self._new(a.type, -a.raw)

    def select(self, condition: Value, a: Operand, b: Operand) -> Value:
        a, b = _pair(self, a, b)
        return self._new(a.type, np.where(condition.raw, a.raw, b.raw))

    def convert(self, a: Value, element: Type) -> Value:
        with np.errstate(all="ignore"):
            return self._new(element.x(a.type.lanes), a.raw.astype(dtype_of(element)))

    def zero_extend(self, a: Value, element: Type) -> Value:
        raw = a.raw
        if a.type.element != i1:
            raw = raw.view(f"u{raw.itemsize}")
        wide = raw.astype(f"u{element.bits // 8}")
        return self._new(element.x(a.type.lanes), wide.view(dtype_of(element)))

    def bitcast(self, a: Value, type_: Type) -> Value:
        if a.type.element == i1 or type_.element == i1:
            return self._mask_bits(a, type_)
        raw = np.ascontiguousarray(np.atleast_1d(a.raw)).view(dtype_of(type_))
        return self._new(type_, raw if type_.lanes else raw[0])

    def _mask_bits(self, a: Value, type_: Type) -> Value:
        """i1 lanes to an integer of as many bits, lane 0 lowest."""
        number = sum(1 << i for i, bit in enumerate(np.atleast_1d(a.raw)) if bit)
        return self.const(type_, number)

    def extract(self, a: Value, index: int) -> Value:
        return self._new(a.type.element, a.raw[index])

    def insert(self, a: Value, index: int, lane: Value) -> Value:
        raw = a.raw.copy()
        raw[index] = lane.raw
        return self._new(a.type, raw)

    def splat(self, a: Value, lanes: int) -> Value:
        return self._new(a.type.x(lanes), np.broadcast_to(a.raw, (lanes,)))

    def shuffle(self, a: Value, b: Value, indices: Sequence[int]) -> Value:
        lanes = np.concatenate([a.raw, b.raw])
        return self._new(a.type.x(len(indices)), lanes[list(indices)])

    def offset(self, pointer: Value, offset_bytes: Operand) -> Value:
        place: Pointer = pointer.raw
        moved = place.offset + int(self.index(offset_bytes).raw)
        return Value(self, ptr, Pointer(place.memory, moved))

    def not_null(self, pointer: Value) -> Value:
        return self.const(i1, len(pointer.raw.memory) > 0)

    def load(self, pointer: Value, type_: Type, align: int) -> Value:
        raw = pointer.raw.slice(type_.nbytes).copy().view(dtype_of(type_))
        return self._new(type_, raw if type_.lanes else raw[0])

    def store(self, pointer: Value, value: Value, align: int) -> None:
        raw = np.ascontiguousarray(np.atleast_1d(value.raw)).view(np.uint8)
        pointer.raw.slice(value.type.nbytes)[:] = raw

    def prefetch(self, pointer: Value, level: int = 1) -> None:
        """Memory here is always near."""

    def fetch_add(self, pointer: Value, value: Value) -> Value:
        before = self.load(pointer, value.type, value.type.nbytes)
        self.store(pointer, before + value, value.type.nbytes)
        return before

    def var(self, initial: Value) -> EagerVariable:
        return EagerVariable(self, initial)

    def range(self, start: Operand, stop: Operand = None, step: int = 1) -> Iterator[Value]:
        if stop is None:
            start, stop = 0, start
        first, last = int(self.index(start).raw), int(self.index(stop).raw)
        for i in range(first, last, step):
            yield self.const(i64, i)

    def when(self, condition: Value) -> Iterator[None]:
        if bool(condition.raw):
            yield None

    def loop(self, condition: Callable[[], Value]) -> Iterator[None]:
        while bool(condition().raw):
            yield None

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        if a.type.element == f64:
            raise KernelError("fma is defined on f32 lanes only", got=a.type)
        return self._new(a.type, fma_f32(a.raw, b.raw, c.raw))

    def sqrt(self, a: Value) -> Value:
        with np.errstate(all="ignore"):
            return self._new(a.type, np.sqrt(a.raw))

    def round_even(self, a: Value) -> Value:
        return self._new(a.type, np.rint(a.raw))

    def absolute(self, a: Value) -> Value:
        return self._new(a.type, np.abs(a.raw))

    def dot4(self, acc: Value, u: Value, s: Value, u_max: int = 255) -> Value:
        unsigned = u.raw.view(np.uint8).astype(np.int64)
        if unsigned.size and int(unsigned.max()) > u_max:
            raise KernelError("dot4 was promised smaller bytes", got=int(unsigned.max()),
                              wanted=f"at most {u_max}")  # fmt: skip
        if u_max == 129 and s.raw.size and int(s.raw.min()) < -127:
            raise KernelError("dot4 was promised larger bytes", got=-128, wanted="at least -127")
        products = (unsigned * s.raw.astype(np.int64)).reshape(-1, 4).sum(axis=1)
        return self._new(i32.x(acc.type.lanes), (acc.raw + products).astype(np.int32))

    def dot4_sum(
        self, acc: Value, a: Sequence[Value], s: Sequence[Value], u_max: int | None = 255
    ) -> Value:
        for x, y in zip(a, s, strict=True):
            if u_max is not None:
                acc = self.dot4(acc, x, y, u_max)
                continue
            if y.raw.size and int(y.raw.min()) < -127:
                raise KernelError("dot4_sum was promised larger bytes", got=-128,
                                  wanted="at least -127")  # fmt: skip
            products = x.raw.astype(np.int64) * y.raw.astype(np.int64)
            total = acc.raw + products.reshape(-1, 4).sum(axis=1)
            acc = self._new(acc.type, total.astype(np.int32))
        return acc

    def dot2(self, acc: Value, a: Value, b: Value) -> Value:
        products = (a.raw.astype(np.int64) * b.raw.astype(np.int64)).reshape(-1, 2).sum(axis=1)
        return self._new(acc.type, (acc.raw + products).astype(np.int32))

    def data(self, content: bytes) -> Value:
        return Value(self, ptr, Pointer(np.frombuffer(content, np.uint8)))

    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        codes = indices.raw.view(np.uint8)
        if codes.size and int(codes.max()) > 15:
            raise KernelError("an index leaves the table", got=int(codes.max()), wanted="0 to 15")
        return self._new(indices.type, self.const(indices.type.element.x(16), table).raw[codes])


def fma_f32(a: Any, b: Any, c: Any) -> Any:
    """a * b + c rounded once to f32, in f64 with rounding to odd (NUMERICS 0).

    The product of two f32 is exact in f64. The sum is rounded to odd: where it is inexact and its
    last bit is even, it moves one step towards the exact value, so the final rounding to f32 sees
    a sticky bit and cannot be fooled by a tie that is none.
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        addend = np.asarray(c, np.float64)
        total = np.atleast_1d(product + addend)
        virtual = total - product
        error = (product - (total - virtual)) + (addend - virtual)
        pattern = total.view(np.int64)
        inexact = (error < 0) | (error > 0)
        step = np.where((error > 0) == (total > 0), 1, -1)
        pattern = pattern + np.where(inexact & (pattern & 1 == 0), step, 0)
        return pattern.view(np.float64).astype(np.float32).reshape(np.shape(product + addend))


def run_eager(
    kernel: Kernel,
    args: Mapping[str, Any],
    begin: int,
    end: int,
    scratch: NDArray[np.uint8] | None = None,
) -> None:
    """Run a kernel on NumPy arrays (for pointers; None is null) and numbers.

    It does the units of work [begin, end).
    """
    k = EagerBuilder()
    values: dict[str, Value] = {}
    for name, type_ in kernel.params:
        arg = args[name]
        if type_ == ptr:
            array = np.zeros(0, np.uint8) if arg is None else arg
            values[name] = Value(k, ptr, array if isinstance(array, Pointer) else Pointer.to(array))
        else:
            values[name] = k.const(type_, arg)
    memory = np.zeros(0, np.uint8) if scratch is None else scratch
    kernel.trace(k, values, k.const(i64, begin), k.const(i64, end), Value(k, ptr, Pointer(memory)))


def _pair(k: Builder, a: Operand, b: Operand) -> tuple[Value, Value]:
    if isinstance(a, Value):
        return a, k.like(b, a)
    if isinstance(b, Value):
        return k.like(a, b), b
    raise KernelError("select needs at least one typed value")


def _unsigned(x: Any) -> Any:
    return np.asarray(x).view(f"u{np.asarray(x).itemsize}")


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "udiv": lambda x, y: (_unsigned(x) // _unsigned(y)).view(x.dtype),
    "urem": lambda x, y: (_unsigned(x) % _unsigned(y)).view(x.dtype),
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shl": np.left_shift, "sar": np.right_shift,
    "shr": lambda x, y: (_unsigned(x) >> _unsigned(y)).view(x.dtype),
}  # fmt: skip

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
