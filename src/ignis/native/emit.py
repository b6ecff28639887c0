"""The kernel language as LLVM IR, for any `Target`.

Only a few primitives have a target-specific form: `fma` without an FMA unit, half conversion
without F16C, and `dot4`. Everything else is plain LLVM, which legalizes the canonical vectors.
No fast-math flag appears anywhere, so the order of float operations is the one written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir

from ignis.errors import KernelError
from ignis.kernels.lang import (
    Builder,
    Kernel,
    Operand,
    TiledDot4,
    Type,
    Value,
    f16,
    f32,
    f64,
    i1,
    i8,
    i16,
    i32,
    i64,
    ptr,
)  # fmt: skip
from ignis.native import dot2, dot4, dot4_tiles, lookup
from ignis.target import Target

_FLOATS = {16: ir.HalfType(), 32: ir.FloatType(), 64: ir.DoubleType()}


def llvm_type(type_: Type) -> ir.Type:
    element: ir.Type
    if type_.kind == "p":
        element = ir.PointerType()
    elif type_.kind == "f":
        element = _FLOATS[type_.bits]
    else:
        element = ir.IntType(type_.bits)
    return ir.VectorType(element, type_.lanes) if type_.lanes else element


class LlvmVariable:
    """A stack slot; LLVM's mem2reg turns it into registers and phi nodes."""

    def __init__(self, k: LlvmBuilder, initial: Value) -> None:
        self._k, self._type = k, initial.type
        with k.b.goto_entry_block():
            self._slot = k.b.alloca(llvm_type(initial.type))
        k.b.store(initial.raw, self._slot)

    def get(self) -> Value:
        raw = self._k.b.load(self._slot, typ=llvm_type(self._type))
        return Value(self._k, self._type, raw)

    def set(self, value: Operand) -> None:
        if not isinstance(value, Value):
            value = self._k.const(self._type, value)
        elif value.type != self._type:
            raise KernelError("a variable keeps its type", got=value.type, wanted=self._type)
        self._k.b.store(value.raw, self._slot)


class LlvmBuilder(Builder):
    """Emits LLVM IR into one function. Raw values are llvmlite values."""

    def __init__(self, module: ir.Module, function: ir.Function, target: Target) -> None:
        self.module, self.function, self.target = module, function, target
        self.b = ir.IRBuilder(function.append_basic_block("entry"))

    def _new(self, type_: Type, raw: Any) -> Value:
        return Value(self, type_, raw)

    def const(self, type_: Type, value: float | Sequence[float]) -> Value:
        lanes = [value] * type_.count if isinstance(value, (int, float)) else list(value)
        constants = [_constant(type_.element, lane) for lane in lanes]
        raw = ir.Constant(llvm_type(type_), constants) if type_.lanes else constants[0]
        return self._new(type_, raw)

    def binary(self, op: str, a: Value, b: Operand) -> Value:
        b = self.like(b, a)
        name = _BINARY[op][a.type.kind == "f"]
        if name is None:
            raise KernelError(f"{op} is not defined on {a.type}")
        return self._new(a.type, getattr(self.b, name)(a.raw, b.raw))

    def compare(self, op: str, a: Value, b: Operand) -> Value:
        b = self.like(b, a)
        symbol = _COMPARE[op]
        if a.type.kind == "f":
            emit = self.b.fcmp_unordered if op == "ne" else self.b.fcmp_ordered
        else:
            emit = self.b.icmp_signed
        return self._new(i1.x(a.type.lanes), emit(symbol, a.raw, b.raw))

    def negate(self, a: Value) -> Value:
        raw = self.b.fneg(a.raw) if a.type.kind == "f" else self.b.neg(a.raw)
        return self._new(a.type, raw)

    def select(self, condition: Value, a: Operand, b: Operand) -> Value:
        if not isinstance(a, Value):
            a = self.like(a, b)
        b = self.like(b, a)
        return self._new(a.type, self.b.select(condition.raw, a.raw, b.raw))

    def convert(self, a: Value, element: Type) -> Value:
        source, result = a.type.element, element.x(a.type.lanes)
        if source == element:
            return a
        if f16 in (source, element) and not self.target.has_half:
            return self._convert_half(a, element)
        to = llvm_type(result)
        if source.kind == "f" and element.kind == "f":
            emit = self.b.fpext if element.bits > source.bits else self.b.fptrunc
        elif source.kind == "f":
            emit = self.b.fptosi
        elif element.kind == "f":
            emit = self.b.sitofp
        else:
            emit = self.b.sext if element.bits > source.bits else self.b.trunc
        return self._new(result, emit(a.raw, to))

    def _convert_half(self, a: Value, element: Type) -> Value:
        """f16 <-> f32 in integer code: no library call may appear (NUMERICS 0)."""
        if element == f32:
            return half_to_float(self, a)
        if a.type.element == f32:
            return float_to_half(self, a)
        return self.convert(self.convert(a, f32), element)

    def zero_extend(self, a: Value, element: Type) -> Value:
        result = element.x(a.type.lanes)
        return self._new(result, self.b.zext(a.raw, llvm_type(result)))

    def bitcast(self, a: Value, type_: Type) -> Value:
        return self._new(type_, self.b.bitcast(a.raw, llvm_type(type_)))

    def extract(self, a: Value, index: int) -> Value:
        return self._new(a.type.element, self.b.extract_element(a.raw, _lane(index)))

    def insert(self, a: Value, index: int, lane: Value) -> Value:
        return self._new(a.type, self.b.insert_element(a.raw, lane.raw, _lane(index)))

    def splat(self, a: Value, lanes: int) -> Value:
        result = a.type.x(lanes)
        undefined = ir.Constant(llvm_type(result), ir.Undefined)
        first = self.b.insert_element(undefined, a.raw, _lane(0))
        return self.shuffle(self._new(result, first), self._new(result, undefined), [0] * lanes)

    def shuffle(self, a: Value, b: Value, indices: Sequence[int]) -> Value:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), len(indices)), list(indices))
        return self._new(a.type.x(len(indices)), self.b.shuffle_vector(a.raw, b.raw, mask))

    def offset(self, pointer: Value, offset_bytes: Operand) -> Value:
        offset = self.index(offset_bytes)
        return self._new(ptr, self.b.gep(pointer.raw, [offset.raw], source_etype=ir.IntType(8)))

    def not_null(self, pointer: Value) -> Value:
        null = ir.Constant(pointer.raw.type, None)
        return self._new(i1, self.b.icmp_unsigned("!=", pointer.raw, null))

    def load(self, pointer: Value, type_: Type, align: int) -> Value:
        return self._new(type_, self.b.load(pointer.raw, align=align, typ=llvm_type(type_)))

    def store(self, pointer: Value, value: Value, align: int) -> None:
        self.b.store(value.raw, pointer.raw, align=align)

    def prefetch(self, pointer: Value, level: int = 1) -> None:
        hints = [self.const(i32, x) for x in (0, 4 - level, 1)]  # read, locality, data
        self.intrinsic("llvm.prefetch.p0", None, pointer, *hints)

    def var(self, initial: Value) -> LlvmVariable:
        return LlvmVariable(self, initial)

    def range(self, start: Operand, stop: Operand = None, step: int = 1) -> Iterator[Value]:
        if stop is None:
            start, stop = 0, start
        i, end = self.var(self.index(start)), self.index(stop)
        for _ in self.loop(lambda: i.get() < end):
            current = i.get()
            yield current
            i.set(current + step)

    def when(self, condition: Value) -> Iterator[None]:
        body, after = self._block("when"), self._block("after")
        self.b.cbranch(condition.raw, body, after)
        self.b.position_at_end(body)
        yield None
        self.b.branch(after)
        self.b.position_at_end(after)

    def loop(self, condition: Callable[[], Value]) -> Iterator[None]:
        head, body, after = self._block("head"), self._block("body"), self._block("after")
        self.b.branch(head)
        self.b.position_at_end(head)
        self.b.cbranch(condition().raw, body, after)
        self.b.position_at_end(body)
        yield None
        self.b.branch(head)
        self.b.position_at_end(after)

    def _block(self, name: str) -> ir.Block:
        return self.function.append_basic_block(name)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        if a.type.element != f32:
            raise KernelError("fma is defined on f32 lanes only", got=a.type)
        if not self.target.has_fma:
            return soft_fma(self, a, b, c)
        return self.intrinsic("llvm.fma." + _mangle(a.type), a.type, a, b, c)

    def sqrt(self, a: Value) -> Value:
        return self.intrinsic("llvm.sqrt." + _mangle(a.type), a.type, a)

    def round_even(self, a: Value) -> Value:
        return self.intrinsic("llvm.roundeven." + _mangle(a.type), a.type, a)

    def absolute(self, a: Value) -> Value:
        return self.intrinsic("llvm.fabs." + _mangle(a.type), a.type, a)

    def dot4(self, acc: Value, u: Value, s: Value, u_max: int = 255) -> Value:
        return dot4.emit(self, acc, u, s, u_max)

    def dot4_sum(
        self, acc: Value, a: Sequence[Value], s: Sequence[Value], u_max: int | None = 255
    ) -> Value:
        return dot4.emit_sum(self, acc, a, s, u_max)

    def tile_dot4(self, us: Sequence[Value], u_max: int = 255) -> TiledDot4 | None:
        if dot4.is_wide(self.target):
            return dot4.side_by_side(self, us, u_max)
        return dot4_tiles.tiled(self, us, u_max)

    def data(self, content: bytes) -> Value:
        digest = hashlib.sha256(content).hexdigest()
        name = f"{self.module.name}.data.{digest[:16]}"
        constant = self.module.globals.get(name)
        if constant is None:
            type_ = ir.ArrayType(ir.IntType(8), len(content))
            constant = ir.GlobalVariable(self.module, type_, name)
            constant.initializer = ir.Constant(type_, bytearray(content))
            constant.linkage, constant.global_constant = "private", True
            constant.align = 64
        return self._new(ptr, self.b.bitcast(constant, ir.PointerType()))

    @property
    def vector_lanes(self) -> int:
        return self.target.vector_bits // 32

    @property
    def vector_registers(self) -> int:
        return self.target.vector_registers

    @property
    def stream_ahead(self) -> int:
        return self.target.stream_ahead

    @property
    def free_shifts(self) -> bool:
        # Intel's two ports of 512 bits take everything.
        return not (self.target.is_intel and self.target.vector_bits == 512)

    @property
    def wide_dot4(self) -> bool:
        return dot4.is_wide(self.target)

    def dot2(self, acc: Value, a: Value, b: Value) -> Value:
        return dot2.emit(self, acc, a, b)

    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        return lookup.emit(self, table, indices)

    # -- native only: what the runtime's own loops need and the eager twin has no use for ---------

    def intrinsic(self, name: str, result: Type | None, *args: Value) -> Value:
        """Call an LLVM intrinsic by its full name."""
        function = self.module.globals.get(name)
        if function is None:
            returns = ir.VoidType() if result is None else llvm_type(result)
            signature = ir.FunctionType(returns, [llvm_type(a.type) for a in args])
            function = ir.Function(self.module, signature, name)
        raw = self.b.call(function, [a.raw for a in args])
        return self._new(result or i1, raw)

    def call(self, address: Value, result: Type | None, *args: Value) -> Value:
        """Call a function by its address, with the platform's C convention."""
        returns = ir.VoidType() if result is None else llvm_type(result)
        signature = ir.FunctionType(returns, [llvm_type(a.type) for a in args])
        # llvmlite folds a cast between pointers away and then misses the signature: go by integer.
        number = self.b.ptrtoint(address.raw, ir.IntType(64))
        function = self.b.inttoptr(number, signature.as_pointer())
        return self._new(result or i1, self.b.call(function, [a.raw for a in args]))

    def load_acquire(self, pointer: Value, type_: Type) -> Value:
        raw = self.b.load_atomic(pointer.raw, "acquire", type_.nbytes, typ=llvm_type(type_))
        return self._new(type_, raw)

    def store_release(self, pointer: Value, value: Value) -> None:
        # llvmlite's store_atomic wants a typed pointer to check against.
        number = self.b.ptrtoint(pointer.raw, ir.IntType(64))
        typed = self.b.inttoptr(number, llvm_type(value.type).as_pointer())
        self.b.store_atomic(value.raw, typed, "release", value.type.nbytes)

    def fetch_add(self, pointer: Value, value: Value) -> Value:
        """Atomically add (sequentially consistent) and return what stood there before."""
        return self._new(value.type, self.b.atomic_rmw("add", pointer.raw, value.raw, "seq_cst"))

    def pause(self) -> None:
        """Tell the core that this is a spin loop."""
        if self.target.is_x86:
            self.intrinsic("llvm.x86.sse2.pause", None)
        elif self.target.is_arm:
            self.intrinsic("llvm.aarch64.hint", None, self.const(i32, 1))

    def ret(self, value: Value | None = None) -> None:
        if value is None:
            self.b.ret_void()
        else:
            self.b.ret(value.raw)


def new_module(target: Target, name: str) -> ir.Module:
    module = ir.Module(name)
    module.triple = target.triple
    return module


def new_function(
    module: ir.Module, target: Target, name: str, params: Sequence[Type], result: Type | None = None
) -> tuple[LlvmBuilder, list[Value]]:
    """An exported C function and a builder at its entry."""
    returns = ir.VoidType() if result is None else llvm_type(result)
    signature = ir.FunctionType(returns, [llvm_type(t) for t in params])
    function = ir.Function(module, signature, name)
    # Some CPU models make LLVM split 512-bit vectors unless the function asks for them.
    # The set is filled past llvmlite's own list of known attributes.
    for attribute in ("min-legal-vector-width", "prefer-vector-width"):
        set.add(function.attributes, f'"{attribute}"="{target.vector_bits}"')
    set.add(function.attributes, "nounwind")
    # Without this LLVM turns copying and clearing loops into calls of memcpy and memset.
    set.add(function.attributes, '"no-builtins"')
    # Else registers that do not fit are spilled to unaligned places, half of them across two lines.
    set.add(function.attributes, '"stackrealign"')
    k = LlvmBuilder(module, function, target)
    values = [Value(k, t, raw) for t, raw in zip(params, function.args, strict=True)]
    return k, values


def emit_kernel(module: ir.Module, target: Target, kernel: Kernel) -> None:
    """Add `kernel` to the module as `void symbol(ptr args, i64 begin, i64 end, ptr scratch)`."""
    k, values = new_function(module, target, kernel.symbol, (ptr, i64, i64, ptr))
    words, begin, end, scratch = values
    args = {
        name: words.at(8 * index).load(type_, align=4)
        for index, (name, type_) in enumerate(kernel.params)
    }
    kernel.trace(k, args, begin, end, scratch)
    k.ret()


def soft_fma(k: Builder, a: Value, b: Value, c: Value) -> Value:
    """fma on f32 lanes without an FMA unit; see `eager.fma_f32` for why it is exact."""
    product = a.to(f64) * b.to(f64)
    addend = c.to(f64)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    wide = i64.x(a.type.lanes)
    pattern = total.bits(wide)
    same_side = ((error > 0.0).zext(i64) ^ (total > 0.0).zext(i64)) == 0
    step = k.select(same_side, k.const(wide, 1), k.const(wide, -1))
    inexact = (error < 0.0) | (error > 0.0)
    even = (pattern & 1) == 0
    odd = pattern + k.select(inexact & even, step, k.const(wide, 0))
    return odd.bits(f64.x(a.type.lanes)).to(f32)


def half_to_float(k: Builder, a: Value) -> Value:
    """Widen f16 lanes in integer code: rebias the exponent, subnormals by an exact multiply."""
    lanes = a.type.lanes
    word = a.bits(i16.x(lanes)).zext(i32)
    sign = (word & 0x8000) << 16
    magnitude = word & 0x7FFF
    # As if the half were a float with a small exponent: times 2^112 it is right for every finite
    # value; infinities and NaNs need the exponent all ones.
    finite = (magnitude << 13).bits(f32.x(lanes)) * k.const(f32.x(lanes), 2.0**112)
    # A signalling NaN becomes quiet, as the hardware instruction does it.
    special = (magnitude << 13) | 0x7F800000
    quiet = k.select(magnitude > 0x7C00, special | 0x400000, special)
    bits = k.select(magnitude >= 0x7C00, quiet, finite.bits(i32.x(lanes)))
    return (bits | sign).bits(f32.x(lanes))


def float_to_half(k: Builder, a: Value) -> Value:
    """Narrow f32 lanes to f16 in integer code, rounding to nearest even."""
    lanes = a.type.lanes
    word = a.bits(i32.x(lanes))
    sign = (word >> 16) & 0x8000
    magnitude = word & 0x7FFFFFFF
    # Normal halves: rebias, then round by adding half a step less one plus the last kept bit.
    rebased = magnitude - (112 << 23)
    normal = (rebased + 0xFFF + ((rebased >> 13) & 1)) >> 13
    # Subnormal halves: adding 0.5 lines the last bit up with 2^-24, and the addition rounds.
    shifted = magnitude.bits(f32.x(lanes)) + k.const(f32.x(lanes), 0.5)
    subnormal = shifted.bits(i32.x(lanes)) - 0x3F000000
    half = k.select(magnitude < (113 << 23), subnormal, normal)
    half = k.select(magnitude >= 0x477FF000, k.const(i32.x(lanes), 0x7C00), half)
    nan = ((magnitude >> 13) & 0x3FF) | 0x7E00
    half = k.select(magnitude > 0x7F800000, nan, half)
    return (half | sign).to(i16).bits(f16.x(lanes))


def _constant(type_: Type, value: float) -> ir.Constant:
    if type_.kind == "i":
        # A Python int may be given as signed or unsigned; LLVM wants it signed.
        number = int(value) % (1 << type_.bits)
        if type_.bits > 1 and number >= 1 << (type_.bits - 1):
            number -= 1 << type_.bits
        return ir.Constant(llvm_type(type_), number)
    return ir.Constant(llvm_type(type_), float(value))


def _lane(index: int) -> ir.Constant:
    return ir.Constant(ir.IntType(32), index)


def _mangle(type_: Type) -> str:
    element = f"{type_.kind}{type_.bits}"
    return f"v{type_.lanes}{element}" if type_.lanes else element


_BINARY: dict[str, tuple[str | None, str | None]] = {
    # op -> (integer, float)
    "add": ("add", "fadd"), "sub": ("sub", "fsub"), "mul": ("mul", "fmul"), "div": (None, "fdiv"),
    "udiv": ("udiv", None), "urem": ("urem", None), "and": ("and_", None), "or": ("or_", None),
    "xor": ("xor", None), "shl": ("shl", None), "shr": ("lshr", None), "sar": ("ashr", None),
}  # fmt: skip

_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}

__all__ = [
    "LlvmBuilder", "emit_kernel", "float_to_half", "half_to_float", "i8", "llvm_type",
    "new_function", "new_module", "soft_fma",
]  # fmt: skip
