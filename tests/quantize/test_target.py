"""If these fail, a model can be lost: overwritten, half written, or left in pieces."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ignis.errors import UsageError, WriteError
from ignis.gguf import open_gguf
from ignis.gguf.writer import GGUFWriter
from ignis.hub.progress import Silent
from ignis.quantize import convert as module
from ignis.quantize.target import check_room
from tests.quantize.conftest import names
from tests.random_models import RandomModel


@pytest.fixture
def folder(tmp_path):
    """A folder with a model and nothing else."""
    RandomModel(formats=("f32",), n_embd=128, n_ff=256).write(tmp_path / "in.gguf")
    return tmp_path


@pytest.mark.parametrize("link", ["itself", "relative", "symbolic", "hard", "dangling"])
def test_a_model_is_never_written_onto_itself(link, folder, convert, monkeypatch):
    """By whatever name, and even with --force."""
    source, other = folder / "in.gguf", folder / "other.gguf"
    before = source.read_bytes()
    monkeypatch.chdir(folder)
    if link == "symbolic":
        other.symlink_to(source)
    elif link == "hard":
        other.hardlink_to(source)
    elif link == "dangling":
        other.symlink_to(folder / "new.gguf")
    target = {"itself": source, "relative": Path("./in.gguf")}.get(link, other)
    if link == "dangling":
        convert(source, target, "q8_0")     # a link is followed
        assert (folder / "new.gguf").is_file() and other.is_symlink()
        return
    for force in (False, True):
        with pytest.raises(UsageError, match="overwrite its own source"):
            convert(source, target, "q8_0", force=force)
    assert source.read_bytes() == before


def test_a_file_that_is_there_is_kept_unless_forced(folder, convert):
    (folder / "out.gguf").write_bytes(b"precious")
    with pytest.raises(UsageError, match=r"out.gguf: the file is there already; --force"):
        convert(folder / "in.gguf", folder / "out.gguf", "q8_0")
    assert (folder / "out.gguf").read_bytes() == b"precious"
    convert(folder / "in.gguf", folder / "out.gguf", "q8_0", force=True)
    with open_gguf(folder / "out.gguf") as file:
        assert file.tensors["blk.0.attn_q.weight"].format.name == "q8_0"


@pytest.mark.parametrize(("target", "complaint"), [
    ("missing/out.gguf", "the folder to write to is not there"),
    ("in.gguf/out.gguf", "the folder to write to is not there"),
    (".", "cannot write there: got a folder"),
    ("/dev/null", "cannot write there: got no plain file"),
    ("n" * 300, "cannot write there: File name too long"),
    (f"{'n' * 300}/out.gguf", "cannot write there: File name too long"),
    ("circle", "cannot write there: Too many levels of symbolic links"),
    ("circle/out.gguf", "the folder to write to is not there"),
])
def test_a_target_that_cannot_be_is_refused_at_once(target, complaint, folder, convert):
    (folder / "circle").symlink_to(folder / "circle")
    with pytest.raises(UsageError, match=complaint):
        convert(folder / "in.gguf", folder / target, "q8_0", force=True)
    assert names(folder) == {"in.gguf", "circle"}


def test_no_room_is_found_before_the_work(folder):
    with pytest.raises(WriteError, match=r"not enough room on the disk: got .* MiB free, wanted"):
        check_room(folder / "out.gguf", 1 << 60)


@pytest.fixture
def small_files():
    """No file of this process may grow beyond 100 KB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_refuses_leaves_nothing(folder, convert, small_files):
    (folder / "out.gguf").write_bytes(b"precious")
    with pytest.raises(WriteError, match=r"out.gguf: cannot write the model: File too large"):
        convert(folder / "in.gguf", folder / "out.gguf", "f16", force=True)
    assert names(folder) == {"in.gguf", "out.gguf"}
    assert (folder / "out.gguf").read_bytes() == b"precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.parametrize("looks_free", [False, True])
def test_a_full_disk_leaves_nothing(looks_free, folder, convert, monkeypatch):
    """Found beforehand; or, where others fill the disk meanwhile, by the write that fails."""
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", disk], check=False,
                      capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        if looks_free:
            monkeypatch.setattr(module, "check_room", lambda path, nbytes: None)
        with pytest.raises(WriteError, match="No space left" if looks_free else "enough room"):
            convert(folder / "in.gguf", disk / "out.gguf", "f16")
        assert names(disk) == set()
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_file_that_does_not_read_back_never_appears(folder, convert, monkeypatch):
    monkeypatch.setattr(module, "_holds", lambda file, metadata: False)
    with pytest.raises(WriteError, match="does not read back"):
        convert(folder / "in.gguf", folder / "out.gguf", "q8_0")
    assert names(folder) == {"in.gguf"}


def test_an_interrupt_leaves_nothing(folder, convert):
    """Ctrl-C at any tensor; threads end too."""
    class Interrupt(Silent):
        def __init__(self, at: int) -> None:
            self.at = at

        def advance_to(self, done: int) -> None:
            if done >= self.at:
                raise KeyboardInterrupt

    n_threads = threading.active_count()
    for at in (0, 100_000, 400_000):
        with pytest.raises(KeyboardInterrupt):
            convert(folder / "in.gguf", folder / "out.gguf", "q8_0", Interrupt(at))
        assert names(folder) == {"in.gguf"}
        assert threading.active_count() == n_threads


def test_what_a_killed_writer_left_is_swept_away_but_not_a_living_ones(folder, convert):
    """Each writer holds a lock on its temporary file, which dies with it."""
    stale, foreign = folder / ".out.gguf.0123.tmp", folder / ".other.gguf.0123.tmp"
    stale.write_bytes(b"half")
    foreign.write_bytes(b"half")

    def look(path: Path) -> None:
        with pytest.raises(RuntimeError):
            other = GGUFWriter(folder / "out.gguf", "llama")
            other.write(check=fail)
        assert path.is_file()
        seen.append(path.name)

    def fail(path: Path) -> None:
        raise RuntimeError

    seen: list[str] = []
    GGUFWriter(folder / "out.gguf", "llama").write(check=look)
    assert len(seen) == 1
    assert names(folder) == {"in.gguf", "out.gguf", foreign.name}


# Forks a child for each line it reads: an interpreter that is warm starts in no time.
SCRIPT = """
import os, sys
from pathlib import Path
from ignis.gguf import open_gguf
from ignis.quantize.convert import Options, quantize
from ignis.quantize.source import GGUFSource

def run(target):
    with open_gguf(sys.argv[1]) as file, GGUFSource(file) as source:
        quantize(source, Path(target), Options(type="q8_0", force=True, n_threads=2))

run(sys.argv[3])
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        while True:
            run(sys.argv[2])
    print(child, flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


def test_a_kill_at_any_moment_leaves_the_target_absent_or_whole(folder, subprocess_env):
    """A process that quantizes over and over, killed at random moments, 40 times or more."""
    source, target, reference = (folder / name for name in ("in.gguf", "out.gguf", "whole.gguf"))
    before, n_left, n_halves = source.read_bytes(), 0, 0
    rng, patience = random.Random(0), 0.02
    with subprocess.Popen([sys.executable, "-c", SCRIPT, source, target, reference], text=True,
                          env=subprocess_env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                          ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        for turn in range(200):
            if turn >= 40 and n_left and n_halves:
                break
            target.unlink(missing_ok=True)
            parent.stdin.write("go\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            time.sleep(rng.uniform(0, patience))
            os.kill(child, signal.SIGKILL)
            assert parent.stdout.readline() == "dead\n"
            assert not target.exists() or target.read_bytes() == reference.read_bytes()
            n_left += target.exists()
            # Around the time that a file takes, however busy the machine is.
            patience = min(2.0, patience * (0.8 if target.exists() else 1.25))
            n_halves += len(names(folder)) > 2 + target.exists()
        parent.stdin.close()
    assert source.read_bytes() == before
    assert n_left and n_halves, "no kill came at a moment for this test to mean something"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing(number, code, folder, subprocess_env):
    """Ctrl-C, and what `timeout` and `systemctl stop` send; the command line's promise."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys, time; from ignis.quantize import convert\n"
         "from ignis.cli import main\n"
         "convert._verify = lambda *a, **k: (print('there', flush=True), time.sleep(60))\n"
         "sys.argv = ['ignis', 'quantize', 'in.gguf', 'out.gguf', '--type', 'q8_0', '-q']\n"
         "sys.exit(main())"],
        cwd=folder, env=subprocess_env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"there\n" and len(names(folder)) == 2
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (code, b"") and names(folder) == {"in.gguf"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="SIGBUS is caught on Linux alone")
def test_a_source_that_is_cut_short_meanwhile_ends_in_one_line(folder, subprocess_env):
    """Somebody else writes to the file that is being read: a fault of the mapping, no traceback."""
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from ignis.gguf import open_gguf\n"
        "from ignis.quantize.convert import Options, quantize\n"
        "from ignis.quantize.source import GGUFSource\n"
        "with open_gguf('in.gguf') as file, GGUFSource(file) as source:\n"
        "    os.truncate('in.gguf', 50000)\n"
        "    quantize(source, Path('out.gguf'), Options(type='q8_0'))\n")
    run = subprocess.run([sys.executable, "-c", script], cwd=folder, env=subprocess_env,
                         capture_output=True, text=True, check=False)
    assert run.returncode == 1 and run.stderr.count("\n") == 1, run.stderr
    assert "in.gguf: the file was truncated while it was mapped" in run.stderr
    assert not (folder / "out.gguf").exists()
