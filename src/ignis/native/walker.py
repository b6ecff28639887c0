"""The native loop that runs a compiled plan, one call a step, on every thread of the team.

A *plan* is an array of records, one a kernel launch, sixteen words of 8 bytes each:

    | kernel | args | units | chunk | counter | args stride | repeated | barrier | own |
    | release | release nbytes | unused |

Every thread walks the same records. With `chunk` zero the units are divided evenly; else each
thread begins with `own` units side by side, and all then take chunks of the rest from the counter,
so that a core that is held up takes fewer. A `repeated` record is done whole by every thread, each
with arguments of its own, `args stride` bytes apart. Where
`barrier` is set all threads meet behind the record. Behind chunks that were read from a mapped
file for the last time, the system may drop the pages from address `release` on.

A plan can be *begun*: the workers walk it while the caller does something else, and the caller
walks it, too, when it finishes the plan.

Workers stay parked in `team_worker`, inside native code, without the GIL: they spin a bounded while
and then sleep in the kernel (futex), at barriers too, for a spinning thread would starve the others
when there are more threads than processors.

The *team block* is the shared state; each hot word has a cache line of its own (offsets below).
On abort the walkers skip the work but still meet at every barrier, which keeps them together and
costs microseconds.
"""

from __future__ import annotations

from llvmlite import ir

from ignis.kernels.lang import Type, Value, i32, i64, ptr
from ignis.native.emit import LlvmBuilder, new_function
from ignis.target import Target

# The team block, offsets in bytes.
JOB = 0  # i32: one more for every step; workers wait for a change
ARRIVED = 64  # i64: threads at the barrier
PHASE = 128  # i32: one more whenever the barrier opens
SLEEPERS = 192  # i64: threads that sleep in a futex
ABORT = 256  # i64: nonzero: finish without working
STOP = 320  # i64: nonzero: workers return
N_THREADS = 384  # i64, and the words below change only between steps
PLAN = 392  # address of the records
N_RECORDS = 400  # i64
SCRATCH = 408  # address of thread 0's scratch
SCRATCH_STRIDE = 416  # i64, bytes
SPIN = 424  # i64: rounds at a barrier before sleeping
SPIN_JOB = 432  # i64: rounds between steps before sleeping
SYSCALL = 440  # address of libc's syscall(), zero where there is none
TIMES = 448  # address of i64 [record][2], cycles at work and at the barrier; zero: not profiling
BEGUN = 456  # i64: nonzero: the workers walk a plan that thread 0 has not walked yet
MADVISE = 464  # address of libc's madvise(), zero where there is none
TEAM_NBYTES = 512

RECORD_NBYTES = 128
FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129
_MADV_DONTNEED = 4
_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98}

# MXCSR and FPCR: round to nearest even, subnormals kept, exceptions masked.
_MXCSR_DEFAULT = 0x1F80


def emit_walker(module: ir.Module, target: Target) -> None:
    """Define `run_plan`, `begin_plan`, `finish_plan` and `team_worker(ptr team, i64 index)`.

    The first three take a `ptr team`; `finish_plan` does nothing unless a plan was begun.
    And `enter_float_mode(ptr saved)` and `leave_float_mode(ptr saved)`, for the little that NumPy
    computes on the way to a logit; `saved` is an i64 that the caller keeps in between.
    """
    k, (team, index) = new_function(module, target, "walk_plan", (ptr, i64))
    k.function.linkage = "internal"  # a call of an exported one would go by a table not there
    _walk(k, team, index)
    k.ret()
    _emit_run(module, target, k.function)
    _emit_worker(module, target, k.function)
    _emit_float_mode(module, target)


def _emit_run(module: ir.Module, target: Target, walk: ir.Function) -> None:
    k, (team,) = new_function(module, target, "run_plan", (ptr,))
    for _ in k.when(team.at(N_THREADS).load(i64) > 1):
        _advance(k, team, JOB)
    k.b.call(walk, [team.raw, k.const(i64, 0).raw])
    k.ret()
    k, (team,) = new_function(module, target, "begin_plan", (ptr,))
    team.at(BEGUN).store(k.const(i64, 1))
    _advance(k, team, JOB)
    k.ret()
    k, (team,) = new_function(module, target, "finish_plan", (ptr,))
    for _ in k.when(team.at(BEGUN).load(i64) != 0):
        k.b.call(walk, [team.raw, k.const(i64, 0).raw])
        team.at(BEGUN).store(k.const(i64, 0))
    k.ret()


def _emit_worker(module: ir.Module, target: Target, walk: ir.Function) -> None:
    k, (team, index) = new_function(module, target, "team_worker", (ptr, i64))
    seen = k.var(k.const(i32, 0))
    for _ in k.loop(lambda: k.load_acquire(team.at(STOP), i64) == 0):
        _wait(k, team, JOB, seen.get(), SPIN_JOB)
        seen.set(seen.get() + 1)
        for _ in k.when(k.load_acquire(team.at(STOP), i64) == 0):
            k.b.call(walk, [team.raw, index.raw])
    k.ret()


def _emit_float_mode(module: ir.Module, target: Target) -> None:
    k, (saved,) = new_function(module, target, "enter_float_mode", (ptr,))
    mode = _set_float_mode(k)
    saved.store(mode.load(i32) if target.is_x86 else mode)
    k.ret()
    k, (saved,) = new_function(module, target, "leave_float_mode", (ptr,))
    _restore_float_mode(k, saved if target.is_x86 else saved.load(i64))
    k.ret()


def _walk(k: LlvmBuilder, team: Value, index: Value) -> None:
    saved = _set_float_mode(k)
    plan = team.at(PLAN).load(ptr)
    scratch = team.at(SCRATCH).load(ptr).at(team.at(SCRATCH_STRIDE).load(i64) * index)
    n_threads = team.at(N_THREADS).load(i64)
    for i in k.range(team.at(N_RECORDS).load(i64)):
        record = plan.at(i * RECORD_NBYTES)
        started = _cycles(k)
        for _ in k.when(k.load_acquire(team.at(ABORT), i64) == 0):
            _run_record(k, team, record, index, n_threads, scratch)
        done = _cycles(k)
        waited = k.var(k.const(i64, 0))
        for _ in k.when((n_threads > 1) & (record.at(56).load(i64) != 0)):
            _barrier(k, team, n_threads)
            waited.set(_cycles(k) - done)
        times = team.at(TIMES).load(ptr)
        for _ in k.when(k.not_null(times)):
            for _ in k.when(index == 0):
                cell = times.at(i * 16)
                cell.store(cell.load(i64) + done - started)
                cell.at(8).store(cell.at(8).load(i64) + waited.get())
    _restore_float_mode(k, saved)


def _run_record(
    k: LlvmBuilder, team: Value, record: Value, index: Value, n_threads: Value, scratch: Value
) -> None:
    args = record.at(8).load(ptr).at(record.at(40).load(i64) * index)
    address, units, chunk = record.load(ptr), record.at(16).load(i64), record.at(24).load(i64)
    repeated = record.at(48).load(i64) != 0
    for _ in k.when(repeated & (units > 0)):
        k.call(address, None, args, k.const(i64, 0), units, scratch)
    for _ in k.when((repeated.zext(i64) | chunk) == 0):
        begin, end = units * index // n_threads, units * (index + 1) // n_threads
        for _ in k.when(begin < end):
            k.call(address, None, args, begin, end, scratch)
    for _ in k.when(chunk > 0):
        own = record.at(64).load(i64)
        for _ in k.when(own > 0):
            k.call(address, None, args, own * index, own * (index + 1), scratch)
        call = address, args, scratch
        _take_chunks(k, team, record, call, own * n_threads, units, chunk)


def _take_chunks(
    k: LlvmBuilder, team: Value, record: Value, call: tuple[Value, Value, Value], first: Value,
    units: Value, chunk: Value,
) -> None:  # fmt: skip
    address, args, scratch = call
    counter = record.at(32)
    taken = k.var(first + k.fetch_add(counter, chunk))
    for _ in k.loop(lambda: taken.get() < units):
        begin = taken.get()
        end = k.minimum(begin + chunk, units)
        k.call(address, None, args, begin, end, scratch)
        for _ in k.when(end == units):
            _release(k, team, record)
        taken.set(first + k.fetch_add(counter, chunk))
        for _ in k.when(k.load_acquire(team.at(ABORT), i64) != 0):
            taken.set(units)


def _release(k: LlvmBuilder, team: Value, record: Value) -> None:
    """Let the system drop pages of a mapped file. Who still reads them has them mapped again."""
    nbytes, madvise = record.at(80).load(i64), team.at(MADVISE).load(ptr)
    for _ in k.when((nbytes != 0) & k.not_null(madvise)):
        k.call(madvise, i32, record.at(72).load(ptr), nbytes, k.const(i32, _MADV_DONTNEED))


def _barrier(k: LlvmBuilder, team: Value, n_threads: Value) -> None:
    phase = k.load_acquire(team.at(PHASE), i32)
    arrived = k.fetch_add(team.at(ARRIVED), k.const(i64, 1)) + 1
    for _ in k.when(arrived == n_threads):
        k.store_release(team.at(ARRIVED), k.const(i64, 0))
        _advance(k, team, PHASE)
    for _ in k.when(arrived != n_threads):
        _wait(k, team, PHASE, phase, SPIN)


def _advance(k: LlvmBuilder, team: Value, word: int) -> None:
    """Move a futex word on and wake who sleeps on it.

    Both accesses are sequentially consistent, as are those of `_wait`: either the sleeper sees
    the new word, or we see the sleeper.
    """
    k.fetch_add(team.at(word), k.const(i32, 1))
    for _ in k.when(k.fetch_add(team.at(SLEEPERS), k.const(i64, 0)) > 0):
        _futex(k, team, word, FUTEX_WAKE_PRIVATE, k.const(i64, 0x7FFFFFFF))


def _wait(k: LlvmBuilder, team: Value, word: int, old: Value, spin: int) -> None:
    """Until the word differs from `old`: spin for a while, then sleep."""

    def unchanged() -> Value:
        return k.load_acquire(team.at(word), i32) == old

    rounds = k.var(team.at(spin).load(i64))
    for _ in k.loop(lambda: unchanged() & (rounds.get() > 0)):
        k.pause()
        rounds.set(rounds.get() - 1)
    for _ in k.when(unchanged()):
        k.fetch_add(team.at(SLEEPERS), k.const(i64, 1))
        for _ in k.loop(unchanged):
            _futex(k, team, word, FUTEX_WAIT_PRIVATE, old.zext(i64))
        k.fetch_add(team.at(SLEEPERS), k.const(i64, -1))


def _futex(k: LlvmBuilder, team: Value, word: int, operation: int, value: Value) -> None:
    """One futex call; without one the loops around it just spin."""
    number = _FUTEX_NUMBER.get(k.target.triple.split("-")[0], 0)
    syscall = team.at(SYSCALL).load(ptr)
    for _ in k.when(k.not_null(syscall)):
        zero = k.const(i64, 0)
        k.call(
            syscall, i64, k.const(i64, number), team.at(word), k.const(i64, operation), value,
            zero, zero, zero,
        )  # fmt: skip
    for _ in k.when(k.not_null(syscall) ^ 1):
        k.pause()


def _cycles(k: LlvmBuilder) -> Value:
    """The time stamp counter, for the profile; zero where there is none to read."""
    if k.target.is_x86:
        return k.intrinsic("llvm.readcyclecounter", i64)
    return k.const(i64, 0)


def _set_float_mode(k: LlvmBuilder) -> Value:
    """Set the rounding and denormal mode of the contract; other libraries change it."""
    if not k.target.is_x86:
        saved = k.intrinsic("llvm.aarch64.get.fpcr", i64)
        k.intrinsic("llvm.aarch64.set.fpcr", None, k.const(i64, 0))
        return saved
    saved = _slot(k, i32)
    wanted = _slot(k, i32)
    k.intrinsic("llvm.x86.sse.stmxcsr", None, saved)
    wanted.store(k.const(i32, _MXCSR_DEFAULT))
    k.intrinsic("llvm.x86.sse.ldmxcsr", None, wanted)
    return saved


def _restore_float_mode(k: LlvmBuilder, saved: Value) -> None:
    if k.target.is_x86:
        k.intrinsic("llvm.x86.sse.ldmxcsr", None, saved)
    else:
        k.intrinsic("llvm.aarch64.set.fpcr", None, saved)


def _slot(k: LlvmBuilder, type_: Type) -> Value:
    """The address of a stack slot."""
    with k.b.goto_entry_block():
        return Value(k, ptr, k.b.alloca(ir.IntType(type_.bits)))
