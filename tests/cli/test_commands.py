"""If these break, `tokenize`, `bench`, `pull` or the chat no longer do what they say."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ignis import bench, hub
from ignis.cli import options
from ignis.cli.bench import table
from ignis.cli.progress import TerminalProgress
from ignis.errors import UsageError
from ignis.gguf import GGUFWriter, open_gguf
from tests.cli.conftest import FAKE
from tests.random_models import write_random_model

CEILINGS = SimpleNamespace(bandwidth_gb_s=10.0, int8_gmac_s=100.0, f32_gmac_s=20.0)


@pytest.fixture
def model(tmp_path):
    """A small file with every figure easy to reckon: 2 layers, width 64, 4 heads, 2 of keys."""
    writer = GGUFWriter(tmp_path / "small.gguf", "llama")
    for key, value in {"block_count": 2, "context_length": 128, "embedding_length": 64,
                       "feed_forward_length": 96, "attention.head_count": 4,
                       "attention.head_count_kv": 2}.items():
        writer.add(f"llama.{key}", value)
    writer.add("general.name", "small\x1b[31m")
    writer.add("tokenizer.ggml.model", "gpt2")
    writer.add("tokenizer.ggml.pre", "gpt-2")
    writer.add("tokenizer.ggml.tokens", ["a", "b", "c", "ab", "<|end|>"])
    writer.add("tokenizer.ggml.token_type", [1, 1, 1, 1, 3])
    writer.add("tokenizer.ggml.merges", ["a b"])
    writer.add("tokenizer.ggml.eos_token_id", 4)
    writer.add_tensor("token_embd.weight", np.zeros((5, 64), np.float32), "f16")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((96, 64), np.float32), "q8_0")
    writer.add_tensor("output.weight", np.zeros((5, 64), np.float32), "q8_0")
    writer.add_tensor("output_norm.weight", np.zeros(64, np.float32), "f32")
    writer.write()
    return tmp_path / "small.gguf"


def test_tokenize_prints_ids_in_one_line(call, model):
    """On a file without weights worth the name; pieces go to stderr."""
    result = call("tokenize", "-m", str(model), "abc<|end|>", "--special")
    assert (result.code, result.out) == (0, "3 2 4\n")
    assert result.err.split() == ["3", "'ab'", "2", "'c'", "4", "'<|end|>'"]
    assert call("tokenize", "-m", str(model), "--ids", stdin=b"ba\n").out == "1 0\n"


def test_tokenize_with_an_unknown_pre_tokenizer_is_one_line(call, model):
    result = call("tokenize", "-m", str(model), "--pre", "nonsense", "a")
    assert result.code == 1 and "nonsense" in result.error


def test_pull_prints_the_path_and_says_when_it_is_there(call, monkeypatch, tmp_path):
    entry = hub.CATALOGUE["smollm2"]
    path = entry.path(tmp_path / "cache" / "models")
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(entry.nbytes)     # sparse: only its size is looked at
    result = call("pull", "smollm2")
    assert (result.code, result.out, result.err) == (0, f"{path}\n", f"already there: {path}\n")
    assert call("pull", "-q", "SmolLM2").err == ""
    assert "nothing: unknown model" in call("pull", "nothing").error


def test_progress_without_a_terminal_is_a_line_a_phase(capsys):
    progress = TerminalProgress()
    for _ in range(2):
        progress.begin("fetching x", 3 << 20)
        progress.advance_to(1)
        progress.end()
    progress.finished(Path("p"))
    assert capsys.readouterr().err == "fetching x (3.0 MiB)\nsaved p\n"


def test_progress_on_a_terminal_draws_a_bar_and_removes_it(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    progress = TerminalProgress()
    progress.begin("fetching x", 2 << 20)
    progress.advance_to(1 << 20)
    progress.end()
    assert "fetching x" in capsys.readouterr().err


# ---------------------------------------------------------------------------------- bench


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A file with all weights of a model: the work of a step is counted from its graph."""
    return write_random_model(tmp_path_factory.mktemp("bench") / "m.gguf", n_ctx=128)


class FakeSequence:
    """Counts what it is fed; the clock is its own."""

    def __init__(self, log, engine, clock):
        self.log, self.engine, self.clock = log, engine, clock

    def feed(self, ids):
        self.log.append((self.engine, len(ids)))
        self.clock.now += 0.5 if len(ids) > 1 else 0.1
        return np.zeros(5, np.float32)

    def truncate(self, n_tokens):
        self.log.append((self.engine, "truncate"))


@pytest.fixture
def engines(monkeypatch, models):
    """Engines that take 0.5 s a prompt and 0.1 s a token; the log of what they were fed."""
    log, clock = [], SimpleNamespace(now=0.0)
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    import ignis
    load = ignis.__dict__["load"]

    def load_with_sequence(path, engine, **options):
        model = load(path, engine=engine, **options)
        model.new_sequence = lambda: FakeSequence(log, engine, clock)
        return model

    monkeypatch.setitem(ignis.__dict__, "load", load_with_sequence)
    return log


def test_engines_take_turns(engines, complete):
    bench.run_bench(complete, bench.BenchOptions(n_prompt=8, n_decode=1, n_repeat=2), None)
    assert [engine for engine, what in engines if what == "truncate"] == [
        "imperative", "graph",          # the warm-up
        "graph", "imperative", "imperative", "graph"]


def test_figures_are_tokens_over_seconds_and_shares_of_the_ceilings(engines, complete):
    result, = bench.run_bench(
        complete, bench.BenchOptions(("graph",), n_prompt=10, n_decode=4, n_repeat=3), CEILINGS)
    found = bench.as_json([result], CEILINGS)
    assert found["prefill"] == {"tokens": 10, "tok_s": 20.0, "min": 20.0, "max": 20.0}
    assert found["decode"]["tok_s"] == 10.0
    assert found["first_token_s"] == 0.5 and found["arena_bytes"] == 1024
    assert found["peak_memory_bytes"] > 1 << 20
    with open_gguf(complete) as file:
        work = bench.BenchWork.of(file, 10, 4)
    assert work.decode.kv_nbytes == 2 * 2 * (12 + 1) * 2 * 32 * 2   # in the middle of the run
    assert result.bandwidth_share == pytest.approx(10 * work.decode.nbytes / 10e9)
    assert result.arithmetic_share == pytest.approx(
        2 * (work.prefill.int8_macs / 100e9 + work.prefill.f32_macs / 20e9))
    assert found["ceilings"]["bandwidth_gb_s"] == 10.0


def test_several_engines_are_keyed_by_name_and_tabulated(engines, complete):
    options = bench.BenchOptions(n_prompt=8, n_decode=2, n_repeat=1)
    results = bench.run_bench(complete, options, None)
    assert list(bench.as_json(results, None)["engines"]) == ["graph", "imperative"]
    lines = table(results, CEILINGS)
    assert lines[0].split() == ["graph", "imperative"] and lines[1].startswith("prefill 8, tok/s")
    assert lines[-1] == "ceilings: 10.0 GB/s, 100.0 int8 GMAC/s, 20.0 f32 GMAC/s"


def test_a_bench_longer_than_the_context_names_both(engines, complete):
    with pytest.raises(UsageError, match="got 640, wanted at most 128"):
        bench.run_bench(complete, bench.BenchOptions(), None)


def test_the_prompt_is_the_same_in_every_run():
    assert bench.prompt_ids(4, 1000) == bench.prompt_ids(4, 1000)
    assert max(bench.prompt_ids(500, 7)) == 6


def test_an_unknown_engine_is_one_line(call):
    assert "'steam' is not one of graph, imperative, reference" in call(
        "bench", "--engine", "graph,steam").error


# ----------------------------------------------------------------------------------- chat


class Terminal:
    """The chat at the other end of a pseudo-terminal."""

    def __init__(self, env):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen([sys.executable, FAKE, "run", "-m", "x.gguf"], stdin=slave,
                                        stdout=slave, stderr=slave, env=env,
                                        start_new_session=True)
        os.close(slave)
        self.seen = ""

    def wait_for(self, text):
        deadline = time.monotonic() + 10
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            self.seen += os.read(self.master, 4096).decode()
        self.seen = self.seen.split(text, 1)[1]

    def type(self, text):
        os.write(self.master, text.encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(subprocess_env, tmp_path):
    terminal = Terminal({**subprocess_env, "IGNIS_CACHE_DIR": str(tmp_path), "TERM": "dumb"})
    yield terminal
    terminal.close()


def test_chat_takes_turns_and_survives_errors(terminal):
    terminal.wait_for(">>> ")
    terminal.type("hello you\n")
    terminal.wait_for("hello you \r\n[2 prompt tok")
    terminal.wait_for(">>> ")
    terminal.type("LONG\n")
    terminal.wait_for("error: the prompt is longer than the context")
    terminal.wait_for(">>> ")
    terminal.type("/bye\n")
    assert terminal.process.wait(timeout=10) == 0


def test_ctrl_c_ends_the_answer_and_then_the_chat(terminal):
    terminal.wait_for(">>> ")
    terminal.type("so SLOW\n")
    terminal.wait_for("so SLOW\r\nso ")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for(">>> ")
    # A signal between readline's prompt and its wait for keys is noticed with the next one only.
    for _ in range(50):
        terminal.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # On a busy machine the next one may find the interpreter on its way out already.
            assert terminal.process.wait(timeout=0.2) in (130, -signal.SIGINT)
            return
    pytest.fail("the chat goes on")


def test_end_of_input_leaves_the_chat(terminal):
    terminal.wait_for(">>> ")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=10) == 0


def test_the_conversation_is_handed_on_turn_by_turn(models, monkeypatch):
    from ignis.cli import chat, run
    from tests.cli import fake_ignis
    lines = iter(["one", "", "two", "/clear", "three", "/bye"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    loaded = fake_ignis.load("x.gguf")
    wanted = run.RunOptions(None, "sys", False, False, False, True, {"max_tokens": 9, "stop": []})
    assert chat.chat(loaded, wanted) == 0
    conversations = [[m["content"] for m in call[1]] for call in loaded.calls]
    assert conversations == [["sys", "one"], ["sys", "one", "one ", "two"], ["sys", "three"]]


def test_text_of_a_closed_file_is_an_error_not_a_traceback(tmp_path):
    with pytest.raises(UsageError, match="cannot read it: Is a directory"):
        options.read_text(tmp_path)
