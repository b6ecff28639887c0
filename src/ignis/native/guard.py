"""One clear line instead of a bus error when a mapped model file is truncated under us.

Reading a page past the new end of a mapped file raises SIGBUS, which Python cannot catch. The
handler here is emitted code: it looks the faulting address up in a table of mappings, and if it is
ours writes that mapping's message to stderr and ends the process with status 1. A fault that is
not ours is passed on: the previous action is put back and the instruction faults again.

Table: `n` (i64), then n entries of | start | end | message address | message length |.
"""

from __future__ import annotations

from llvmlite import ir

from ignis.kernels.lang import Value, i32, i64, ptr
from ignis.native.emit import LlvmBuilder, new_function
from ignis.target import Target

ENTRY_NBYTES = 32
MAX_ENTRIES = 256
# Guard block: addresses of libc functions and of the previous action, a count of those who came to
# say it, then the table.
WRITE, EXIT, SIGACTION, PREVIOUS, SAID, TABLE = 0, 8, 16, 24, 32, 64
GUARD_NBYTES = TABLE + 8 + MAX_ENTRIES * ENTRY_NBYTES
SIGACTION_NBYTES = 192  # no less than any libc's struct sigaction
_SI_ADDR = 16  # siginfo_t.si_addr on 64-bit Linux
_STDERR = 2


def emit_guard(module: ir.Module, target: Target) -> None:
    """Define `guard_set(ptr block)` and `guard_handler(i32 signal, ptr info, ptr context)`."""
    block = ir.GlobalVariable(module, ir.PointerType(), "guard_block")
    block.linkage = "internal"
    block.initializer = ir.Constant(ir.PointerType(), None)
    k, (address,) = new_function(module, target, "guard_set", (ptr,))
    k.b.store(address.raw, block)
    k.ret()
    _emit_handler(module, target, block)


def _emit_handler(module: ir.Module, target: Target, block: ir.GlobalVariable) -> None:
    k, (signal, info, _context) = new_function(module, target, "guard_handler", (i32, ptr, ptr))
    guard = Value(k, ptr, k.b.load(block, typ=ir.PointerType()))
    address = info.at(_SI_ADDR).load(i64)
    table = guard.at(TABLE)
    for i in k.range(table.load(i64)):
        entry = table.at(8 + i * ENTRY_NBYTES)
        inside = (address >= entry.load(i64)) & (address < entry.at(8).load(i64))
        for _ in k.when(inside):
            _say_and_exit(k, guard, entry)
    action = guard.at(PREVIOUS).load(ptr)
    k.call(guard.at(SIGACTION).load(ptr), i32, signal, action, k.const(i64, 0))
    k.ret()


def _say_and_exit(k: LlvmBuilder, guard: Value, entry: Value) -> None:
    """Threads fault together: the first one speaks, the others wait for the end."""
    for _ in k.when(k.fetch_add(guard.at(SAID), k.const(i64, 1)) != 0):
        for _ in k.loop(lambda: k.fetch_add(guard.at(SAID), k.const(i64, 0)) != 0):
            k.pause()
    message, length = entry.at(16).load(ptr), entry.at(24).load(i64)
    k.call(guard.at(WRITE).load(ptr), i64, k.const(i32, _STDERR), message, length)
    k.call(guard.at(EXIT).load(ptr), None, k.const(i32, 1))
