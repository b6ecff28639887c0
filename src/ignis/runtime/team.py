"""The thread team: Python threads parked inside native code, where no GIL hand-over can slow them.

`ThreadTeam.run(records)` runs a plan (see `native.walker`) on all threads and returns when it is
done, or raises KeyboardInterrupt soon after Ctrl-C. `begin(records)` lets the workers run one while
the caller goes on, until `finish`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ignis.errors import UsageError
from ignis.native import walker
from ignis.native.library import Library, Routine
from ignis.runtime.interrupt import watch_for_interrupt
from ignis.runtime.memory import Memory, thread_stride
from ignis.runtime.threads import available_threads

WALKER = Routine("walker", walker.emit_walker)

# Rounds of a spin loop before a thread sleeps; one round is about 20 ns.
_SPIN_BARRIER = 4000
_SPIN_JOB = 8000  # between steps Python samples and decodes: about a tenth of a millisecond
_SPIN_CROWDED = 50  # more threads than processors: whoever spins keeps another from working


class ThreadTeam:
    """`n_threads` threads that walk a plan together; the caller's thread is one of them.

    `scratch_nbytes` is what each thread may use while it runs a kernel. Closing the team stops the
    workers; the library must stay alive until then.
    """

    def __init__(self, library: Library, n_threads: int, scratch_nbytes: int) -> None:
        self.n_threads = n_threads
        self._library = library
        run_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        worker_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
        self._run_plan = run_type(library.address("run_plan"))
        self._begin_plan = run_type(library.address("begin_plan"))
        self._finish_plan = run_type(library.address("finish_plan"))
        self._worker = worker_type(library.address("team_worker"))
        self._enter_float_mode = run_type(library.address("enter_float_mode"))
        self._leave_float_mode = run_type(library.address("leave_float_mode"))
        self._stride = thread_stride(scratch_nbytes)
        self._scratch = Memory(self._stride * n_threads)
        self._block = Memory(walker.TEAM_NBYTES)
        self._workers: list[threading.Thread] = []
        self._begun: tuple[NDArray[np.int64], object] | None = None
        self._owner_pid = 0
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(
            self, _stop, self._block, self._run_plan, self._finish_plan, self._workers
        )

    def run(
        self, records: NDArray[np.int64], times: NDArray[np.int64] | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Run the records ([n, 16] int64), a plan that may be begun again.

        What was begun is finished before.

        `times` (int64 [n, 2]) collects thread 0's cycles at work and at the barrier, a record.
        `prepare` is called before each attempt.

        Raises: KeyboardInterrupt soon after Ctrl-C; UsageError after `close`.
        """
        with self._lock:
            self._check_open()
            self._finish()
            self._run(records, times, prepare)

    def begin(self, records: NDArray[np.int64], held: object = None) -> None:
        """Let the workers begin on the records while the caller does something else.

        The records, and all that they point to, must stay as they are until `finish`. `held` is
        what owns that memory: if an exception drops the owner of the team, the workers are stopped
        before it is let go.
        """
        with self._lock:
            self._check_open()
            self._finish()
            self._load(records)
            self._begun = records, held
            self._begin_plan(self._block.address)

    def finish(self) -> None:
        """Help the workers with what was begun until it is done; nothing where nothing was.

        Raises: KeyboardInterrupt soon after Ctrl-C; whoever finishes next then runs it anew.
        """
        with self._lock:
            self._finish()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise UsageError("the model is closed", hint="load it again")

    def _finish(self) -> None:
        if self._begun is None:
            return
        abort = self._word(walker.ABORT)
        is_forked = self._owner_pid != os.getpid()  # then the workers are not here
        if not is_forked:
            with watch_for_interrupt(abort):
                self._finish_plan(self._block.address)
        if is_forked or abort[0]:
            self._run(self._begun[0])
        self._begun = None

    def _run(
        self, records: NDArray[np.int64], times: NDArray[np.int64] | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        done = False
        while not done:
            # Python raises KeyboardInterrupt as soon as the call returns. If it did not, the
            # abort word was set by a Ctrl-C of before, whose wake-up came late: begin again.
            prepare()
            self._load(records, times)
            abort = self._word(walker.ABORT)
            with watch_for_interrupt(abort):
                self._run_plan(self._block.address)
            done = not abort[0]

    def _load(self, records: NDArray[np.int64], times: NDArray[np.int64] | None = None) -> None:
        """Put a plan into the team block, for the workers to find."""
        self._start_workers()
        records[:, 4] = 0  # the chunk counters
        self._word(walker.PLAN)[0] = records.ctypes.data
        self._word(walker.N_RECORDS)[0] = len(records)
        self._word(walker.TIMES)[0] = 0 if times is None else times.ctypes.data
        self._word(walker.ABORT)[0] = 0

    @contextlib.contextmanager
    def float_mode(self) -> Iterator[None]:
        """While the body runs, this thread rounds as native steps do, whatever others have set."""
        saved = ctypes.c_int64()
        self._enter_float_mode(ctypes.addressof(saved))
        try:
            yield
        finally:
            self._leave_float_mode(ctypes.addressof(saved))

    def close(self) -> None:
        self._finalizer()

    def _word(self, offset: int) -> NDArray[np.int64]:
        return self._block.view(np.int64, 1, offset)

    def _start_workers(self) -> None:
        """Start the workers at first use, and again in a forked child, where they are gone."""
        if self._owner_pid == os.getpid():
            return
        self._owner_pid = os.getpid()
        self._block.bytes[:] = 0
        crowded = self.n_threads > available_threads()
        for offset, value in (
            (walker.N_THREADS, self.n_threads),
            (walker.SCRATCH, self._scratch.address),
            (walker.SCRATCH_STRIDE, self._stride),
            (walker.SPIN, _SPIN_CROWDED if crowded else _SPIN_BARRIER),
            (walker.SPIN_JOB, _SPIN_CROWDED if crowded else _SPIN_JOB),
            (walker.SYSCALL, _libc_address("syscall") if sys.platform == "linux" else 0),
            (walker.MADVISE, _libc_address("madvise") if hasattr(mmap, "MADV_DONTNEED") else 0),
        ):
            self._word(offset)[0] = value
        self._workers[:] = [
            threading.Thread(
                target=self._worker, args=(self._block.address, index), daemon=True,
                name=f"ignis-{index}",
            )
            for index in range(1, self.n_threads)
        ]  # fmt: skip
        for worker in self._workers:
            worker.start()


def _stop(
    block: Memory, run_plan: Any, finish_plan: Any, workers: list[threading.Thread]
) -> None:
    """Let the workers return: an empty plan with the stop word set wakes them."""
    if not any(worker.is_alive() for worker in workers):
        return
    block.view(np.int64, 1, walker.ABORT)[0] = 1  # what was begun is broken off
    finish_plan(block.address)
    block.view(np.int64, 1, walker.STOP)[0] = 1
    block.view(np.int64, 1, walker.N_RECORDS)[0] = 0
    run_plan(block.address)
    for worker in workers:
        worker.join()


def _libc_address(function: str) -> int:
    return ctypes.cast(getattr(ctypes.CDLL(None), function), ctypes.c_void_p).value or 0
