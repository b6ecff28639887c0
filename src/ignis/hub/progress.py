"""How a download tells of itself, and how its bytes are counted."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

_POLL_SECONDS = 0.1


class Progress(Protocol):
    """What the caller of `pull` may show. Calls come one at a time, sizes are bytes."""

    def already_there(self, path: Path) -> None: ...
    def waiting(self, what: str) -> None: ...
    def begin(self, what: str, total: int | None) -> None: ...
    def advance_to(self, done: int) -> None: ...
    def end(self) -> None: ...
    def finished(self, path: Path) -> None: ...


class Silent:
    """Shows nothing."""

    def already_there(self, path: Path) -> None: ...
    def waiting(self, what: str) -> None: ...
    def begin(self, what: str, total: int | None) -> None: ...
    def advance_to(self, done: int) -> None: ...
    def end(self) -> None: ...
    def finished(self, path: Path) -> None: ...


@contextlib.contextmanager
def watching(
    progress: Progress, what: str, folder: Path, total: int | None, already: int = 0
) -> Iterator[None]:
    """Report the bytes below `folder`, plus those fetched before, while the body runs.

    pip and huggingface_hub each count in their own way; the bytes on the disk are true of both.
    """
    progress.begin(what, total)
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(_POLL_SECONDS):
            done = already + folder_nbytes(folder)
            progress.advance_to(done if total is None else min(done, total))

    thread = threading.Thread(target=poll, name="ignis-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        progress.end()


def folder_nbytes(folder: Path) -> int:
    """Bytes of all files below `folder`; files may vanish while it looks."""
    nbytes = 0
    for parent, _, names in os.walk(folder):    # leaves out what it cannot list, unlike rglob
        for name in names:
            with contextlib.suppress(OSError):
                nbytes += Path(parent, name).lstat().st_size
    return nbytes
