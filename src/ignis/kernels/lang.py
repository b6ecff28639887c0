"""The kernel language: Python functions over typed values, traced to machine code or run eagerly.

A kernel is a Python function whose first argument `k` is a `Builder`. Operators on `Value` are
overloaded; control flow that must survive into machine code is spelled with the builder:

    for i in k.range(n): ...          a loop (Python's own `range` unrolls while tracing)
    for _ in k.when(condition): ...   a branch: the body runs zero times or once
    for _ in k.loop(lambda: test): .. a while loop; the test is evaluated before each round
    x = k.var(initial)                loop-carried state: `x.get()`, `x.set(value)`
    k.select(condition, a, b)         a choice between two computed values

Using a traced value where Python needs a bool raises and names `k.when` and `k.select`, so a
Python `if` can never silently decide at trace time what only run time knows.

Two builders give the same body two lives: `eager.EagerBuilder` runs it on NumPy, checks every
memory access, and so makes the kernel its own executable specification; `native.emit` turns it
into LLVM IR. Both obey the same rules: IEEE arithmetic in the order written, no contraction but
the `fma` spelled out, wrapping integers, round to nearest even.

Vectors are written at a canonical width (16 x f32, 64 x i8); LLVM legalizes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ignis.errors import KernelError


@dataclass(frozen=True, slots=True)
class Type:
    """A scalar or a vector: `kind` is `i` (integer), `f` (float) or `p` (pointer)."""

    kind: str
    bits: int
    lanes: int = 0  # 0: scalar

    def x(self, lanes: int) -> Type:
        """The vector of `lanes` such elements: `f32.x(16)`."""
        return Type(self.kind, self.bits, lanes)

    @property
    def element(self) -> Type:
        return Type(self.kind, self.bits)

    @property
    def count(self) -> int:
        """The number of elements, one for a scalar."""
        return self.lanes or 1

    @property
    def nbytes(self) -> int:
        return self.bits * self.count // 8

    def __str__(self) -> str:
        name = "ptr" if self.kind == "p" else f"{self.kind}{self.bits}"
        return f"{name}x{self.lanes}" if self.lanes else name


i1, i8, i16, i32, i64 = (Type("i", bits) for bits in (1, 8, 16, 32, 64))
f16, f32, f64 = (Type("f", bits) for bits in (16, 32, 64))
ptr = Type("p", 64)

# Two products of an unsigned byte of at most this and a signed one above -128 fit 16 bits.
SMALL_BYTE = 129

Operand = Any  # a Value, or a Python number that takes the type of the value beside it


class Value:
    """One typed value of a kernel; `raw` is the builder's own representation."""

    __slots__ = ("k", "raw", "type")
    __hash__ = None  # type: ignore[assignment]  # == compares lanes, so values cannot be keys

    def __init__(self, k: Builder, type_: Type, raw: Any) -> None:
        self.k, self.type, self.raw = k, type_, raw

    def __bool__(self) -> bool:
        raise KernelError(
            "a traced value has no truth while the kernel is built",
            hint="use k.when(condition) for a branch or k.select(condition, a, b) for a choice",
        )

    # Arithmetic. Integers wrap; `//` and `%` are unsigned, as indices are never negative.
    def __add__(self, other: Operand) -> Value:
        return self.k.binary("add", self, other)

    def __sub__(self, other: Operand) -> Value:
        return self.k.binary("sub", self, other)

    def __mul__(self, other: Operand) -> Value:
        return self.k.binary("mul", self, other)

    def __truediv__(self, other: Operand) -> Value:
        return self.k.binary("div", self, other)

    def __floordiv__(self, other: Operand) -> Value:
        return self.k.binary("udiv", self, other)

    def __mod__(self, other: Operand) -> Value:
        return self.k.binary("urem", self, other)

    def __and__(self, other: Operand) -> Value:
        return self.k.binary("and", self, other)

    def __or__(self, other: Operand) -> Value:
        return self.k.binary("or", self, other)

    def __xor__(self, other: Operand) -> Value:
        return self.k.binary("xor", self, other)

    def __lshift__(self, other: Operand) -> Value:
        return self.k.binary("shl", self, other)

    def __rshift__(self, other: Operand) -> Value:
        """Logical shift right; `sar` is the arithmetic one."""
        return self.k.binary("shr", self, other)

    def sar(self, other: Operand) -> Value:
        return self.k.binary("sar", self, other)

    def __radd__(self, other: Operand) -> Value:
        return self.k.binary("add", self.k.like(other, self), self)

    def __rsub__(self, other: Operand) -> Value:
        return self.k.binary("sub", self.k.like(other, self), self)

    def __rmul__(self, other: Operand) -> Value:
        return self.k.binary("mul", self.k.like(other, self), self)

    def __rtruediv__(self, other: Operand) -> Value:
        return self.k.binary("div", self.k.like(other, self), self)

    def __neg__(self) -> Value:
        """Flip the sign (floats: the sign bit, also of zero and NaN)."""
        return self.k.negate(self)

    # Comparisons give i1 lanes: signed for integers, ordered for floats (`!=` is unordered).
    def __lt__(self, other: Operand) -> Value:
        return self.k.compare("lt", self, other)

    def __le__(self, other: Operand) -> Value:
        return self.k.compare("le", self, other)

    def __gt__(self, other: Operand) -> Value:
        return self.k.compare("gt", self, other)

    def __ge__(self, other: Operand) -> Value:
        return self.k.compare("ge", self, other)

    def __eq__(self, other: Operand) -> Value:  # type: ignore[override]
        return self.k.compare("eq", self, other)

    def __ne__(self, other: Operand) -> Value:  # type: ignore[override]
        return self.k.compare("ne", self, other)

    # Conversions.
    def to(self, element: Type) -> Value:
        """Convert each lane by value: signed integers, floats rounded to nearest even.

        Float to integer truncates and is only defined inside the integer's range.
        """
        return self.k.convert(self, element.element)

    def zext(self, element: Type) -> Value:
        """Widen each integer lane with zeros (i1 included)."""
        return self.k.zero_extend(self, element.element)

    def bits(self, type_: Type) -> Value:
        """Reinterpret the bytes as another type of the same size."""
        if type_.nbytes != self.type.nbytes and i1 not in (type_.element, self.type.element):
            raise KernelError("bits() needs equal sizes", got=self.type, wanted=type_)
        return self.k.bitcast(self, type_)

    # Lanes.
    def lane(self, index: int) -> Value:
        return self.k.extract(self, index)

    def splat(self, lanes: int) -> Value:
        return self.k.splat(self, lanes)

    # Memory. Offsets are in bytes; alignment is a promise, one byte unless told otherwise.
    def at(self, offset_bytes: Operand) -> Value:
        return self.k.offset(self, offset_bytes)

    def load(self, type_: Type, align: int = 1) -> Value:
        return self.k.load(self, type_, align)

    def store(self, value: Value, align: int = 1) -> None:
        self.k.store(self, value, align)


class Variable(Protocol):
    """A mutable cell of a kernel."""

    def get(self) -> Value: ...

    def set(self, value: Operand) -> None: ...


class TiledDot4(Protocol):
    """Vectors of unsigned bytes, made ready to meet signed ones several at a time."""

    @property
    def tile(self) -> int:
        """How many of `xs` are best given at a time."""

    def sums(
        self, starts: Sequence[Value], xs: Sequence[Value], first: int, last: int
    ) -> list[Value]:
        """For each pointer x its start and the `dot4` of vectors j, first <= j < last, with the
        four signed bytes at x + 4 j, repeated."""


class Builder(ABC):
    """What a kernel body may say. Helpers are defined once here, on the primitives below."""

    # -- primitives ---------------------------------------------------------------------------
    @abstractmethod
    def const(self, type_: Type, value: float | Sequence[float]) -> Value: ...

    @abstractmethod
    def binary(self, op: str, a: Value, b: Operand) -> Value: ...

    @abstractmethod
    def compare(self, op: str, a: Value, b: Operand) -> Value: ...

    @abstractmethod
    def negate(self, a: Value) -> Value: ...

    @abstractmethod
    def select(self, condition: Value, a: Operand, b: Operand) -> Value: ...

    @abstractmethod
    def convert(self, a: Value, element: Type) -> Value: ...

    @abstractmethod
    def zero_extend(self, a: Value, element: Type) -> Value: ...

    @abstractmethod
    def bitcast(self, a: Value, type_: Type) -> Value: ...

    @abstractmethod
    def extract(self, a: Value, index: int) -> Value: ...

    @abstractmethod
    def insert(self, a: Value, index: int, lane: Value) -> Value: ...

    @abstractmethod
    def splat(self, a: Value, lanes: int) -> Value: ...

    @abstractmethod
    def shuffle(self, a: Value, b: Value, indices: Sequence[int]) -> Value:
        """Lanes of `a` followed by lanes of `b`, chosen by constant indices."""

    @abstractmethod
    def offset(self, pointer: Value, offset_bytes: Operand) -> Value: ...

    @abstractmethod
    def not_null(self, pointer: Value) -> Value: ...

    @abstractmethod
    def load(self, pointer: Value, type_: Type, align: int) -> Value: ...

    @abstractmethod
    def store(self, pointer: Value, value: Value, align: int) -> None: ...

    @abstractmethod
    def fetch_add(self, pointer: Value, value: Value) -> Value:
        """Atomically add an integer in memory and return what stood there before.

        What a thread wrote before its own addition is seen by who finds it added.
        """

    @abstractmethod
    def prefetch(self, pointer: Value, level: int = 1) -> None:
        """Ask for the cache line at `pointer`, into the cache of that level.

        Any address will do, and no result depends on it.
        """

    @abstractmethod
    def var(self, initial: Value) -> Variable: ...

    @abstractmethod
    def range(self, start: Operand, stop: Operand = None, step: int = 1) -> Iterator[Value]: ...

    @abstractmethod
    def when(self, condition: Value) -> Iterator[None]: ...

    @abstractmethod
    def loop(self, condition: Callable[[], Value]) -> Iterator[None]: ...

    @abstractmethod
    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c with one rounding, per lane."""

    @abstractmethod
    def sqrt(self, a: Value) -> Value:
        """The correctly rounded square root."""

    @abstractmethod
    def round_even(self, a: Value) -> Value:
        """The nearest integral float, ties to even."""

    @abstractmethod
    def absolute(self, a: Value) -> Value:
        """Clear the sign bit of a float."""

    @abstractmethod
    def dot4(self, acc: Value, u: Value, s: Value, u_max: int = 255) -> Value:
        """acc[i] + sum of u[4i+j] * s[4i+j] for j in 0..3, exact modulo 2^32.

        `u` holds unsigned, `s` signed bytes; `u_max` bounds `u`, which lets targets without a
        dot instruction take a shorter way: two products of at most `SMALL_BYTE` * 127 fit 16
        bits. With `u_max` = 129 no byte of `s` may be -128; with less it may.
        """

    @abstractmethod
    def dot4_sum(
        self, acc: Value, a: Sequence[Value], s: Sequence[Value], u_max: int | None = 255
    ) -> Value:
        """acc and the `dot4` of each a with its s; with `u_max` None the bytes of `a` are signed.

        Targets without a dot instruction add the products of small bytes while they are 16 bits
        wide. Signed bytes cost them less than unsigned ones above 129; no byte of `s` may then be
        -128.
        """

    def tile_dot4(self, us: Sequence[Value], u_max: int = 255) -> TiledDot4 | None:
        """A faster way for vectors that meet many others than one `dot4_sum` after the other.

        None where there is none. `u_max` as in `dot4`.
        """
        return None

    @abstractmethod
    def dot2(self, acc: Value, a: Value, b: Value) -> Value:
        """acc[i] + a[2i] * b[2i] + a[2i+1] * b[2i+1] of signed 16-bit lanes, modulo 2^32."""

    @abstractmethod
    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        """table[i] for every byte lane i of `indices`: 16 bytes, indices 0 to 15."""

    @abstractmethod
    def data(self, content: bytes) -> Value:
        """A pointer to constant bytes that are part of the kernel."""

    # What a kernel may ask about the processor, to cut its work into pieces that fit it. No bit of
    # a result may depend on the answers.
    @property
    def vector_lanes(self) -> int:
        """The f32 lanes of a vector register."""
        return 16

    @property
    def vector_registers(self) -> int:
        """How many there are: what a tile of accumulators and its operands must fit."""
        return 32

    @property
    def stream_ahead(self) -> int:
        """How far ahead of a stream that is computed on to ask for memory, in bytes.

        0: not at all, the processor's own prefetching does better.
        """
        return 0

    @property
    def free_shifts(self) -> bool:
        """Whether shifts and additions run beside multiplications and take no time of their own.

        Else one multiplication that spares several of them is the faster.
        """
        return True

    @property
    def wide_dot4(self) -> bool:
        """Whether `dot4` is as fast for all bytes `u` as for those up to `SMALL_BYTE`."""
        return True

    # -- helpers ------------------------------------------------------------------------------
    def like(self, value: Operand, beside: Value) -> Value:
        """A Python number as a constant of the type of `beside`; a value as it is."""
        if isinstance(value, Value):
            if value.type != beside.type:
                raise KernelError("operands differ in type", got=value.type, wanted=beside.type)
            return value
        return self.const(beside.type, value)

    def index(self, value: Operand) -> Value:
        """An offset or count as i64."""
        return value if isinstance(value, Value) else self.const(i64, value)

    def maximum(self, a: Value, b: Operand) -> Value:
        """The larger lane; a NaN on either side gives NaN (integers: signed)."""
        b = self.like(b, a)
        larger = self.select(a > b, a, b)
        return self.select(a != a, a, larger) if a.type.kind == "f" else larger

    def minimum(self, a: Value, b: Operand) -> Value:
        """The smaller lane; a NaN on either side gives NaN (integers: signed)."""
        b = self.like(b, a)
        smaller = self.select(a < b, a, b)
        return self.select(a != a, a, smaller) if a.type.kind == "f" else smaller

    def tree(self, a: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """Fold lanes pairwise, lane i with lane i + half, down to a scalar (NUMERICS 3)."""
        lanes = a.type.lanes
        while lanes > 1:
            lanes //= 2
            low = self.shuffle(a, a, list(range(lanes)))
            high = self.shuffle(a, a, list(range(lanes, 2 * lanes)))
            a = combine(low, high)
        return a.lane(0)

    def tree_sum(self, a: Value) -> Value:
        return self.tree(a, lambda x, y: x + y)

    def tree_max(self, a: Value) -> Value:
        return self.tree(a, self.maximum)

    def concat(self, a: Value, b: Value) -> Value:
        """The lanes of `a` followed by those of `b`."""
        return self.shuffle(a, b, list(range(a.type.lanes + b.type.lanes)))

    def low_half(self, a: Value) -> Value:
        return self.shuffle(a, a, list(range(a.type.lanes // 2)))

    def high_half(self, a: Value) -> Value:
        return self.shuffle(a, a, list(range(a.type.lanes // 2, a.type.lanes)))


Body = Callable[..., None]


class Kernel(NamedTuple):
    """One kernel, specialised: its body, run-time parameters, and compile-time choices.

    Called natively as `void name(ptr args, i64 begin, i64 end, ptr scratch)`: `args` points to
    one 8-byte word a parameter (pointers, i64, or an f32 in the low half), `begin` and `end` bound
    the units of work to do, `scratch` is memory of this thread alone.
    """

    name: str
    body: Body
    params: tuple[tuple[str, Type], ...]
    static: tuple[tuple[str, Any], ...] = ()

    @property
    def symbol(self) -> str:
        """The unique name of this specialisation: `matmul__format_q4_1__bias_1`."""
        parts = [self.name] + [f"{key}_{_spell(value)}" for key, value in self.static]
        return "__".join(parts)

    def trace(
        self, k: Builder, args: Mapping[str, Value], begin: Value, end: Value, scratch: Value
    ) -> None:
        """Run the body on a builder: emits code or computes, as the builder does."""
        self.body(k, begin=begin, end=end, scratch=scratch, **args, **dict(self.static))


def _spell(value: object) -> str:
    text = str(getattr(value, "name", value))
    return "".join(c if c.isalnum() or c == "_" else "_" for c in text)


class KernelFamily:
    """A kernel body with its parameters; calling it with compile-time choices gives a `Kernel`."""

    def __init__(self, body: Body, params: Mapping[str, Type]) -> None:
        self.body, self.params = body, tuple(params.items())
        self.name = body.__name__
        self.__doc__ = body.__doc__

    def __call__(self, **static: Any) -> Kernel:
        return Kernel(self.name, self.body, self.params, tuple(sorted(static.items())))


def kernel(**params: Type) -> Callable[[Body], KernelFamily]:
    """Declare a kernel: `@kernel(x=ptr, y=ptr, n=i64)` above `def name(k, *, begin, end, ...)`.

    The body receives each parameter by name, `begin`, `end` and `scratch`, and its compile-time
    choices as further keyword arguments.
    """
    return lambda body: KernelFamily(body, params)
