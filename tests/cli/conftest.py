"""Running the command line, in this process with a fake model, and in one of its own."""

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import ignis
from ignis.cli.app import run_app
from tests.cli import fake_ignis

FAKE = str(Path(fake_ignis.__file__))


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on stderr that the contract promises."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert self.err.endswith(lines[0] + "\n") and "Traceback" not in self.err
        return lines[0]


@pytest.fixture
def models(monkeypatch, tmp_path):
    """The fake models that commands have loaded; the cache is empty and private."""
    loaded = []

    def load(path=None, **options):
        loaded.append(fake_ignis.load(path, **options))
        return loaded[-1]

    # `ignis.load` is an attribute on demand (PEP 562); setattr would import the real one to undo.
    monkeypatch.setitem(ignis.__dict__, "load", load)
    monkeypatch.setenv("IGNIS_CACHE_DIR", str(tmp_path / "cache"))
    return loaded


@pytest.fixture
def call(models, monkeypatch, capsys):
    """Run a command line in this process, with `stdin` as a pipe."""
    def run(*arguments: str, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = run_app(arguments)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)
    return run


@pytest.fixture
def start(subprocess_env, tmp_path):
    """Start the command line in a process of its own, with the fake model."""
    processes = []

    def run(*arguments: str, **options) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(
            [sys.executable, FAKE, *arguments], **{**pipes, **options},
            bufsize=0,      # bytes read ahead would be lost to `communicate`
            env={**subprocess_env, "IGNIS_CACHE_DIR": str(tmp_path / "cache")})
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def interrupt(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes, float]:
    """SIGINT; what is left of stdout and stderr, and the seconds it took to end."""
    begun = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    return out, err, time.monotonic() - begun
