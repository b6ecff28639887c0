"""Files that appear under their name when they are complete, and not before.

They are written under a temporary name in the same folder, flushed to the disk and renamed. A
lock on the temporary file tells those of living writers from what killed ones have left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ignis.errors import UsageError


@contextmanager
def written_whole(path: Path, check: Callable[[Path], None] | None = None) -> Iterator[BinaryIO]:
    """A file to write; when the body is done it replaces `path`, and if it raises, it is gone.

    `check` may look at the complete file under its temporary name, and refuse it by raising.
    """
    _sweep(path)
    temporary = path.with_name(_temporary_name(path, secrets.token_hex(4)))
    try:
        with temporary.open("xb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            yield file
            file.flush()
            os.fsync(file.fileno())
            if check is not None:
                check(temporary)
            temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def followed(path: Path) -> Path:
    """The file that `path` names, links followed; OSError for links in a circle."""
    # Not `Path.resolve`: it raises RuntimeError before Python 3.13, and nothing from then on.
    found = Path(os.path.realpath(path))
    if found.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return found


def check_replaceable(path: Path, start: bytes, kind: str) -> None:
    """Raise UsageError for a file that is there and that nobody means to lose.

    Files that begin with `start`, and empty ones, may be replaced.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        found = file.read(len(start))
    if found and found != start:
        raise UsageError(f"the file is there already, and is not {kind}", where=path,
                         hint="choose another name")


def _temporary_name(path: Path, mark: str) -> str:
    return f".{path.name}.{mark}.tmp"


def _sweep(path: Path) -> None:
    """Remove what killed writers of `path` left behind; a living one holds a lock on its file."""
    prefix, suffix = _temporary_name(path, "/").split("/")
    for stale in path.parent.iterdir():
        if not (stale.name.startswith(prefix) and stale.name.endswith(suffix)):
            continue
        with suppress(OSError), stale.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            stale.unlink()


def _sync_folder(folder: Path) -> None:
    """Flush the folder itself, so that a rename outlives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
