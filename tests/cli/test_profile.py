"""`ignis profile` names each step, and its times and work add up."""

import json

import pytest

import ignis
from ignis.cli.app import run_app
from ignis.errors import UsageError
from ignis.runtime.ceilings import Ceilings
from ignis.runtime.profile import profile_engine
from tests.random_models import write_random_model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("profile") / "m.gguf", n_ctx=64)


@pytest.fixture
def profiled(path, monkeypatch, capsys):
    """Run the command with known ceilings: measuring them takes 256 MB and half a second."""
    monkeypatch.setattr("ignis.runtime.ceilings.measure", lambda n: Ceilings(10.0, 100.0, 50.0))

    def run(*options):
        code = run_app(["profile", "-m", str(path), "--threads", "1", "--repeat", "2", *options])
        return code, capsys.readouterr()
    return run


def test_json_has_both_phases_and_shares_that_add_up(profiled):
    code, captured = profiled("--tokens", "40", "--json", "-q")
    assert code == 0 and captured.err == ""
    report = json.loads(captured.out)
    assert report["threads"] == 1 and report["ceilings"]["int8_gmac_s"] == 100
    for name, n_tokens, past in (("prefill", 40, 0), ("decode", 1, 40)):
        phase = report[name]
        assert (phase["tokens"], phase["past"]) == (n_tokens, past)
        assert sum(step["share"] for step in phase["steps"]) == pytest.approx(1, abs=1e-3)
        for amount in ("int8_macs", "f32_macs", "weight_bytes", "kv_bytes"):
            assert sum(step[amount] for step in phase["steps"]) == phase[amount] > 0


def test_table_names_steps_by_op_and_weight(profiled):
    code, captured = profiled("--tokens", "12")
    assert code == 0
    for label in ("matmul ffn_down", "logits token_embd", "atten", "embed"):
        assert any(line.startswith(label) for line in captured.out.splitlines()), label
    assert "prefill: 12 tokens behind 0" in captured.out
    assert "decode: 1 tokens behind 12" in captured.out


def test_more_tokens_than_the_context_is_one_line(profiled):
    code, captured = profiled("--tokens", "64", "-q")
    assert code == 1
    assert captured.err.startswith("error: profile: more tokens than the context holds")


def test_profiling_leaves_the_engine_usable(path):
    with ignis.load(path, threads=2) as model:
        before = model.logits([1, 2, 3])
        phases = profile_engine(model.engine, 8, n_runs=1, n_decode_runs=2)
        assert [phase.name for phase in phases] == ["prefill", "decode"]
        assert (model.logits([1, 2, 3]) == before).all()
        with pytest.raises(UsageError, match="does not take so many tokens"):
            profile_engine(model.engine, 513)
