"""The kernel language's primitives: exact on NumPy and in machine code at every level."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from ignis.errors import KernelError
from ignis.kernels.eager import EagerBuilder
from ignis.kernels.lang import (
    Builder,
    Kernel,
    Type,
    Value,
    f16,
    f32,
    i8,
    i16,
    i32,
    i64,
    kernel,
    ptr,
)  # fmt: skip
from ignis.native import dot4
from ignis.native.emit import LlvmBuilder
from tests.kernels.helpers import assert_same_bits, hostile_floats, levels, run, run_everywhere

LANES = 16
Op = Callable[[Builder, Value, Value, Value], Value]


def _probe(name: str, inputs: Type, op: Op, lanes: int = LANES) -> Kernel:
    """A kernel that applies `op` to rows of lanes of a, b and c."""

    def body(k: Builder, *, a: Value, b: Value, c: Value, y: Value, begin: Value, end: Value,
             scratch: Value) -> None:  # fmt: skip
        for i in k.range(begin, end):
            vector = inputs.x(lanes)
            x, z, w = (p.at(i * vector.nbytes).load(vector) for p in (a, b, c))
            result = op(k, x, z, w)
            y.at(i * result.type.nbytes).store(result)

    return Kernel(f"probe_{name}", body, (("a", ptr), ("b", ptr), ("c", ptr), ("y", ptr)))


def _apply(probe: Kernel, result: Any, a: Any, b: Any = None, c: Any = None) -> Any:
    b, c = (a if x is None else x for x in (b, c))
    args = {"a": a, "b": b, "c": c, "y": np.zeros(len(a), result)}
    return run_everywhere(probe, args, len(a) // LANES)


# -- half precision ---------------------------------------------------------------------------


def _half_values() -> Any:
    """The value of every half pattern, from the definition of the format."""
    word = np.arange(65536)
    exponent, fraction = (word >> 10) & 31, word & 1023
    normal = (1024 + fraction) * np.exp2(exponent - 25.0)
    value = np.where(exponent == 0, fraction * 2.0**-24, normal)
    value = np.where(exponent == 31, np.where(fraction == 0, np.inf, np.nan), value)
    return np.where(word >= 0x8000, -value, value).astype(np.float32)


def test_all_halves_widen_exactly() -> None:
    """Weights' scales and the KV cache are halves; one wrong pattern is a wrong model."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    got = _apply(_probe("widen", f16, lambda k, a, b, c: a.to(f32)), np.float32, halves)
    assert_same_bits(got, _half_values(), "widened halves")


def test_all_halves_survive_the_round_trip() -> None:
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    probe = _probe("round_trip", f16, lambda k, a, b, c: a.to(f32).to(f16))
    assert_same_bits(_apply(probe, np.float16, halves), halves, "round trip")


def test_narrowing_rounds_every_boundary_to_even() -> None:
    """Between any two neighbouring halves: the tie, and the floats just beside it."""
    steps = np.arange(0x7C00)
    value = _half_values()
    upper = value[1:0x7C01].copy()
    upper[-1] = 65536.0  # what follows the largest half; from the tie on it is infinity
    tie = ((value[:0x7C00].astype(np.float64) + upper) / 2).astype(np.float32)
    below, above = np.nextafter(tie, np.float32(0)), np.nextafter(tie, np.float32(np.inf))
    floats = np.concatenate([value[:0x7C00], below, tie, above])
    wanted = np.concatenate([steps, steps, steps + (steps & 1), steps + 1]).astype(np.uint16)
    floats, wanted = np.concatenate([floats, -floats]), np.concatenate([wanted, wanted | 0x8000])
    got = _apply(_probe("narrow", f32, lambda k, a, b, c: a.to(f16)), np.float16, floats)
    assert_same_bits(got, wanted.view(np.float16), "narrowed floats")


def test_narrowing_takes_any_float() -> None:
    floats = hostile_floats(np.random.default_rng(0), 4096)
    got = _apply(_probe("narrow", f32, lambda k, a, b, c: a.to(f16)), np.float16, floats)
    with np.errstate(all="ignore"):
        assert_same_bits(got, floats.astype(np.float16), "narrowed floats")


# -- fma --------------------------------------------------------------------------------------


def _round_to_f32(exact: Fraction) -> np.float32:
    """The f32 nearest to a rational, ties to even, subnormals and overflow included."""
    if exact == 0:
        return np.float32(0)
    sign, size = (-1 if exact < 0 else 1), abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    step = Fraction(2) ** max(exponent - 23, -149)
    steps = round(size / step)  # Python rounds a Fraction's ties to even
    value = steps * step
    return np.float32(sign * (float(value) if value < Fraction(2) ** 128 else np.inf))


def _fma_cases(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """Random bits, cancellation, and sums that lie a hair beside a tie of f32.

    The last kind breaks an fma computed in f64: with h half the last place of c, and
    a * b = h * (1 - j^2 * 2^-46), the f64 sum rounds onto the tie and the second rounding then
    goes the wrong way.
    """
    count = 1024
    a, b, c = (hostile_floats(rng, count) for _ in range(3))
    x, y = (rng.standard_normal(count).astype(np.float32) for _ in range(2))
    cancelled = -(x * y)  # leaves the product's rounding error
    base = hostile_floats(rng, count)
    base = np.where(np.isfinite(base) & (base != 0), base, np.float32(1))
    base[:200] = rng.integers(1, 2**23, 200, dtype=np.uint32).view(np.float32)  # subnormal
    base[200:210] = np.finfo(np.float32).max
    place = np.exp2(np.maximum(np.frexp(base.astype(np.float64))[1] - 24.0, -149))
    j = rng.integers(1, 64, count)
    root = np.exp2(np.floor(np.log2(place) / 2))
    u, v = root * (1 + j * 2.0**-23), place / 2 / root * (1 - j * 2.0**-23)
    v *= rng.choice([-1.0, 1.0], count)
    return (
        np.concatenate([a, x, u.astype(np.float32)]),
        np.concatenate([b, y, v.astype(np.float32)]),
        np.concatenate([c, cancelled, base]),
    )


def test_fma_rounds_once() -> None:
    """Exact rational arithmetic is the judge; the soft path must pass where f64 fails."""
    a, b, c = _fma_cases(np.random.default_rng(1))
    got = _apply(_probe("fma", f32, lambda k, x, y, z: k.fma(x, y, z)), np.float32, a, b, c)
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    exact = [
        _round_to_f32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a[finite], b[finite], c[finite], strict=True)
    ]
    wanted = np.array(exact, np.float32)
    assert np.array_equal(got[finite], wanted)
    with np.errstate(all="ignore"):
        naive = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (naive[finite] != wanted).sum() > 100, "the cases are not adversarial"


def test_fma_of_infinities_and_nans() -> None:
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -1.0, 3e38], np.float32)
    a, b, c = (x.reshape(-1) for x in np.meshgrid(special, special, special))
    got = _apply(_probe("fma", f32, lambda k, x, y, z: k.fma(x, y, z)), np.float32, a, b, c)
    with np.errstate(all="ignore"):
        wanted = (a.astype(np.float64) * b + c).astype(np.float32)  # all these are exact in f64
    assert_same_bits(got, wanted, "fma of special values")


# -- integers ---------------------------------------------------------------------------------


def _dot4(name: str, u_max: int, lanes: int = LANES) -> Kernel:
    def op(k: Builder, acc: Value, u: Value, s: Value) -> Value:
        return k.dot4(acc, u.bits(i8.x(4 * lanes)), s.bits(i8.x(4 * lanes)), u_max)

    return _probe(f"dot4_{name}", i32, op, lanes)


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize(("u_max", "s_min"), [(255, -128), (129, -127), (128, -128), (15, -128)])
def test_dot4_is_exact(u_max: int, s_min: int, lanes: int) -> None:
    """A saturated pair or a lost carry is a wrong weight product on older processors only."""
    rng = np.random.default_rng(u_max)
    u = rng.integers(0, u_max + 1, 64 * LANES, dtype=np.uint8)
    s = rng.integers(s_min, 128, 64 * LANES, dtype=np.int8)
    u[:256], s[:128], s[128:256] = u_max, s_min, 127  # the extremes, where pairs saturate
    acc = rng.integers(-(2**31), 2**31, 16 * LANES).astype(np.int32)
    args = {"a": acc, "b": u, "c": s, "y": np.zeros_like(acc)}
    got = run_everywhere(_dot4(f"{u_max}_{lanes}", u_max, lanes), args, len(acc) // lanes)
    products = (u.astype(np.int64) * s).reshape(-1, 4).sum(axis=1)
    assert np.array_equal(got, (acc + products).astype(np.int32))


def _dot4_sum(n: int, u_max: int | None, lanes: int) -> Kernel:
    """acc + n dot products of s with the bytes of a, turned by one from each to the next."""

    def op(k: Builder, acc: Value, a: Value, s: Value) -> Value:
        a, s = a.bits(i8.x(4 * lanes)), s.bits(i8.x(4 * lanes))
        turned = [k.shuffle(a, a, [(i + j) % (4 * lanes) for i in range(4 * lanes)])
                  for j in range(n)]  # fmt: skip
        return k.dot4_sum(acc, turned, [s] * n, u_max)

    return _probe(f"dot4_sum_{n}_{u_max}_{lanes}", i32, op, lanes)


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("n", [1, 4, 8])
@pytest.mark.parametrize(
    ("u_max", "s_min"),
    [(None, -127), (255, -128), (129, -127), (63, -128), (31, -128), (15, -128), (3, -128)],
)
def test_dot4_sum_is_exact(u_max: int | None, s_min: int, n: int, lanes: int) -> None:
    """The words that are summed before they are widened hold the largest products there are."""
    rng = np.random.default_rng(n)
    first, last = (-128, 127) if u_max is None else (0, u_max)
    a = rng.integers(first, last + 1, 64 * LANES).astype(np.int8 if u_max is None else np.uint8)
    s = rng.integers(s_min, 128, 64 * LANES, dtype=np.int8)
    a[:128], a[128:256], s[:64], s[64:128], s[128:256] = last, first, s_min, 127, s_min
    acc = rng.integers(-(2**31), 2**31, 16 * LANES).astype(np.int32)
    args = {"a": acc, "b": a, "c": s, "y": np.zeros_like(acc)}
    got = run_everywhere(_dot4_sum(n, u_max, lanes), args, len(acc) // lanes)
    wide, bytes_ = s.astype(np.int64), a.reshape(-1, 4 * lanes).astype(np.int64)
    wanted = acc.astype(np.int64)
    for j in range(n):
        wanted += (np.roll(bytes_, -j, axis=1).reshape(-1) * wide).reshape(-1, 4).sum(axis=1)
    assert np.array_equal(got, wanted.astype(np.int32))


@kernel(u=ptr, x=ptr, y=ptr)
def _dot4_tile(
    k: Builder, *, u: Value, x: Value, y: Value, begin: Value, end: Value, scratch: Value,
    u_max: int, span: tuple[int, int],
) -> None:  # fmt: skip
    """y[t] = the dot4 of eight vectors at u, those of `span`, with x[t] of 32 bytes; i32 [16]."""
    us = [u.at(64 * j).load(i8.x(64)) for j in range(8)]
    tiled = k.tile_dot4(us, u_max)
    n = 1 if tiled is None else tiled.tile
    for t in k.range(begin, end, n):
        xs = [x.at((t + i) * 32) for i in range(n)]
        if tiled is None:
            fours = [xs[0].at(4 * j).load(i32).splat(16).bits(i8.x(64)) for j in range(*span)]
            sums = [k.dot4_sum(k.const(i32.x(16), 0), us[slice(*span)], fours, u_max)]
        else:
            sums = tiled.sums([k.const(i32.x(16), 0)] * n, xs, *span)
        for i, total in enumerate(sums):
            y.at((t + i) * 64).store(total)


@pytest.mark.parametrize("span", [(0, 8), (4, 8)])
@pytest.mark.parametrize(
    ("u_max", "s_min"),
    [(255, -128), (130, -128), (129, -127), (128, -128), (63, -128), (45, -128), (31, -128),
     (16, -128), (15, -128), (3, -128)],
)  # fmt: skip
def test_a_tile_of_dot4_is_exact(u_max: int, s_min: int, span: tuple[int, int]) -> None:
    """Sums that outgrow their words are wrong for rare tokens, on older processors only."""
    rng = np.random.default_rng(u_max)
    u = rng.integers(0, u_max + 1, (8, 16, 4), dtype=np.uint8)
    x = rng.integers(s_min, 128, (8, 8, 4), dtype=np.int8)
    u[:, :8], x[0], x[1] = u_max, s_min, 127  # every product at its extreme
    args = {"u": u, "x": x, "y": np.zeros((8, 16), np.int32)}
    got = run_everywhere(_dot4_tile(u_max=u_max, span=span), args, len(x))
    used = slice(*span)
    products = np.einsum("jrb,tjb->tr", u[used].astype(np.int64), x[:, used].astype(np.int64))
    assert np.array_equal(got, products)


def test_dot4_without_any_instruction() -> None:
    """The plain form, which Arm gets, computed here."""

    def op(k: Builder, acc: Value, u: Value, s: Value) -> Value:
        assert isinstance(k, LlvmBuilder)
        return dot4._widening(k, acc, u.bits(i8.x(64)), s.bits(i8.x(64)))

    rng = np.random.default_rng(5)
    acc, u, s = (rng.integers(-(2**31), 2**31, 256).astype(np.int32) for _ in range(3))
    args = {"a": acc, "b": u, "c": s, "y": np.zeros_like(acc)}
    got = run(_probe("dot4_widening", i32, op), "host", args, 16, ["y"])["y"]
    wanted = run(_dot4("255_16", 255), "eager", args, 16, ["y"])["y"]
    assert np.array_equal(got, wanted)


def test_dot4_holds_its_caller_to_the_promise() -> None:
    """The twin finds a broken bound that one processor in three would compute wrongly."""
    big = np.full(LANES, 0x7F7F7F82, np.int32)  # a byte of 130
    args = {"a": big, "b": big, "c": np.zeros_like(big), "y": np.zeros_like(big)}
    with pytest.raises(KernelError, match="promised"):
        run(_dot4("129_16", 129), "eager", args, 1, ["y"])
    args |= {"b": np.zeros_like(big), "c": np.full(LANES, -0x7F7F7F80, np.int32)}
    with pytest.raises(KernelError, match="promised"):
        run(_dot4("129_16", 129), "eager", args, 1, ["y"])


def _signed(number: int, bits: int) -> int:
    number %= 1 << bits
    return number - (1 << bits) if number >> (bits - 1) else number


@pytest.mark.parametrize("element", [i8, i16, i32, i64], ids=str)
def test_integer_operators_follow_python(element: Type) -> None:
    """Wrapping, and which shifts and divisions are signed, by Python's integers."""
    bits = element.bits
    mask = (1 << bits) - 1
    plain: dict[str, tuple[Op, Callable[[int, int], int]]] = {
        "add": (lambda k, a, b, c: a + b, lambda a, b: a + b),
        "sub": (lambda k, a, b, c: a - b, lambda a, b: a - b),
        "mul": (lambda k, a, b, c: a * b, lambda a, b: a * b),
        "neg": (lambda k, a, b, c: -a, lambda a, b: -a),
        "shl": (lambda k, a, b, c: a << (b & (bits - 1)), lambda a, b: a << (b & (bits - 1))),
        "shr": (lambda k, a, b, c: a >> (b & (bits - 1)),
                lambda a, b: (a & mask) >> (b & (bits - 1))),
        "sar": (lambda k, a, b, c: a.sar(b & (bits - 1)), lambda a, b: a >> (b & (bits - 1))),
        "udiv": (lambda k, a, b, c: a // (b | 1), lambda a, b: (a & mask) // ((b | 1) & mask)),
        "urem": (lambda k, a, b, c: a % (b | 1), lambda a, b: (a & mask) % ((b | 1) & mask)),
        "bitwise": (lambda k, a, b, c: (a & b) ^ (b | 12), lambda a, b: (a & b) ^ (b | 12)),
        "order": (lambda k, a, b, c: k.select(a < b, a, b), min),
        "maximum": (lambda k, a, b, c: k.maximum(a, b), max),
    }  # fmt: skip
    rng = np.random.default_rng(bits)
    dtype = np.dtype(f"i{bits // 8}")
    a, b = (rng.integers(-(1 << (bits - 1)), 1 << (bits - 1), 64).astype(dtype) for _ in range(2))
    a[:4], b[2:6] = [-1 << (bits - 1), -1, 0, 1], [-1 << (bits - 1), -1, 0, 1]
    for name, (op, meaning) in plain.items():
        got = _apply(_probe(f"{name}_{element}", element, op), dtype, a, b)
        wanted = [_signed(meaning(int(x), int(y)), bits) for x, y in zip(a, b, strict=True)]
        assert got.tolist() == wanted, name


def test_conversions_between_integers_and_floats() -> None:
    numbers = np.arange(-(2**15), 2**15, 7)[: 16 * 500].astype(np.int16)
    for name, op, wanted in (
        ("cut", lambda k, a, b, c: a.to(i8), numbers.astype(np.int8)),
        ("sext", lambda k, a, b, c: a.to(i32), numbers.astype(np.int32)),
        ("zext", lambda k, a, b, c: a.zext(i32), numbers.view(np.uint16).astype(np.int32)),
        ("float", lambda k, a, b, c: a.to(f32), numbers.astype(np.float32)),
        ("back", lambda k, a, b, c: (a.to(f32) / 3.0).to(i32),
         np.trunc(numbers.astype(np.float32) / np.float32(3)).astype(np.int32)),
    ):  # fmt: skip
        assert_same_bits(_apply(_probe(name, i16, op), wanted.dtype, numbers), wanted, name)
    big = np.random.default_rng(2).integers(-(2**62), 2**62, 256)
    got = _apply(_probe("float64", i64, lambda k, a, b, c: a.to(f32)), np.float32, big)
    wanted = np.array([_round_to_f32(Fraction(int(x))) for x in big])
    assert_same_bits(got, wanted, "i64 to f32 rounds once")


# -- floats -----------------------------------------------------------------------------------


def test_round_even_takes_ties_to_even() -> None:
    halves = np.arange(-512, 512, dtype=np.float32) / 2
    near = np.nextafter(halves, np.float32(1e9))
    large = np.array([2**22 + 0.5, 2**23 + 1, 2**24 + 2, 3e38, np.inf, -np.inf, 1e-45, -0.4] * 2)
    floats = np.concatenate([halves, near, large.astype(np.float32)])
    got = _apply(_probe("round", f32, lambda k, a, b, c: k.round_even(a)), np.float32, floats)
    wanted = [round(float(x)) if np.isfinite(x) else x for x in floats]
    assert np.array_equal(got, np.array(wanted, np.float32))
    assert np.signbit(got[floats == np.float32(-0.4)]).all(), "minus zero keeps its sign"


def test_float_operators_follow_ieee() -> None:
    """Comparisons with NaN, the sign of zero, and maxima that let NaN through."""
    rng = np.random.default_rng(3)
    a, b = hostile_floats(rng, 512), hostile_floats(rng, 512)
    a[:32], b[:16] = np.nan, np.nan
    b[100:200] = a[100:200]
    with np.errstate(all="ignore"):
        cases: dict[str, tuple[Op, Any]] = {
            "add": (lambda k, x, y, z: x + y, a + b),
            "div": (lambda k, x, y, z: x / y, a / b),
            "sqrt": (lambda k, x, y, z: k.sqrt(x), np.sqrt(a)),
            "neg": (lambda k, x, y, z: -x, -a),
            "abs": (lambda k, x, y, z: k.absolute(x), np.abs(a)),
            "lt": (lambda k, x, y, z: (x < y).zext(i32).to(f32), (a < b).astype(np.float32)),
            "ge": (lambda k, x, y, z: (x >= y).zext(i32).to(f32), (a >= b).astype(np.float32)),
            "eq": (lambda k, x, y, z: (x == y).zext(i32).to(f32), (a == b).astype(np.float32)),
            "ne": (lambda k, x, y, z: (x != y).zext(i32).to(f32), (a != b).astype(np.float32)),
        }
    for name, (op, wanted) in cases.items():
        assert_same_bits(_apply(_probe(f"f_{name}", f32, op), np.float32, a, b), wanted, name)
    for name, op, numpy_op in (
        ("maximum", lambda k, x, y, z: k.maximum(x, y), np.maximum),
        ("minimum", lambda k, x, y, z: k.minimum(x, y), np.minimum),
    ):
        got = _apply(_probe(f"f_{name}", f32, op), np.float32, a, b)
        assert np.array_equal(got, numpy_op(a, b), equal_nan=True), name


def test_tree_adds_lane_i_and_lane_i_plus_half() -> None:
    x = hostile_floats(np.random.default_rng(4), 1024)
    x = np.where(np.abs(x) < 1e30, x, np.float32(1))
    probe = _probe("tree", f32, lambda k, a, b, c: k.tree_sum(a))
    args = {"a": x, "b": x, "c": x, "y": np.zeros(64, np.float32)}
    got = run_everywhere(probe, args, 64)
    rows = x.reshape(64, 16)
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    assert_same_bits(got, rows[:, 0].copy(), "tree")


# -- control flow -----------------------------------------------------------------------------


@kernel(x=ptr, y=ptr)
def collatz(
    k: Builder, *, x: Value, y: Value, begin: Value, end: Value, scratch: Value
) -> None:
    """Steps until 1: a while loop with branches inside a counted loop."""
    for i in k.range(begin, end):
        n, steps = k.var(x.at(i * 8).load(i64)), k.var(k.const(i64, 0))
        for _ in k.loop(lambda n=n: n.get() > 1):  # type: ignore[misc]
            odd = n.get() % 2 == 1
            for _ in k.when(odd):
                n.set(n.get() * 3 + 1)
            for _ in k.when(odd == k.const(odd.type, 0)):
                n.set(n.get() // 2)
            steps.set(steps.get() + 1)
        y.at(i * 8).store(steps.get())


def test_loops_and_branches() -> None:
    got = run_everywhere(collatz(), {"x": np.arange(30), "y": np.zeros(30, np.int64)}, 30)
    assert got[[1, 6, 7, 27]].tolist() == [0, 8, 16, 111]


def test_python_if_on_a_value_is_refused() -> None:
    """It would silently decide while the kernel is built."""

    def op(k: Builder, a: Value, b: Value, c: Value) -> Value:
        return a if a.lane(0) > 0 else b

    x = np.zeros(16, np.float32)
    for level in ("eager", *levels()[:1]):
        with pytest.raises(KernelError, match=r"k\.when"):
            run(_probe("if", f32, op), level, {"a": x, "b": x, "c": x, "y": x}, 1, ["y"])


def test_leaving_memory_is_found_by_the_twin() -> None:
    x = np.zeros(16, np.float32)
    probe = _probe("copy", f32, lambda k, a, b, c: a)
    with pytest.raises(KernelError, match="leaves its memory"):
        run(probe, "eager", {"a": x, "b": x, "c": x, "y": x}, 2, ["y"])


def test_operands_of_different_types_are_refused() -> None:
    k = EagerBuilder()
    with pytest.raises(KernelError, match="differ in type"):
        _ = k.const(i32, 1) + k.const(i64, 1)
