"""Installs the fault guard (see `native.guard`): a truncated model file ends in one clear line."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ignis.native import guard
from ignis.native.cache import ObjectCache
from ignis.native.host import host_target
from ignis.native.library import Library, Routine
from ignis.runtime.memory import Memory
from ignis.settings import Settings

_GUARD = Routine("fault_guard", guard.emit_guard)
_SA_SIGINFO = 4
_MESSAGE = "error: {path}: the file was truncated while it was mapped; close the program that writes to it and run again\n"  # noqa: E501  # one line is what is promised


def guard_mappings(mappings: Sequence[tuple[int, int, Path]]) -> Callable[[], None]:
    """Guard mapped files, (address, nbytes, path) each; returns what takes them off again.

    Does nothing where there is no SIGBUS of Linux's kind.
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    return _FaultGuard.instance().add(mappings)


class _FaultGuard:
    """The handler and its table, one a process."""

    _current: _FaultGuard | None = None

    def __init__(self) -> None:
        objects = ObjectCache(Settings.from_env().objects_dir)
        self._library = Library([_GUARD], host_target(), objects)
        self._block = Memory(guard.GUARD_NBYTES)
        self._previous = ctypes.create_string_buffer(guard.SIGACTION_NBYTES)
        self._messages: dict[int, bytes] = {}
        self._entries: dict[int, tuple[int, int]] = {}
        self._next_key = 0
        self._lock = threading.Lock()
        self._install()

    @classmethod
    def instance(cls) -> _FaultGuard:
        if cls._current is None:
            cls._current = cls()
        return cls._current

    def add(self, mappings: Sequence[tuple[int, int, Path]]) -> Callable[[], None]:
        with self._lock:
            keys = []
            for address, nbytes, path in mappings:
                self._messages[self._next_key] = _MESSAGE.format(path=path).encode()
                self._entries[self._next_key] = (address, nbytes)
                keys.append(self._next_key)
                self._next_key += 1
            self._write_table()
        return lambda: self._remove(keys)

    def _remove(self, keys: list[int]) -> None:
        with self._lock:
            for key in keys:
                self._entries.pop(key, None)
            self._write_table()
            # Messages stay: a handler that runs in another thread may still point at them.

    def _write_table(self) -> None:
        entries = list(self._entries.items())[: guard.MAX_ENTRIES]
        words = self._block.view(np.int64, 1 + 4 * guard.MAX_ENTRIES, guard.TABLE)
        words[0] = 0
        for index, (key, (address, nbytes)) in enumerate(entries):
            message = self._messages[key]
            place = ctypes.cast(ctypes.c_char_p(message), ctypes.c_void_p).value or 0
            words[1 + 4 * index : 5 + 4 * index] = address, address + nbytes, place, len(message)
        words[0] = len(entries)

    def _install(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        words = self._block.view(np.int64, 8)
        for offset, function in (
            (guard.WRITE, libc.write), (guard.EXIT, libc._exit),
            (guard.SIGACTION, libc.sigaction),
        ):  # fmt: skip
            words[offset // 8] = ctypes.cast(function, ctypes.c_void_p).value or 0
        words[guard.PREVIOUS // 8] = ctypes.addressof(self._previous)
        setter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._library.address("guard_set"))
        setter(self._block.address)
        action = ctypes.create_string_buffer(guard.SIGACTION_NBYTES)
        ctypes.c_int64.from_buffer(action).value = self._library.address("guard_handler")
        ctypes.c_int.from_buffer(action, 8 + 128).value = _SA_SIGINFO
        libc.sigaction(int(signal.SIGBUS), action, self._previous)
