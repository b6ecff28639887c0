"""If these break, `ignis perplexity` takes or tells something else, or hangs on Ctrl-C."""

import json
import subprocess
import sys
import time

import pytest

from ignis.cli.app import run_app
from ignis.cli.progress import WindowProgress
from ignis.perplexity import Estimate
from tests.cli.conftest import interrupt
from tests.random_models import write_random_model

TEXT = "The rest of the text is that of the other runs in the end, and so on and on. " * 8


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture
def score(path, tmp_path, monkeypatch, capsys):
    """Run the command on `TEXT`, or on other arguments."""
    file = tmp_path / "text.txt"
    file.write_text(TEXT)

    def run(*arguments, text=True):
        given = ["-f", str(file)] if text else []
        code = run_app(["perplexity", "-m", str(path), "--threads", "1", *given, *arguments])
        return code, capsys.readouterr()
    return run


def test_json_and_the_text_for_people_say_the_same(score, tmp_path):
    base = str(tmp_path / "base.kl")
    code, captured = score("--ctx", "64", "--save-kl", base, "--json")
    assert code == 0 and f"saved {base}" in captured.err
    first = json.loads(captured.out)
    assert (first["ctx"], first["base"]) == (64, None)
    assert first["scored_tokens"] == 31 * first["windows"] > 0
    code, captured = score("--kl-base", base, "--json", "-q", text=False)
    assert code == 0 and captured.err == ""
    second = json.loads(captured.out)
    assert second["perplexity"] == second["base"]["perplexity"] == first["perplexity"]
    assert second["base"]["same_top"] == {"value": 1, "error": 0}
    assert abs(second["base"]["kl"]["value"]) < 1e-7
    code, captured = score("--kl-base", base, text=False)
    lines = captured.out.splitlines()
    assert lines[0].split()[:2] == ["perplexity", f"{first['perplexity']['value']:.4f}"]
    assert "ratio             1.000000 +/- 0.000000" in lines
    assert "top token equal   100.00 +/- 0.00 %" in lines
    assert captured.err == "scoring in windows of 64 tokens ...\n"


def test_text_comes_from_stdin_too(call, path, monkeypatch):
    monkeypatch.delitem(sys.modules["ignis"].__dict__, "load")     # the real one
    arguments = ("perplexity", "-m", str(path), "--ctx", "64", "--json", "-q", "--threads", "1")
    whole = json.loads(call(*arguments, stdin=TEXT.encode()).out)
    assert whole["windows"] > 1
    result = call(*arguments, stdin=b"a \xff")
    assert result.code == 1 and "stdin: not UTF-8: got byte 0xff at offset 2" in result.error


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["--ctx", "5"], 1, "windows can't be so short: got 5 tokens, wanted 8 or more"),
    (["--ctx", "1024"], 1, "the text is too short to be scored"),
    (["--ctx", "2000"], 1, "the context can't have this size: got 2000"),
    (["--kl-base", "none.kl"], 1, "none.kl: cannot read the base: No such file"),
    (["--kl-base", "/dev/zero"], 1, "/dev/zero: not a file of base logits"),
    (["--kl-base", "a", "--save-kl", "b"], 2, "--save-kl and --kl-base exclude each other"),
    (["-f", "none.txt"], 1, "none.txt: cannot read it: No such file"),
    (["--save-kl", "/nowhere/base.kl", "--ctx", "64"], 1, "cannot write the base: No such file"),
])
def test_bad_input_is_one_line(score, arguments, code, message):
    found, captured = score(*arguments)
    lines = captured.err.splitlines()
    assert found == code and lines[-1].startswith("error: ") and message in lines[-1]
    assert [line for line in lines if not line.startswith("scoring")] == lines[-1:]
    assert captured.out == ""


def test_a_terminal_is_asked_for_a_text(score, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    code, captured = score(text=False)
    assert code == 2 and "give a text with -f or on stdin" in captured.err


def test_the_bar_shows_the_running_value_and_goes_away(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with WindowProgress(64) as progress:
        progress.advance(3, 20, Estimate(12.3456, 0.4))
    shown = capsys.readouterr().err
    assert "perplexity 12.3456 +/- 0.4000" in shown and "3/20" in shown


def test_ctrl_c_ends_it_and_leaves_no_half_a_base(path, tmp_path, subprocess_env):
    """In the middle of a long text, however it is waited for."""
    (tmp_path / "long.txt").write_text(TEXT * 400)
    process = subprocess.Popen(
        [sys.executable, "-m", "ignis", "perplexity", "-m", str(path), "-f", "long.txt",
         "--save-kl", "base.kl"], cwd=tmp_path, env=subprocess_env, stderr=subprocess.PIPE,
        stdout=subprocess.PIPE)
    try:
        end = time.monotonic() + 30
        while not list(tmp_path.glob(".base.kl.*")) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.3)
        out, err, seconds = interrupt(process)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, b"") and b"Traceback" not in err, err
    assert seconds < 0.5
    assert [entry.name for entry in tmp_path.iterdir()] == ["long.txt"]
