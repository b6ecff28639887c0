"""The object cache: a damaged object inside LLVM kills the process, so none must get there."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ignis.kernels.elementwise import add
from ignis.native import cache as cache_module
from ignis.native.cache import ObjectCache, object_digest
from ignis.native.host import host_target
from ignis.native.library import Library
from ignis.target import Target


def load(folder: Path | None) -> Library:
    """A library of one kernel, which is seen to work."""
    library = Library([add()], host_target(), ObjectCache(folder))
    a = np.arange(40, dtype=np.float32)
    y = np.zeros(40, np.float32)
    library.call(add(), {"a": a, "b": a, "y": y, "n": 40}, 0, 1)
    assert np.array_equal(y, 2 * a)
    return library


def objects(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_an_object_is_compiled_once(tmp_path: Path) -> None:
    assert load(tmp_path).report.n_compiled == 1
    (file,) = objects(tmp_path)
    assert file.name == f"{object_digest(add().symbol, host_target())}.o"
    assert load(tmp_path).report.n_compiled == 0


def _flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:31], lambda data: data[:32], lambda data: data[:-1],
     lambda data: data + b"\0", lambda data: bytes(len(data)), _flipped(0), _flipped(40),
     _flipped(300)],
    ids=["empty", "half a digest", "digest only", "cut", "longer", "zeros", "digest flipped",
         "header flipped", "code flipped"],
)  # fmt: skip
def test_a_damaged_object_is_compiled_anew(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    load(tmp_path)
    (file,) = objects(tmp_path)
    sound = file.read_bytes()
    file.write_bytes(damage(sound))
    assert load(tmp_path).report.n_compiled == 1
    assert file.read_bytes() == sound  # and the cache is whole again
    assert load(tmp_path).report.n_compiled == 0


def test_a_folder_in_place_of_an_object(tmp_path: Path) -> None:
    """What cannot be read or replaced costs a compilation, and leaves nothing behind."""
    (tmp_path / f"{object_digest(add().symbol, host_target())}.o").mkdir()
    assert load(tmp_path).report.n_compiled == 1
    assert len(objects(tmp_path)) == 1


def test_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert ObjectCache(tmp_path / "file" / "objects").folder is None
    assert load(tmp_path / "file" / "objects").report.n_compiled == 1
    assert load(None).report.n_compiled == 1


def test_a_full_disk_costs_the_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert load(tmp_path).report.n_compiled == 1
    assert objects(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no user ids on this system")
def test_only_this_user_may_write_code_that_we_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a" / "objects"
    load(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    assert load(folder).report.n_compiled == 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert ObjectCache(folder).folder is None
    assert load(folder).report.n_compiled == 1


def test_what_decides_the_code_decides_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object for another processor or of older sources must not be taken for this one."""
    target = Target.level("x86-64-v3")
    digests = {
        object_digest("add", target), object_digest("mul", target),
        object_digest("add", Target.level("x86-64-v2")),
        object_digest("add", Target.level("aarch64")),
    }  # fmt: skip
    monkeypatch.setattr(cache_module, "source_digest", lambda: hashlib.sha256(b"new").hexdigest())
    digests.add(object_digest("add", target))
    assert len(digests) == 5


def test_processes_that_are_cold_at_once(tmp_path: Path, subprocess_env: dict[str, str]) -> None:
    """All run; the cache ends up whole, without a temporary file."""
    source = (
        "import sys; from pathlib import Path; from tests.native.test_cache import load;"
        "sys.stdin.read(); load(Path(sys.argv[1]))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", source, str(tmp_path / "objects")],
                         stdin=subprocess.PIPE, env=subprocess_env)
        for _ in range(3)
    ]  # fmt: skip
    for process in processes:  # all have imported what they need by now, or soon have
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    (file,) = objects(tmp_path / "objects")
    assert file.suffix == ".o"
    assert load(tmp_path / "objects").report.n_compiled == 0
