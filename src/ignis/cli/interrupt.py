"""Ctrl-C is heard within half a second, even inside a long native call.

Python runs its signal handlers between byte codes, so a call into LLVM that takes a second holds
Ctrl-C up for a second. `prompt_interrupt` has the system write a byte for each signal into a
pipe (`signal.set_wakeup_fd`); a thread reads it and, if the main thread has not come round to its
handler in time, ends the process.

For phases that have nothing to lose (compiling, measuring). Steps of the engine need it not: the
runtime makes them return early, which keeps the conversation.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from ignis.cli.app import INTERRUPTED

_PATIENCE_SECONDS = 0.1


@contextlib.contextmanager
def prompt_interrupt() -> Iterator[None]:
    """Guard the body.

    Does nothing outside the main thread, where signals cannot be caught, and where somebody else
    handles SIGINT or it is ignored, as in a shell's background job.
    """
    if threading.current_thread() is not threading.main_thread() \
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    heard = threading.Event()

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        heard.set()
        raise KeyboardInterrupt

    def watch() -> None:
        while signals := os.read(read_end, 64):
            if signal.SIGINT in signals:
                if not heard.wait(_PATIENCE_SECONDS):
                    os._exit(INTERRUPTED)
                heard.clear()

    thread = threading.Thread(target=watch, name="ignis-interrupt", daemon=True)
    thread.start()
    previous = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(previous)
        heard.set()
        os.close(write_end)
        thread.join()
        os.close(read_end)


@contextlib.contextmanager
def orderly_termination() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C does, so that temporary files and children do not outlive us."""
    def terminate(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
