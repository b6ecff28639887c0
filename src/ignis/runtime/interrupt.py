"""Ctrl-C inside a long native call.

Python's signal handler only leaves a note until native code returns. But its C part writes to the
wakeup descriptor at once: a small thread that reads the other end sets the abort word that the
walker polls, the call returns early, and KeyboardInterrupt rises where the caller stands.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


@contextlib.contextmanager
def watch_for_interrupt(abort: NDArray[np.int64]) -> Iterator[None]:
    """While the body runs, SIGINT sets `abort[0]`.

    Only in the main thread, where Python delivers signals; only while SIGINT means
    KeyboardInterrupt; and never in place of somebody else's wakeup descriptor (asyncio's, say).
    """
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not ours:
        yield
        return
    watcher = _Watcher.instance()
    previous = signal.set_wakeup_fd(watcher.write_end, warn_on_full_buffer=False)
    # Our own is still there where Ctrl-C came just before it was taken away.
    if previous not in (-1, watcher.write_end):
        signal.set_wakeup_fd(previous)
        yield
        return
    watcher.abort = abort
    try:
        yield
    finally:
        watcher.abort = None
        signal.set_wakeup_fd(-1)


class _Watcher:
    """The reading thread and its pipe, one a process."""

    _current: _Watcher | None = None

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.abort: NDArray[np.int64] | None = None
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        threading.Thread(target=self._read, name="ignis-interrupt", daemon=True).start()

    @classmethod
    def instance(cls) -> _Watcher:
        """The watcher of this process; threads do not survive a fork, so a child makes its own."""
        if cls._current is None or cls._current.pid != os.getpid():
            cls._current = cls()
        return cls._current

    def _read(self) -> None:
        while True:
            received = os.read(self._read_end, 64)
            abort = self.abort
            if signal.SIGINT in received and abort is not None:
                abort[0] = 1
