"""The model cache on disk: one folder a model, locked while it is filled.

Files are written under a temporary name on the same file system, checked, flushed to the disk and
then renamed, so that a reader sees a whole file or none. The lock is on the folder itself: no lock
file is left behind, and the kernel drops it when a process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ignis.errors import DownloadError
from ignis.hub.progress import Progress

_TEMPORARY_PREFIX = ".fetch-"
CHUNK_NBYTES = 1 << 20


@contextlib.contextmanager
def locked_folder(folder: Path, progress: Progress) -> Iterator[None]:
    """Make `folder` and hold it against other processes; sweep what killed ones left."""
    with translated_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.waiting(f"another process is fetching into {folder}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        for stale in folder.glob(f"{_TEMPORARY_PREFIX}*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """A folder inside `folder` that is gone afterwards, whatever happens."""
    path = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=folder))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def check_space(folder: Path, nbytes: int) -> None:
    """Raise `DownloadError` where the disk cannot hold `nbytes` more."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise DownloadError("not enough room on the disk", where=folder,
                            got=f"{free >> 20} MiB free", wanted=f"{nbytes >> 20} MiB",
                            hint="IGNIS_CACHE_DIR chooses another place")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def install(temporary: Path, destination: Path, sha256: str | None, actual: str) -> None:
    """Rename a complete file to where it is looked for, if its digest is the expected one."""
    if sha256 is not None and actual != sha256:
        raise DownloadError("SHA-256 differs", where=destination.name, got=actual, wanted=sha256,
                            hint="fetch again; if it stays so, the file on the server has changed")
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(destination)


@contextlib.contextmanager
def translated_errors(where: object) -> Iterator[None]:
    """Operating system errors as `DownloadError`: disk full, no permission, ..."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DownloadError(f"cannot write the model: {reason}",
                            where=error.filename or where) from error
