"""Object code on disk, safe under concurrent processes, crashes and corruption.

One file an object, named by a digest of everything that decides its bytes. A truncated or flipped
object would kill the process inside LLVM, so each file starts with the SHA-256 of the rest and is
checked before LLVM sees a byte; what fails the check is compiled anew. Writes are atomic renames.
The folder belongs to this user alone (0700), and nothing in it is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import llvmlite

import ignis
from ignis.target import Target

_DIGEST_BYTES = hashlib.sha256().digest_size


class ObjectCache:
    """Objects by digest in one folder; a folder that cannot be trusted turns the cache off."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder if folder is not None and _private(folder) else None

    def get(self, digest: str) -> bytes | None:
        if self.folder is None:
            return None
        try:
            content = (self.folder / f"{digest}.o").read_bytes()
        except OSError:
            return None
        stored, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return data if hashlib.sha256(data).digest() == stored else None

    def put(self, digest: str, data: bytes) -> None:
        if self.folder is None:
            return
        import tempfile

        # A full disk or a lost folder costs the cache, never the run.
        with contextlib.suppress(OSError):
            descriptor, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(hashlib.sha256(data).digest() + data)
                Path(name).replace(self.folder / f"{digest}.o")
            except OSError:
                Path(name).unlink()
                raise


def object_digest(symbol: str, target: Target) -> str:
    """The digest of an object: sources, specialisation (in the symbol), target and LLVM."""
    parts: Sequence[str] = (
        source_digest(), symbol, target.triple, target.cpu, target.feature_string,
    )  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@cache  # the sources of a running process do not change
def source_digest() -> str:
    """The digest of all that decides how a kernel is emitted, and of llvmlite's version.

    llvmlite bundles its LLVM, so its version stands for both.
    """
    root = Path(ignis.__file__).parent
    digest = hashlib.sha256(llvmlite.__version__.encode())
    files = [root / "target.py"]
    for package in ("gguf", "kernels", "native"):
        files += sorted((root / package).glob("*.py"))
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _private(folder: Path) -> bool:
    """Create the folder if needed and say whether only this user can write it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
        if hasattr(os, "getuid") and status.st_uid != os.getuid():
            return False
        if stat.S_IMODE(status.st_mode) & 0o077:
            folder.chmod(0o700)
    except OSError:
        return False
    return True
