"""If these break, Ctrl-C hangs, a closed pipe makes noise, or `--version` became slow."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import interrupt


def read_until(stream, wanted: bytes) -> bytes:
    got = b""
    while wanted not in got:
        byte = stream.read(1)
        assert byte, got
        got += byte
    return got


def test_ctrl_c_keeps_what_was_said(start):
    process = start("run", "-m", "x.gguf", "-p", "said before SLOW")
    said = read_until(process.stdout, b"before ")
    out, err, seconds = interrupt(process)
    assert said + out == b"said before \n"
    assert process.returncode == 130 and seconds < 0.5
    assert err.splitlines()[-1].startswith(b"[3 prompt tok") and b"Traceback" not in err


def test_ctrl_c_ends_a_fast_endless_answer(start):
    process = start("run", "-m", "x.gguf", "-n", "-1", "-p", "ENDLESS word")
    said = read_until(process.stdout, b"word ENDLESS")
    out, err, seconds = interrupt(process)
    assert process.returncode == 130 and seconds < 0.5
    assert (said + out).endswith((b"word \n", b"ENDLESS \n")) and b"Traceback" not in err


def test_ctrl_c_with_json_still_prints_the_object(start):
    process = start("run", "-m", "x.gguf", "-p", "a SLOW", "--json")
    read_until(process.stderr, b"sleeping\n")
    out, _, _ = interrupt(process)
    assert process.returncode == 130
    assert b'"finish_reason": "interrupted"' in out


def test_ctrl_c_ends_a_native_call_that_does_not_return(start):
    """What compiling a large model is to Ctrl-C."""
    process = start("run", "-m", "hang.gguf", "-p", "x")
    read_until(process.stderr, b"hanging\n")
    _, err, seconds = interrupt(process)
    assert process.returncode == 130 and seconds < 0.6 and err == b""


def test_a_closed_pipe_ends_quietly(start):
    process = start("run", "-m", "x.gguf", "-n", "-1", "-q", "-p", "ENDLESS word")
    read_until(process.stdout, b"word")
    process.stdout.close()
    assert process.wait(timeout=10) == 0
    assert process.stderr.read() == b""


def test_a_pipe_closed_before_the_first_byte_ends_quietly(start):
    reader, writer = os.pipe()
    os.close(reader)
    process = start("info", "--help", stdout=writer)
    os.close(writer)
    assert process.wait(timeout=10) == 0
    assert process.stderr.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_behind_stdout_is_one_line(start):
    with Path("/dev/full").open("wb") as full:
        process = start("run", "-m", "x.gguf", "-q", "-p", "some text", stdout=full)
        err = process.communicate(timeout=10)[1]
    assert process.returncode == 1
    assert err == b"error: cannot write: No space left on device\n"


def test_closed_standard_streams_are_no_trouble(subprocess_env):
    for redirection in ("<&-", ">&-", "2>&-"):
        done = subprocess.run(
            ["/bin/sh", "-c", f'exec "{sys.executable}" -m ignis --version {redirection}'],
            env=subprocess_env, capture_output=True, timeout=20, check=False)
        assert done.returncode == 0 and done.stderr == b""


def test_text_is_utf8_in_any_locale(subprocess_env, start):
    env = {**subprocess_env, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    source = ("import ignis; from tests.cli.fake_ignis import load; ignis.load = load;"
              "from ignis.cli import main; main(['run', '-qm', 'x.gguf'])")
    done = subprocess.run([sys.executable, "-c", source], input="größer 🙂".encode(), env=env,
                          capture_output=True, timeout=20, check=False)
    assert (done.stdout, done.stderr) == ("größer 🙂 \n".encode(), b"")


def test_start_up_imports_neither_numpy_nor_llvm(subprocess_env):
    source = ("import sys; from ignis.cli.app import run_app; run_app(['--version']);"
              "run_app(['--help']); run_app(['run', '--help']);"
              "print([m for m in ('numpy', 'llvmlite', 'rich', 'regex') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", source], env=subprocess_env, capture_output=True,
                          text=True, timeout=20, check=False)
    assert done.stdout.startswith("ignis, version ") and done.stdout.endswith("\n[]\n")


def test_terminated_pull_cleans_up(tmp_path, subprocess_env):
    """SIGTERM, as a container stops it: no temporary file stays."""
    fake = tmp_path / "fake" / "pip"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    (fake / "__main__.py").write_text(
        "import pathlib, sys, time\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n"
        "(folder / 'half.whl').write_bytes(b'x' * 1000)\n"
        f"pathlib.Path({str(tmp_path / 'begun')!r}).touch()\n"
        "time.sleep(60)\n")
    env = {**subprocess_env, "IGNIS_CACHE_DIR": str(tmp_path / "cache"),
           "PYTHONPATH": f"{fake.parent}{os.pathsep}{subprocess_env['PYTHONPATH']}"}
    process = subprocess.Popen([sys.executable, "-m", "ignis", "pull", "smollm2"], env=env,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    read_until(process.stderr, b"fetching smollm2 (88.6 MiB)\n")
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 143
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []
