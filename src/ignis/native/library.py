"""Kernels as callable machine code: emitted, or loaded from the object cache, then linked."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from ignis.errors import KernelError
from ignis.kernels.lang import Kernel, f32, ptr
from ignis.native.cache import ObjectCache, object_digest
from ignis.native.codegen import emit_object, target_machine
from ignis.native.emit import emit_kernel, new_module
from ignis.target import Target

_SIGNATURE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
)


class BuildReport(NamedTuple):
    """What loading a library cost."""

    n_kernels: int
    n_compiled: int
    seconds: float


class Routine(NamedTuple):
    """Native code that is no kernel (the walker, the fault handler): a name and its emitter."""

    symbol: str
    emit: Callable[[ir.Module, Target], None]


class Library:
    """A set of kernels and routines in memory.

    Keep it alive as long as any address from it is in use.
    """

    def __init__(
        self, parts: Sequence[Kernel | Routine], target: Target, cache: ObjectCache
    ) -> None:
        started = time.perf_counter()
        unique = {part.symbol: part for part in parts}
        self.target = target
        self._objects, n_compiled = _objects(list(unique.values()), target, cache)
        # LLVM adopts the empty module; the engine then holds only our objects.
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine(target))
        for data in self._objects.values():
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(data))
        self._engine.finalize_object()
        self._addresses: dict[str, int] = {}
        self.report = BuildReport(len(unique), n_compiled, time.perf_counter() - started)

    def address(self, function: Kernel | str) -> int:
        """Where a kernel's code, or a routine's function by name, starts."""
        symbol = function if isinstance(function, str) else function.symbol
        if symbol not in self._addresses:  # LLVM is asked once: a plan asks for hundreds
            address = int(self._engine.get_function_address(symbol))
            if not address:
                raise KernelError("this library has no such function", where=symbol)
            self._addresses[symbol] = address
        return self._addresses[symbol]

    def call(
        self, kernel: Kernel, args: dict[str, Any], begin: int, end: int,
        scratch: np.ndarray[Any, Any] | None = None,
    ) -> None:  # fmt: skip
        """Run one kernel on NumPy arrays or addresses (for pointers) and numbers."""
        words = pack_args(kernel, args)
        call = _SIGNATURE(self.address(kernel))
        call(words.ctypes.data, begin, end, None if scratch is None else scratch.ctypes.data)


def pack_args(kernel: Kernel, args: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The argument words of a kernel: one int64 a parameter, f32 in the low half."""
    words = np.zeros(len(kernel.params), np.int64)
    for index, (name, type_) in enumerate(kernel.params):
        arg = args[name]
        if type_ == ptr and isinstance(arg, np.ndarray):
            words[index] = arg.ctypes.data
        elif type_ == f32:
            words[index] = int(np.float32(arg).view(np.int32))
        else:
            words[index] = 0 if arg is None else int(arg)
    return words


def _objects(
    parts: list[Kernel | Routine], target: Target, cache: ObjectCache
) -> tuple[dict[str, bytes], int]:
    """Object code by symbol, and how many had to be compiled.

    One after the other: llvmlite holds one lock around every call into LLVM.
    """
    objects: dict[str, bytes] = {}
    n_compiled = 0
    for part in parts:
        digest = object_digest(part.symbol, target)
        data = cache.get(digest)
        if data is None:
            module = new_module(target, part.symbol)
            if isinstance(part, Kernel):
                emit_kernel(module, target, part)
            else:
                part.emit(module, target)
            data = emit_object(module, target)
            cache.put(digest, data)
            n_compiled += 1
        objects[part.symbol] = data
    return objects, n_compiled
