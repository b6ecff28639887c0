"""Where the result goes: what may stand in the way is found before any work is done."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from ignis.errors import UsageError, WriteError
from ignis.gguf.atomic import followed


def check_path(path: Path, sources: Iterable[Path], force: bool) -> Path:
    """The file to write, links followed; its folder is there, and nothing in it would be lost.

    Raises UsageError for one of the `sources`, by whatever name, for what is no plain file, and
    without `force` for any file that is there already.
    """
    try:
        path = followed(path)
        if not path.parent.is_dir():
            raise UsageError("the folder to write to is not there", where=path.parent,
                             wanted="a folder")
        status = path.stat()
    except FileNotFoundError:
        return path
    except OSError as error:
        raise UsageError(f"cannot write there: {error.strerror}", where=path) from None
    if any(os.path.samestat(status, source.stat()) for source in sources):
        raise UsageError("the result would overwrite its own source", where=path,
                         wanted="another name")
    if not stat.S_ISREG(status.st_mode):
        raise UsageError("cannot write there", where=path,
                         got="a folder" if path.is_dir() else "no plain file",
                         wanted="a file name")
    if not force:
        raise UsageError("the file is there already", where=path, hint="--force overwrites it")
    return path


def check_room(path: Path, nbytes: int) -> None:
    """Raise WriteError where the disk cannot hold `nbytes` more."""
    free = shutil.disk_usage(path.parent).free
    if free < nbytes:
        raise WriteError("not enough room on the disk", where=path.parent,
                         got=f"{_mib(free)} free", wanted=_mib(nbytes))


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"
