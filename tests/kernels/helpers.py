"""Runs one kernel in every form it has and compares bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ignis.kernels.eager import Pointer, run_eager
from ignis.kernels.lang import Kernel
from ignis.native.cache import ObjectCache
from ignis.native.host import host_target
from ignis.native.library import Library
from ignis.target import Target

Array = NDArray[Any]
_GUARD_NBYTES = 256


@cache
def levels() -> tuple[str, ...]:
    """The targets that this machine can run: itself and the feature levels below it."""
    host = host_target()
    return ("host", *(name for name in Target.levels() if host.runs(Target.level(name))))


def target(level: str) -> Target:
    return host_target() if level == "host" else Target.level(level, _system())


def _system() -> str:
    return host_target().triple.split("-", 1)[1]


@cache
def library(kernel: Kernel, level: str) -> Library:
    return Library([kernel], target(level), ObjectCache(None))


def run(
    kernel: Kernel, level: str, args: Mapping[str, Any], n_units: int,
    outputs: Sequence[str], scratch_nbytes: int = 0, begin: int = 0,
) -> dict[str, Array]:  # fmt: skip
    """Run on copies of `args` (level "eager": the twin); arrays named in `outputs` come back.

    Arrays that are one object stay one, so that in-place use can be tested; arrays of the native
    run stand between guard bytes that must survive.
    """
    guarded = {id(a): _guarded(a) for a in args.values() if isinstance(a, np.ndarray)}
    own = {name: guarded[id(a)][1] if id(a) in guarded else a for name, a in args.items()}
    scratch_buffer, scratch = _guarded(np.zeros(scratch_nbytes, np.uint8))
    if level == "eager":
        pointers = {name: Pointer.to(a) if isinstance(a, np.ndarray) else a
                    for name, a in own.items()}  # fmt: skip
        run_eager(kernel, pointers, begin, n_units, scratch)
    else:
        library(kernel, level).call(kernel, own, begin, n_units, scratch)
        for buffer in (scratch_buffer, *(buffer for buffer, _ in guarded.values())):
            assert (buffer[:_GUARD_NBYTES] == 0xA5).all(), f"{level} wrote before an array"
            assert (buffer[-_GUARD_NBYTES:] == 0xA5).all(), f"{level} wrote past an array"
    return {name: own[name] for name in outputs}


def run_everywhere(
    kernel: Kernel, args: Mapping[str, Any], n_units: int, output: str = "y",
    scratch_nbytes: int = 0,
) -> Array:  # fmt: skip
    """The output of the eager twin, after every native level has given the same bits."""
    wanted = run(kernel, "eager", args, n_units, [output], scratch_nbytes)[output]
    for level in levels():
        got = run(kernel, level, args, n_units, [output], scratch_nbytes)[output]
        assert_same_bits(got, wanted, f"{kernel.symbol} on {level}")
    return wanted


def assert_same_bits(got: Array, wanted: Array, where: str) -> None:
    """Equal patterns; any NaN equals any NaN, and zeros keep their sign."""
    assert got.dtype == wanted.dtype and got.shape == wanted.shape, where
    if got.dtype.names:
        for name in got.dtype.names:
            assert_same_bits(
                np.ascontiguousarray(got[name]), np.ascontiguousarray(wanted[name]),
                f"{where}, field {name}",
            )  # fmt: skip
        return
    pattern = f"u{got.dtype.itemsize}"
    same = got.view(pattern) == wanted.view(pattern)
    if got.dtype.kind == "f":
        same |= np.isnan(got) & np.isnan(wanted)
    wrong = np.argwhere(~same)
    if len(wrong):
        first = tuple(wrong[0])
        raise AssertionError(
            f"{where}: {len(wrong)} of {got.size} differ, first at {first}: "
            f"{got[first]!r} instead of {wanted[first]!r}"
        )


def hostile_floats(rng: np.random.Generator, count: int) -> NDArray[np.float32]:
    """Random bit patterns: every exponent, subnormals, infinities and NaNs among them."""
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**-126,
         np.finfo(np.float32).max, np.finfo(np.float32).min], np.float32)  # fmt: skip
    bits = rng.integers(0, 2**32, count, dtype=np.uint32)
    values = bits.view(np.float32).copy()
    values[: min(count, len(special))] = special[:count]
    rng.shuffle(values)
    return values


def _guarded(array: Array) -> tuple[NDArray[np.uint8], Array]:
    """A copy of the array between guard bytes: the whole buffer and the copy inside it."""
    buffer = np.full(array.nbytes + 2 * _GUARD_NBYTES, 0xA5, np.uint8)
    inside = buffer[_GUARD_NBYTES : _GUARD_NBYTES + array.nbytes]
    inside[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return buffer, inside.view(array.dtype).reshape(array.shape)
